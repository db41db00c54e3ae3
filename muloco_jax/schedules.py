"""Values that change over a run, as lists of pieces.

A piece says for how many inner steps it lasts. The last may say 0: all that remain.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optax


def learning_rate(
    peak: float,
    steps: int,
    warmup_steps: int,
    pieces: Sequence[tuple[str, int, float]],
) -> optax.Schedule:
    """A linear warmup, and then pieces.

    With W warmup steps, it is `(t + 1) / W` of the peak at step t < W. A piece
    `(shape, steps, fraction)` then goes from where the last one ended to `fraction` of
    the peak, as a "cosine" (a half of one) or "linear", or it is "constant" at
    `fraction`. The paper's is 500 warmup steps and `[("cosine", 0, 0.1)]` (MuLoCo,
    appendix); `[("constant", 800, 1.0), ("linear", 0, 0.0)]` holds and then decays.

    >>> schedule = learning_rate(2.0, 6, 2, [("linear", 2, 0.5), ("constant", 0, 0.25)])
    >>> [float(schedule(t)) for t in range(6)]
    [1.0, 2.0, 2.0, 1.5, 0.5, 0.5]

    Args:
        peak: of the learning rate.
        steps: inner steps of the run, T.
        warmup_steps: W, less than T.
        pieces: what follows; their steps sum up to T - W.

    Raises:
        ValueError: if a piece has no known shape, or the pieces do not fit the run.
    """
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} must be less than steps={steps}, and not "
            f"negative"
        )
    _check_pieces(pieces, {"shape": str, "steps": int, "fraction": float})
    lengths = _lengths([piece[1] for piece in pieces], steps - warmup_steps)
    schedules: list[Any] = [lambda count: peak * (count + 1) / max(warmup_steps, 1)]
    start = 1.0
    for (shape, _, end), length in zip(pieces, lengths, strict=True):
        if not 0 <= end < np.inf:
            raise ValueError(f"a piece ends at {end} of the peak, which must be >= 0")
        match shape:
            case "cosine" if start == 0:
                raise ValueError("a cosine cannot start from 0; use 'linear'")
            case "cosine":
                schedule = optax.cosine_decay_schedule(
                    peak * start, length, end / start
                )
            case "linear":
                schedule = optax.linear_schedule(peak * start, peak * end, length)
            case "constant":
                schedule = optax.constant_schedule(peak * end)
            case _:
                raise ValueError(
                    f"a piece must be 'cosine', 'linear' or 'constant', got {shape!r}"
                )
        schedules.append(schedule)
        start = end
    boundaries = warmup_steps + np.cumsum([0, *lengths[:-1]])
    return optax.join_schedules(schedules, boundaries.tolist())


def batch_sizes(
    steps: int, sync_every: int, pieces: Sequence[tuple[int, int]]
) -> np.ndarray:
    """The batch size of each round, `[rounds]`.

    >>> batch_sizes(steps=8, sync_every=2, pieces=[(4, 16), (0, 32)])
    array([16, 16, 32, 32])

    Args:
        steps: inner steps of the run, a multiple of `sync_every`.
        sync_every: inner steps of a round, H.
        pieces: pairs of inner steps, a multiple of `sync_every`, and of the sequences
            that each of these steps takes, over all workers.

    Raises:
        ValueError: if the pieces do not fit the run, or cut a round.
    """
    _check_pieces(pieces, {"steps": int, "batch size": int})
    if low := [size for _, size in pieces if size < 1]:
        raise ValueError(f"a batch size must be at least 1, got {low[0]}")
    lengths = _lengths([piece[0] for piece in pieces], steps)
    for length in lengths:
        if length % sync_every:
            raise ValueError(
                f"a piece of {length} steps cuts a round; it must be a multiple of "
                f"sync_every={sync_every}"
            )
    return np.repeat([piece[1] for piece in pieces], np.array(lengths) // sync_every)


def _check_pieces(pieces, fields):
    """Refuses what is no sequence of tuples with `fields`, names to types."""
    needed = f"({', '.join(fields)})"
    if not isinstance(pieces, tuple | list):
        raise ValueError(f"pieces must be a tuple of {needed}, got {pieces!r}")
    for piece in pieces:
        fits = isinstance(piece, tuple | list) and len(piece) == len(fields)
        if not fits or not all(
            is_a(value, kind)
            for value, kind in zip(piece, fields.values(), strict=True)
        ):
            kinds = ", ".join(kind.__name__ for kind in fields.values())
            raise ValueError(
                f"a piece must be {needed}, of types {kinds}, got {piece!r}; a single "
                f"one is written with a comma, ({needed},)"
            )


def is_a(value: Any, kind: type) -> bool:
    """Whether a value is of a type; an int is a float too, a bool is neither."""
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _lengths(lengths, total):
    """Steps of pieces, of which the last may be 0, summing up to `total`."""
    filled = list(lengths)
    if filled and filled[-1] == 0:
        filled[-1] = total - sum(filled)
    if any(length < 1 for length in filled) or sum(filled) != total:
        raise ValueError(
            f"pieces of {lengths} steps must each be positive and sum up to {total}; "
            f"the last may be 0 for all that remain, of which there must be some"
        )
    return filled
