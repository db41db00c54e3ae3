"""Which parameters synchronize when: fragments of the parameter tree, and the schedule.

A fragment says for each leaf whether it takes nothing of it, all of it, or some layers
of it. It is a prefix tree of the parameters, of `False`, `True`, or numpy arrays of
indices into the leading axis; `True` alone is everything. What a fragment takes of a
tree is that tree with None for what it does not take, so that names survive, and the
whole is the tree itself.

The schedule is plain data on the host: a round is a list of segments.

References:
    Douillard et al., `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from muloco_jax import tree as tree_lib

PyTree = Any
Fragment = PyTree  # A prefix of the parameters, of False, True or indices `[layers]`.


def whole(params: PyTree) -> list[Fragment]:
    """One fragment with everything: DiLoCo without streaming.

    >>> whole({"up": 1.0, "down": 2.0})
    [True]
    """
    del params
    return [True]


def check(fragments: Sequence[Fragment], params: PyTree) -> None:
    """Checks that every parameter syncs, and once a round.

    Raises:
        ValueError: naming a leaf, or a layer of one, that is in no fragment or in two.
    """
    spread = lambda which, subtree: jax.tree.map(lambda _: which, subtree)
    trees = [jax.tree.map(spread, fragment, params) for fragment in fragments]

    def leaf(path, x, *parts):
        name, layered = tree_lib.name(path), any(map(_is_indices, parts))
        counts = np.zeros(len(x) if layered else 1, int)
        for part in parts:
            if not _is_indices(part):
                counts += part
            elif part.size and not 0 <= part.min() <= part.max() < len(x):
                raise ValueError(
                    f"a fragment takes layers {part} of {name}, which has {len(x)}"
                )
            else:
                np.add.at(counts, part, 1)
        for layer in np.flatnonzero(counts != 1):
            where = f"layer {layer} of {name}" if layered else name
            raise ValueError(
                f"{where} is in {counts[layer]} of {len(parts)} fragments; every "
                f"parameter must be in exactly one"
            )

    jax.tree_util.tree_map_with_path(leaf, params, *trees)


def take(tree: PyTree, fragment: Fragment) -> PyTree:
    """The part of `tree` that is in `fragment`, with None for leaves that are not.

    >>> take({"up": 1.0, "down": 2.0}, {"up": True, "down": False})
    {'down': None, 'up': 1.0}
    """

    def leaf(which, x):
        if _is_indices(which):
            return x[which]
        return x if which else None

    return jax.tree.map(leaf, fragment, tree)


def put(tree: PyTree, part: PyTree, fragment: Fragment) -> PyTree:
    """Inverse of `take`: `tree` with the leaves that are in `fragment` from `part`.

    >>> part, fragment = {"up": 3.0, "down": None}, {"up": True, "down": False}
    >>> put({"up": 1.0, "down": 2.0}, part, fragment)
    {'down': 2.0, 'up': 3.0}
    """

    def leaf(which, x, new):
        if _is_indices(which):
            return x.at[which].set(new)
        return new if which else x

    return jax.tree.map(leaf, fragment, tree, part)


def _is_indices(which):
    return isinstance(which, np.ndarray)


class Segment(NamedTuple):
    """A stretch of inner steps, and what happens at its end.

    Attributes:
        steps: inner steps of every worker.
        send: index of the fragment whose deltas are averaged after them, if any.
        receive: index of the fragment that then takes its outer step, if any.
    """

    steps: int
    send: int | None = None
    receive: int | None = None


def schedule(sync_every: int, num: int = 1, delay: int = 0) -> list[Segment]:
    """One round, in which each fragment is sent and received once.

    Rounds are closed: whatever is sent is received before the round ends.

    >>> schedule(30)
    [Segment(steps=30, send=0, receive=0)]
    >>> schedule(30, num=2, delay=5)[:2]
    [Segment(steps=10, send=0, receive=None), Segment(steps=5, send=None, receive=0)]

    Args:
        sync_every: inner steps per round, H.
        num: fragments, whose syncs are spread evenly over the round.
        delay: inner steps between sending a fragment and receiving it.

    Raises:
        ValueError: if the round cannot be cut that way.
    """
    for key, value, low in (
        ("sync_every", sync_every, 1),
        ("num", num, 1),
        ("delay", delay, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{key} must be an int of at least {low}, got {value!r}")
    steps, rest = divmod(sync_every, num)
    if rest:
        below, above = sync_every - rest, sync_every - rest + num
        nearest = f"{above}" if below == 0 else f"{below} or {above}"
        raise ValueError(
            f"sync_every={sync_every} does not divide into {num} fragments; the "
            f"nearest that does is {nearest}"
        )
    if delay >= steps:
        raise ValueError(
            f"delay={delay} must be less than sync_every / fragments = {steps}, so "
            f"that a fragment is received before the next is sent"
        )
    if delay == 0:
        return [Segment(steps, send=i, receive=i) for i in range(num)]
    pairs = [
        (Segment(steps - delay, send=i), Segment(delay, receive=i)) for i in range(num)
    ]
    return [segment for pair in pairs for segment in pair]
