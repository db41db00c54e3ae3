"""What travels between workers: means over workers, and the reducer built on one.

- a `Mean` averages the deltas of all workers, and says how many bytes that takes;
- a `Reducer` is a mean with a memory: what a lossy mean failed to send is kept by its
  worker and added to the next deltas (error feedback).

All of it runs inside `Workers.join`, on the deltas of the workers of one mesh slice.

References:
    Karimireddy et al., `Error feedback fixes SignSGD
    <https://arxiv.org/abs/1901.09847>`_, 2019
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muloco_jax.workers import Workers, stacked

PyTree = Any


class Mean(NamedTuple):
    """How the deltas of all workers become their average.

    Attributes:
        update: deltas of the workers of this slice, leaves `[K/M, ...]` -> the average
            over all K workers, leaves `[...]`, and what of each of these workers'
            deltas entered it, leaves `[K/M, ...]`.
        wire_bytes: tree of arrays or shapes, as of the parameters -> bytes that one
            worker sends per sync when each worker has a slice of its own.
    """

    update: Callable[[PyTree], tuple[PyTree, PyTree]]
    wire_bytes: Callable[[PyTree], int]


def all_reduce_mean(workers: Workers) -> Mean:
    """The exact mean: one all-reduce per leaf, in float32 or wider.

    A ring all-reduce of N values of b bytes sends 2 (K - 1) / K N b bytes per worker
    (a reduce-scatter and an all-gather of (K - 1) / K of them each).
    """

    def update(deltas):
        return workers.mean(deltas), deltas

    def wire_bytes(params):
        item = lambda x: jnp.promote_types(x.dtype, jnp.float32).itemsize
        size = sum(math.prod(x.shape) * item(x) for x in jax.tree.leaves(params))
        return 2 * (workers.num - 1) * size // workers.num

    return Mean(update, wire_bytes)


class Reducer(NamedTuple):
    """Like an optax transformation, but over the deltas of several workers at once.

    Attributes:
        init: deltas (their values do not matter) -> state.
        update: `(deltas, state)` -> `(average, state)`, inside `Workers.join`.
        specs: partition specs of the parameters over the inner mesh axes -> those of
            the state over all mesh axes.
        wire_bytes: see `Mean`.
    """

    init: Callable[[PyTree], Any]
    update: Callable[[PyTree, Any], tuple[PyTree, Any]]
    specs: Callable[[PyTree], Any]
    wire_bytes: Callable[[PyTree], int]


class ErrorFeedbackState(NamedTuple):
    """What each worker has not managed to send so far, `[K/M, ...]` as its deltas."""

    error: PyTree


def reducer(mean: Mean, error_decay: float = 0.0) -> Reducer:
    """Averages deltas over workers, with error feedback if the mean is lossy.

    Worker k asks for `a_k = delta_k + error_decay e_k`, of which `Q(a_k)` enters the
    mean; it keeps `e_k <- a_k - Q(a_k)`. There is one outer learning rate, that of the
    outer optimizer: errors are in units of deltas.

    Args:
        mean: how to average.
        error_decay: share of the unsent error that is added to the next deltas, in
            [0, 1]; zero does without error feedback and its memory.

    Raises:
        ValueError: if `error_decay` is out of range.
    """
    if not 0 <= error_decay <= 1:
        raise ValueError(f"error_decay must be in [0, 1], got {error_decay}")
    if error_decay == 0:
        return Reducer(
            init=lambda deltas: (),
            update=lambda deltas, state: (mean.update(deltas)[0], state),
            specs=lambda specs: (),
            wire_bytes=mean.wire_bytes,
        )

    def init(deltas):
        return ErrorFeedbackState(jax.tree.map(jnp.zeros_like, deltas))

    def update(deltas, state):
        ask = lambda d, e: d + error_decay * e
        asked = jax.tree.map(ask, deltas, state.error)
        average, sent = mean.update(asked)
        return average, ErrorFeedbackState(jax.tree.map(jnp.subtract, asked, sent))

    return Reducer(
        init, update, lambda specs: ErrorFeedbackState(stacked(specs)), mean.wire_bytes
    )
