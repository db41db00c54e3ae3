"""Names of parameters: the one place that knows what they mean.

A parameter is known by its path in the tree, written as
`blocks/attention/query/kernel`. From the path alone follows whether a matrix is hidden
(between layers, so that Muon may orthogonalize it) and whether the leaf stacks one
array per layer along its first axis. Trees that belong to parameters, such as masks,
find theirs by name too; what a name means, only this module knows.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

PyTree = Any

# Modules under this name hold all layers at once: leaves are `[layers, ...]`.
STACKED = "blocks"

# Whole path segments that name something other than a hidden matrix. Whole, so that
# "norm" does not catch "normal", nor "head" the "multi_head_attention" around it.
_NOT_HIDDEN = re.compile(
    r"""(\w+_)?(un)?emb(ed(s|der|ding|dings)?)?(_\w+)?  # embed_tokens, tok_emb, ...
    | wte | wpe | (\w+_)?vocab(_\w+)? | (?-i:W_(E|U|pos))  # TransformerLens
    | (\w+_)?pos(ition(s|al)?)?(_(bias|table|encodings?))*
    | (\w+_)?(cls|class|mask|register|dist)_tokens?
    | (\w+_)?head(_\d+)? | lm_head_\w+
    | (to_)?logits(_\w+)? | classifier(_\w+)? | readout
    | (\w+_)?(layer|rms|batch|group)?_?norms?(_?\d+|_f)? | ln(_?\w)?
    | router(_\w+)?
    | (\w+_)?bias | scale""",
    re.VERBOSE | re.IGNORECASE,
)

# Llama calls its head "output", as others call the last layer of each attention block.
_LLAMA_HEAD = re.compile(r"((params|model)/)?output(/(kernel|weight|w))?")


def name(path: Sequence[Any]) -> str:
    """The key path of a leaf as text, without the `value` of a `flax.nnx.Variable`.

    >>> import jax
    >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({"blocks": [{"kernel": 0}]})
    >>> name(path)
    'blocks/0/kernel'
    """
    path = tuple(path)
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def absent(x: Any) -> bool:
    """Whether a node of a tree holds no leaf: None, `optax.MaskedNode`, an empty dict.

    >>> absent(None), absent({"a": ()}), absent(0)
    (True, True, False)
    """
    return jax.tree.structure(x).num_leaves == 0


def leaves_of(tree: PyTree, is_leaf: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """Names and leaves of a tree in which None is a leaf too."""
    stop = lambda x: x is None or is_leaf(x)
    leaves = jax.tree.leaves_with_path(tree, is_leaf=stop)
    return [(name(path), x) for path, x in leaves]


def match(
    entries: PyTree, params: PyTree, is_entry: Callable[[Any], bool], what: str
) -> dict[str, Any]:
    """The entry of each parameter, found by name, whatever kinds of containers hold it.

    An entry in the place of a subtree is one for each parameter in it. What `params`
    masks out may have an entry all the same.

    >>> numbers = {"mlp": 1, "embed": 2}
    >>> match(numbers, {"embed": 0.0, "mlp": (0.0, 0.0)}, lambda x: False, "numbers")
    {'embed': 2, 'mlp/0': 1, 'mlp/1': 1}

    Args:
        entries: a tree of entries.
        params: a tree of parameters.
        is_entry: whether a node of `entries` that has children is an entry.
        what: what the entries are called in errors.

    Returns:
        An entry for the name of each leaf of `params`.

    Raises:
        ValueError: if a parameter has no entry, or an entry no parameter, or two
            parameters have one name.
    """
    found = dict(leaves_of(entries, is_entry))
    nodes = jax.tree.leaves_with_path(params, is_leaf=absent)
    leaves = [name(path) for path, x in nodes if not absent(x)]
    if twice := [leaf for leaf, times in Counter(leaves).items() if times > 1]:
        raise ValueError(f"two parameters are called {', '.join(twice)}")
    hidden = [name(path) for path, x in nodes if absent(x)]
    owner = {leaf: _owner(leaf, found) for leaf in leaves}
    missing = [leaf for leaf, entry in owner.items() if entry is None]
    unused = [
        entry
        for entry in found.keys() - owner.values()
        if _owner(entry, hidden) is None and not _owner_of_any(entry, hidden)
    ]
    if missing or unused:
        texts = []
        if missing:
            texts.append(f"no entry for {listed(missing)}")
        if unused:
            texts.append(
                f"an entry for {listed(sorted(unused))}, which is no parameter"
            )
        raise ValueError(f"{what} has {' and '.join(texts)}")
    return {leaf: found[entry] for leaf, entry in owner.items() if entry is not None}


def by_name(entries: Mapping[str, Any], params: PyTree) -> PyTree:
    """A tree like `params` of the entry for the name of each leaf.

    >>> by_name({"a": 1, "b/0": 2}, {"a": 0.0, "b": [0.0]})
    {'a': 1, 'b': [2]}
    """
    entry = lambda path, _: entries[name(path)]
    return jax.tree_util.tree_map_with_path(entry, params)


def check_like(updates: PyTree, params: PyTree, of: str, hint: str = "") -> None:
    """Checks that gradients are of the names and shapes of parameters.

    Args:
        updates: gradients.
        params: the parameters, or what is kept of them in a state.
        of: what `params` are called in errors.
        hint: what may be wrong.

    Raises:
        ValueError: naming those that are on one side only, or of another shape.
    """
    shapes = lambda tree: {name(p): x.shape for p, x in jax.tree.leaves_with_path(tree)}
    given, kept = shapes(updates), shapes(params)
    if extra := sorted(given.keys() - kept.keys()):
        raise ValueError(f"there are gradients but no {of} of {listed(extra)}{hint}")
    if missing := sorted(kept.keys() - given.keys()):
        raise ValueError(f"there are {of} but no gradients of {listed(missing)}{hint}")
    for path, shape in kept.items():
        if given[path] != shape:
            raise ValueError(
                f"the gradient of {path} has shape {given[path]}, but its {of} {shape}"
            )


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names for an error, and how many more there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c"], most=1)
    ('a, b', 'a and 2 more')
    """
    rest = len(names) - most
    text = ", ".join(names[:most])
    return f"{text} and {rest} more" if rest > 0 else text


