"""Names of parameters: the one place that knows what they mean.

A parameter is known by its path in the tree, written as
`blocks/attention/query/kernel`. From the path alone follows whether a matrix is hidden
(between layers, so that Muon may orthogonalize it) and whether the leaf stacks one
array per layer along its first axis. Nothing else in the library looks at names.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax

PyTree = Any

# Modules under this name hold all layers at once: leaves are `[layers, ...]`.
STACKED = "blocks"

# Whole path segments that name something other than a hidden matrix. Whole, so that
# "head" does not catch "multi_head" nor "norm" something like "normal".
_NOT_HIDDEN = re.compile(
    r"""(\w+_)?(un)?emb(ed(s|der|ding|dings)?)?(_\w+)?  # embed_tokens, tok_emb, ...
    | wte | wpe
    | (\w+_)?head(_\d+)? | lm_head_\w+
    | (to_)?logits(_\w+)? | classifier(_\w+)? | readout
    | (\w+_)?(layer|rms|batch|group)?_?norms?(_?\d+|_f)? | ln(_?\w)?
    | router(_\w+)?
    | bias | scale""",
    re.VERBOSE | re.IGNORECASE,
)

# Llama calls its head "output", as others call the last layer of each attention block.
_LLAMA_HEAD = re.compile(r"((params|model)/)?output(/(kernel|weight|w))?")


def name(path: Sequence[Any]) -> str:
    """The key path of a leaf as text.

    >>> import jax
    >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({"blocks": [{"kernel": 0}]})
    >>> name(path)
    'blocks/0/kernel'
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


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
