"""Muon as optax transformations, and which parameters it gets.

Muon replaces the momentum of a hidden matrix by its nearest orthogonal matrix, scaled
by a factor of the matrix's shape; every other parameter gets Adam. This module hides
the routing (by name, through `tree`), the layouts of matrices inside leaves, and the
factors.

References:
    Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon>`_, 2024
    Liu et al., `Muon is Scalable for LLM Training <https://arxiv.org/abs/2502.16982>`_,
    2025 (Moonlight)
    Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from optax.contrib import MuonDimensionNumbers

from muloco_jax import newton_schulz, tree

PyTree = Any
Factor = Callable[[int, int], float]
Coefficients = newton_schulz.Coefficients | Sequence[Sequence[float]]

# Kernels are `[..., fan_in, fan_out]`; axes in front are a batch of matrices.
MATRIX = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)


def spectral(fan_in: int, fan_out: int) -> float:
    """`sqrt(fan_out / fan_in)`: updates of unit RMS-to-RMS operator norm (the paper's).

    >>> spectral(64, 256)
    2.0
    """
    return math.sqrt(fan_out / fan_in)


def width(fan_in: int, fan_out: int) -> float:
    """`sqrt(max(1, fan_out / fan_in))` (Jordan et al., 2024).

    >>> width(64, 256), width(256, 64)
    (2.0, 1.0)
    """
    return math.sqrt(max(1.0, fan_out / fan_in))


def match_rms_adamw(fan_in: int, fan_out: int) -> float:
    """`0.2 sqrt(max(fan_in, fan_out))`: updates of RMS 0.2, like AdamW's.

    Moonlight, equation 4.

    >>> match_rms_adamw(25, 100)
    2.0
    """
    return 0.2 * math.sqrt(max(fan_in, fan_out))


def _is_numbers(x: Any) -> bool:
    return x is None or isinstance(x, MuonDimensionNumbers)


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

    def leaf(path, x):
        name = tree.name(path)
        axes = jnp.ndim(x) - tree.is_stacked(name)
        if axes < 2 or not tree.may_be_hidden(name):
            return None
        if axes > 2:
            raise ValueError(
                f"{name} has shape {jnp.shape(x)}, and no rule says which axes are "
                f"fan-in and fan-out; pass muon_weight_dimension_numbers with a "
                f"MuonDimensionNumbers (Muon) or None (Adam) for it"
            )
        return MATRIX

    return jax.tree_util.tree_map_with_path(leaf, params)


class MuonState(NamedTuple):
    """What Muon remembers.

    Attributes:
        count: updates so far, int32 [].
        mu: momentum, a tree like the parameters, of fixed dtype.
    """

    count: jax.Array
    mu: PyTree


def scale_by_muon(
    beta: float = 0.9,
    nesterov: bool = False,
    ns_coeffs: Coefficients = newton_schulz.DION,
    scale: Factor = spectral,
    *,
    eps: float = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_dimension_numbers: PyTree | Callable[[PyTree], PyTree] = hidden_matrices,
) -> optax.GradientTransformation:
    """Orthogonalized heavy-ball momentum, for trees whose leaves are all matrices.

    `M <- beta M + G`, then `scale(fan_in, fan_out) * orthogonalize(M)`, or of
    `beta M + G` with Nesterov momentum. To leave out what is no matrix, use `muon`, or
    `optax.masked` or `optax.partition` around this.

    Args:
        beta: decay of the momentum, in [0, 1).
        nesterov: whether to look ahead by one gradient.
        ns_coeffs: rows of the Newton-Schulz iteration.
        scale: factor of an update, a function of `(fan_in, fan_out)`.
        eps: added to the Frobenius norm before the iteration.
        mu_dtype: of the momentum; by default that of the parameters.
        weight_dimension_numbers: a `MuonDimensionNumbers` per leaf, as a tree or a
            function of the parameters.

    Raises:
        ValueError: at construction for a `beta` outside [0, 1) or bad coefficients; at
            `init` and `update` for a leaf without two groups of matrix axes.
    """
    _check_range("beta", beta, 1)
    _check_range("eps", eps)
    coefficients = newton_schulz.coefficients_of(ns_coeffs)

    def init(params):
        jax.tree_util.tree_map_with_path(
            lambda path, n, x: _matrix_axes(tree.name(path), n, jnp.shape(x)),
            _resolved(weight_dimension_numbers, params),
            params,
            is_leaf=_is_numbers,
        )
        return MuonState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=mu_dtype),
        )

    def update(updates, state, params=None):
        del params
        wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
        momentum = lambda g, m: beta * wide(m) + wide(g)
        mu = jax.tree.map(momentum, updates, state.mu)
        ahead = jax.tree.map(momentum, updates, mu) if nesterov else mu

        def leaf(path, numbers, x, gradient):
            axes = _matrix_axes(tree.name(path), numbers, x.shape)
            matrices, restore = _as_matrices(x, *axes)
            ortho = newton_schulz.orthogonalize(matrices, coefficients, eps=eps)
            factor = scale(*_fans(x.shape, axes))
            return restore(factor * ortho).astype(gradient.dtype)

        numbers = _resolved(weight_dimension_numbers, updates)
        directions = jax.tree_util.tree_map_with_path(
            leaf, numbers, ahead, updates, is_leaf=_is_numbers
        )
        mu = jax.tree.map(lambda new, old: new.astype(old.dtype), mu, state.mu)
        return directions, MuonState(state.count + 1, mu)

    return optax.GradientTransformation(init, update)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Coefficients = newton_schulz.DION,
    ns_steps: int | None = None,
    beta: float = 0.9,
    eps: float = 0.0,
    weight_decay: float = 0.0,
    weight_decay_mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = False,
    scale: Factor = spectral,
    adam_b1: float = 0.9,
    adam_b2: float = 0.99,
    adam_eps: float = 1e-8,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_weight_decay: float | None = None,
    muon_weight_dimension_numbers: PyTree
    | Callable[[PyTree], PyTree] = hidden_matrices,
) -> optax.GradientTransformation:
    """Muon on the hidden matrices and AdamW on everything else.

    The defaults are the MuLoCo paper's (but `eps`, which its code has at 1e-8):
    heavy-ball momentum, the coefficients of Dion, the factor `sqrt(fan_out / fan_in)`,
    and one learning rate and one decoupled weight decay (scaled by the learning rate
    alone) for both sides.

    `optax.inject_hyperparams` takes every callable for a schedule; tell it which are
    not: `optax.inject_hyperparams(muon, static_args=("ns_coeffs", "ns_steps", "scale",
    "muon_weight_dimension_numbers"))`.

    >>> import jax.numpy as jnp, optax
    >>> params = {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}
    >>> optimizer = muon(0.1)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(params, state, params)

    Args:
        learning_rate: of both sides, a float or a schedule over updates.
        ns_coeffs: rows of the Newton-Schulz iteration, see `orthogonalize`.
        ns_steps: None, or the number of rows: a list of rows is never cut.
        beta: decay of Muon's momentum.
        eps: added to the Frobenius norm before the iteration.
        weight_decay: decoupled weight decay of both sides.
        weight_decay_mask: which parameters decay, see `optax.adamw`; None: all.
        mu_dtype: of both sides' first moment; by default that of the parameters.
        nesterov: whether Muon's momentum looks ahead. The Adam side never does.
        scale: Muon's factor of `(fan_in, fan_out)`.
        adam_b1: decay of Adam's first moment.
        adam_b2: decay of Adam's second moment.
        adam_eps: added to the root of Adam's second moment.
        adam_learning_rate: of the Adam side; None: `learning_rate`.
        adam_weight_decay: of the Adam side; None: `weight_decay`.
        muon_weight_dimension_numbers: what Muon gets: a tree like the parameters of
            `optax.contrib.MuonDimensionNumbers` (Muon) or None (Adam), or a function
            from parameters to one.

    Raises:
        ValueError: at construction for values out of range, at `init` for a parameter
            that cannot be routed.
    """
    rows = newton_schulz.coefficients_of(ns_coeffs).rows
    if ns_steps is not None and ns_steps != len(rows):
        raise ValueError(
            f"ns_steps is {ns_steps}, but ns_coeffs has {len(rows)} rows, which are "
            f"tuned as a sequence; leave ns_steps out or pass a list of {ns_steps} rows"
        )
    _check_range("weight_decay", weight_decay)
    for name, value in (("adam_b1", adam_b1), ("adam_b2", adam_b2)):
        _check_range(name, value, 1)
    _check_range("adam_eps", adam_eps)

    def labels(params):
        numbers = _resolved(muon_weight_dimension_numbers, params)
        return jax.tree.map(_side, numbers, is_leaf=_is_numbers)

    def only_matrices(params):  # Under `partition`, other leaves are MaskedNodes.
        absent = lambda x: isinstance(x, optax.MaskedNode)
        keep = lambda x, numbers: x if absent(x) else numbers
        numbers = _resolved(muon_weight_dimension_numbers, params)
        return jax.tree.map(keep, params, numbers, is_leaf=absent)

    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    decays = _decays(weight_decay, adam_weight_decay)
    matrices = optax.chain(
        scale_by_muon(
            beta,
            nesterov,
            ns_coeffs,
            scale,
            eps=eps,
            mu_dtype=mu_dtype,
            weight_dimension_numbers=only_matrices,
        ),
        optax.add_decayed_weights(decays["muon"], weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adam = optax.adamw(
        adam_learning_rate,
        adam_b1,
        adam_b2,
        adam_eps,
        mu_dtype=mu_dtype,
        weight_decay=decays["adam"],
        mask=weight_decay_mask,
    )
    return optax.partition({"muon": matrices, "adam": adam}, labels)


class Route(NamedTuple):
    """What `muon` does to a parameter.

    Attributes:
        path: of the parameter in the tree.
        shape: of the parameter.
        side: "muon" or "adam".
        fan_in: of the matrix that Muon sees; None for Adam.
        fan_out: of the matrix that Muon sees; None for Adam.
        factor: of the learning rate; 1 for Adam.
        decay: weight decay, to be multiplied by the learning rate alone.
    """

    path: str
    shape: tuple[int, ...]
    side: str
    fan_in: int | None
    fan_out: int | None
    factor: float
    decay: float


def routing_table(
    params: PyTree,
    *,
    scale: Factor = spectral,
    weight_decay: float = 0.0,
    weight_decay_mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    adam_weight_decay: float | None = None,
    muon_weight_dimension_numbers: PyTree
    | Callable[[PyTree], PyTree] = hidden_matrices,
) -> list[Route]:
    """What `muon` with the same keywords would do to each parameter.

    >>> import jax.numpy as jnp
    >>> params = {"embed": jnp.ones((9, 4)), "up": jnp.ones((4, 16))}
    >>> for route in routing_table(params, weight_decay=0.1):
    ...     print(*route)
    embed (9, 4) adam None None 1.0 0.1
    up (4, 16) muon 4 16 2.0 0.1

    Args:
        params: arrays or their shapes.
        scale: see `muon`, as all that follow.
        weight_decay: of both sides.
        weight_decay_mask: which parameters decay; None: all.
        adam_weight_decay: of the Adam side; None: `weight_decay`.
        muon_weight_dimension_numbers: what Muon gets.

    Returns:
        One row per parameter, in the order of the tree.

    Raises:
        ValueError: for a parameter that cannot be routed.
    """
    numbers = _resolved(muon_weight_dimension_numbers, params)
    mask = True if weight_decay_mask is None else _resolved(weight_decay_mask, params)
    decays = _decays(weight_decay, adam_weight_decay)

    def leaf(path, x, numbers, may_decay):
        name, side = tree.name(path), _side(numbers)
        fan_in, fan_out, factor = None, None, 1.0
        if side == "muon":
            fan_in, fan_out = _fans(x.shape, _matrix_axes(name, numbers, x.shape))
            factor = scale(fan_in, fan_out)
        decay = decays[side] if may_decay else 0.0
        return Route(name, x.shape, side, fan_in, fan_out, factor, decay)

    routes = jax.tree_util.tree_map_with_path(
        leaf, params, numbers, jax.tree.broadcast(mask, params)
    )
    return jax.tree.leaves(routes, is_leaf=lambda x: isinstance(x, Route))


def _resolved(value, params):
    """A tree that may be given as a function of the parameters."""
    return value(params) if callable(value) else value


def _side(numbers):
    return "adam" if numbers is None else "muon"


def _decays(weight_decay, adam_weight_decay):
    adam = weight_decay if adam_weight_decay is None else adam_weight_decay
    return {"muon": weight_decay, "adam": adam}


def _check_range(name, value, below=math.inf):
    """Refuses a number outside [0, below); what is traced cannot be looked at."""
    if isinstance(value, int | float | np.number) and not 0 <= value < below:
        raise ValueError(f"{name} must be in [0, {below}), got {value}")


def _matrix_axes(name, numbers, shape):
    """The axes of fan-in and of fan-out as two tuples of non-negative ints."""
    if numbers is None:
        raise ValueError(
            f"{name} with shape {shape} is no hidden matrix, so Muon cannot take it; "
            f"use muon(...), which gives it to Adam, or mask it out"
        )
    groups = []
    for axis in numbers:
        axes = axis if isinstance(axis, Sequence) else (axis,)
        if not axes or any(not -len(shape) <= a < len(shape) for a in axes):
            raise ValueError(f"{name} with shape {shape} has no axes {numbers}")
        groups.append(tuple(a % len(shape) for a in axes))
    fan_in, fan_out = groups
    if len({*fan_in, *fan_out}) != len(fan_in) + len(fan_out):
        raise ValueError(
            f"{name} with shape {shape}: an axis stands twice in {numbers}"
        )
    return fan_in, fan_out


def _fans(shape, axes):
    """Fan-in and fan-out, from the axes of each."""
    fan_in, fan_out = (math.prod(shape[a] for a in group) for group in axes)
    return fan_in, fan_out


def _as_matrices(x, in_axes, out_axes):
    """`x` as `[..., fan_in, fan_out]`, and the function that undoes it."""
    batch = tuple(a for a in range(x.ndim) if a not in in_axes + out_axes)
    order = batch + in_axes + out_axes
    moved = x.transpose(order)
    fans = _fans(x.shape, (in_axes, out_axes))
    matrices = moved.reshape(*moved.shape[: len(batch)], *fans)
    inverse = [order.index(a) for a in range(x.ndim)]
    return matrices, lambda y: y.reshape(moved.shape).transpose(inverse)