def is_leaf(x: Any) -> bool:
    """Whether a tree is a leaf itself.

    >>> is_leaf(1.0), is_leaf({"a": 1.0})
    (True, False)
    """
    return jax.tree_util.treedef_is_leaf(jax.tree.structure(x))


def _owner(path, prefixes):
    """The longest of some paths that is `path` or leads to it."""
    segments = path.split("/")
    for stop in range(len(segments), 0, -1):
        if (prefix := "/".join(segments[:stop])) in prefixes:
            return prefix
    return "" if "" in prefixes else None


def _owner_of_any(prefix, paths):
    return any(_owner(path, (prefix,)) is not None for path in paths)


def is_stacked(path: str) -> bool:
    """Whether the first axis of the leaf at `path` counts layers.

    >>> is_stacked("blocks/mlp/up/kernel"), is_stacked("blocks/0/mlp/up/kernel")
    (True, False)
    """
    segments = path.split("/")
    if STACKED not in segments:
        return False
    following = segments[segments.index(STACKED) + 1 :]
    return not (following and following[0][-1].isdigit())


def may_be_hidden(path: str) -> bool:
    """Whether no part of `path` names an embedding, head, norm, router, bias or scale.

    >>> may_be_hidden("blocks/attention/query/kernel"), may_be_hidden("lm_head/kernel")
    (True, False)
    """
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", path)
    if _LLAMA_HEAD.fullmatch(snake):
        return False
    return not any(map(_NOT_HIDDEN.fullmatch, snake.split("/")))
