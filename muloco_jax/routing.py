"""Which parameters Muon gets.

`MuonDimensionNumbers` give a parameter to Muon, None gives it to the other optimizer.
This module hides how they are found and checked: by name, through `tree`.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from muloco_jax import layouts, tree

PyTree = Any
Numbers = PyTree | Callable[[PyTree], PyTree]

# Kernels are `[..., fan_in, fan_out]`; axes in front are a batch of matrices.
MATRIX = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)


def hidden_matrices(params: PyTree) -> PyTree:
    """Routes parameters by name: hidden matrices to Muon, all the rest to Adam.

    A leaf is a hidden matrix if it has two axes (besides the layer axis of leaves under
    "blocks") and no part of its path names an embedding, a head, a norm or a router, as
    `embed_tokens`, `lm_head`, `q_norm` do. Look at the result once for your own names.
    Kernels are taken to be `[fan_in, fan_out]`, as flax has them.

    >>> import jax.numpy as jnp
    >>> params = {"embed": jnp.ones((9, 4)), "up": jnp.ones((4, 8))}
    >>> hidden_matrices(params)["up"], hidden_matrices(params)["embed"]
    (MuonDimensionNumbers(reduction_axis=-2, output_axis=-1), None)

    Returns:
        The tree of `params` with a `MuonDimensionNumbers` (Muon) or None (Adam) per
        leaf.

    Raises:
        ValueError: if a leaf has more axes than a matrix has.
    """
    _refuse_count(params, "hidden_matrices")

    unclear = {}

    def leaf(path, x):
        name = tree.name(path)
        axes = jnp.ndim(x) - tree.is_stacked(name)
        if axes < 2 or not tree.may_be_hidden(name):
            return None
        if axes > 2:
            unclear[name] = jnp.shape(x)
        return MATRIX

    numbers = jax.tree_util.tree_map_with_path(leaf, params)
    if unclear:
        shapes = [f"{name} has shape {shape}" for name, shape in unclear.items()]
        # One for all layers.
        patterns = [re.sub(r"\d+", r"\\d+", re.escape(name)) for name in unclear]
        keys = [f"r'{pattern}'" for pattern in dict.fromkeys(patterns)]
        raise ValueError(
            f"{tree.listed(shapes)}: more axes than a matrix has, and no rule says "
            f"which of them are fan-in and fan-out; pass "
            f"muon_weight_dimension_numbers=mj.rules({{key: "
            f"MuonDimensionNumbers(reduction_axis=..., output_axis=...)}}), or None "
            f"for Adam, with the keys {tree.listed(keys)}"
        )
    return numbers


def by_ndim(params: PyTree) -> PyTree:
    """Routes what has two axes to Muon and all the rest to Adam, as optax does.

    Embeddings and heads have two axes too, and layers stacked along a first axis have
    three: prefer `hidden_matrices`, or `rules`.

    >>> import jax.numpy as jnp
    >>> by_ndim({"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)})["bias"]
    """
    _refuse_count(params, "by_ndim")
    return jax.tree.map(lambda x: MATRIX if jnp.ndim(x) == 2 else None, params)


def rules(
    patterns: Mapping[str, Any], otherwise: Numbers = hidden_matrices
) -> Callable[[PyTree], PyTree]:
    r"""Routes parameters by regular expressions for their whole path.

    >>> import jax.numpy as jnp
    >>> params = {"conv": jnp.ones((3, 3, 4, 8)), "up": jnp.ones((4, 8))}
    >>> route = rules({r"conv(/.*)?": MuonDimensionNumbers((0, 1, 2), 3)})
    >>> route(params)["conv"]
    MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=3)

    Args:
        patterns: regular expression to `MuonDimensionNumbers`, `SplitDimensionNumbers`
            or None (Adam). The first that matches a path, such as
            `blocks/attention/query/kernel`, from end to end decides.
        otherwise: what decides on all other parameters.

    Returns:
        A function of parameters for `muon_weight_dimension_numbers`.

    Raises:
        ValueError: at construction for a bad pattern or value; at use for a pattern
            that matches no parameter.
    """
    for pattern, numbers in patterns.items():
        if not is_numbers(numbers):
            raise ValueError(_not_numbers(f"the rule {pattern!r}", numbers))
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None

    def route(params):
        _refuse_count(params, "rules")
        if tree.absent(params):
            return params
        nodes = jax.tree.leaves_with_path(params, is_leaf=tree.absent)
        paths = [tree.name(path) for path, _ in nodes]
        ruled = {}
        for pattern, numbers in patterns.items():
            matched = [path for path in paths if re.fullmatch(pattern, path)]
            if not matched:
                near = difflib.get_close_matches(pattern, paths, n=8, cutoff=0.0)
                raise ValueError(
                    f"the rule {pattern!r} matches no parameter; a rule has to match a "
                    f"path from end to end, as of {tree.listed(near)}"
                )
            ruled = dict.fromkeys(matched, numbers) | ruled
        rest = jax.tree_util.tree_map_with_path(
            lambda path, x: None if tree.name(path) in ruled else x, params
        )
        return tree.by_name(resolve(otherwise, rest) | ruled, params)

    return route


def route(numbers: Numbers, params: PyTree) -> list[layouts.Leaf]:
    """Where each parameter goes, in the order of the tree.

    Args:
        numbers: `MuonDimensionNumbers`, `SplitDimensionNumbers` or None per parameter,
            for a subtree or for all; as a tree or as a function of the parameters.
        params: arrays, or their shapes and dtypes.

    Raises:
        ValueError: naming the parameters that have no numbers or wrong ones, or are no
            arrays of an inexact dtype.
    """
    leaves = []
    entries = resolve(numbers, params)
    for path, x in jax.tree.leaves_with_path(params):
        name = tree.name(path)
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise ValueError(
                f"{name} is {x!r}, a {type(x).__name__}; parameters must be arrays"
            )
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ValueError(
                f"{name} has dtype {x.dtype}; parameters must be floating or complex: "
                f"mask it out with optax.masked"
            )
        entry = entries[name]
        layout = None if entry is None else layouts.of(name, x.shape, entry)
        leaves.append(layouts.Leaf(name, x, layout))
    return leaves


def resolve(numbers: Numbers, params: PyTree) -> dict[str, Any]:
    """The numbers of each parameter by name, see `route`."""
    if callable(numbers):
        numbers = numbers(params)
    what = "muon_weight_dimension_numbers"
    for path, entry in tree.leaves_of(numbers, _is_entry):
        if not is_numbers(entry):
            raise ValueError(_not_numbers(f"{what} {path}".rstrip(), entry))
    return tree.match(numbers, params, is_numbers, what)


def is_numbers(x: Any) -> bool:
    """Whether this routes a parameter, or all of a subtree."""
    kinds = MuonDimensionNumbers | layouts.SplitDimensionNumbers
    return x is None or isinstance(x, kinds)


def _is_entry(x):
    """Numbers, or axes alone, which is an error of its own."""
    axes = isinstance(x, tuple | list) and x and all(isinstance(i, int) for i in x)
    return is_numbers(x) or bool(axes)


def _not_numbers(where, entry):
    hint = "MuonDimensionNumbers(reduction_axis=0, output_axis=1)"
    if hasattr(entry, "dtype"):
        hint += "; under optax.inject_hyperparams pass static_args=mj.STATIC_ARGS"
    return (
        f"{where} must be MuonDimensionNumbers, SplitDimensionNumbers or None, as "
        f"{hint}; got {entry!r}"
    )


def _refuse_count(params, function):
    """Tells a step count from parameters: what `inject_hyperparams` calls us with."""
    if getattr(params, "shape", None) == () and jnp.issubdtype(
        params.dtype, jnp.integer
    ):
        raise ValueError(
            f"{function} was called with a step count: optax.inject_hyperparams takes "
            f"every callable for a schedule; pass static_args=mj.STATIC_ARGS"
        )
