"""Means over workers, and error feedback around a lossy one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from problem import assert_close, mesh

import muloco_jax as mj
from muloco_jax.compress import Mean
from muloco_jax.workers import AXIS

K = 4
SLICES = pytest.mark.parametrize("slices", [1, 2, 4])


def deltas(seed):
    random = np.random.default_rng(seed)
    return {"a": jnp.asarray(random.standard_normal((K, 3, 2))), "b": jnp.ones((K,))}


def coarse(workers):
    """A lossy mean: of what rounding to integers leaves of the deltas."""

    def update(deltas):
        sent = jax.tree.map(jnp.round, deltas)
        return workers.mean(sent), sent

    return Mean(update, lambda params: 0)


def joined(workers, reduce):
    """The functions of a reducer as functions of stacks `[K, ...]`."""
    memory = reduce.specs({"a": P(), "b": P()})
    init = workers.join(reduce.init, (P(AXIS),), memory)
    update = workers.join(reduce.update, (P(AXIS), memory), (P(), memory))
    return init, jax.jit(update)


@SLICES
def test_the_exact_mean_remembers_nothing(slices):
    workers = mj.Workers(K, mesh(workers=slices))
    init, update = joined(workers, mj.reducer(mj.all_reduce_mean(workers)))
    average, state = update(deltas(0), init(deltas(0)))
    assert_close(average, jax.tree.map(lambda x: x.mean(0), deltas(0)), 1e-15)
    assert state == ()


@SLICES
@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_what_was_sent_plus_what_is_owed_is_what_was_asked_for(slices, decay):
    """out + mean e' = mean delta + decay * mean e, at every send."""
    workers = mj.Workers(K, mesh(workers=slices))
    init, update = joined(workers, mj.reducer(coarse(workers), decay))
    state = init(deltas(0))
    for seed in range(3):
        before = state.error if decay else jax.tree.map(jnp.zeros_like, deltas(0))
        average, state = update(deltas(seed), state)
        if not decay:
            assert state == ()
            assert_close(
                average, jax.tree.map(lambda d: jnp.round(d).mean(0), deltas(seed))
            )
            continue
        left = jax.tree.map(lambda a, e: a + e.mean(0), average, state.error)
        right = jax.tree.map(lambda d, e: (d + decay * e).mean(0), deltas(seed), before)
        assert_close(left, right)
        assert float(abs(state.error["a"]).max()) > 0.1


def test_an_exact_mean_owes_nothing():
    workers = mj.Workers(K)
    init, update = joined(workers, mj.reducer(mj.all_reduce_mean(workers), 0.9))
    _, state = update(deltas(0), init(deltas(0)))
    assert_close(state.error, jax.tree.map(jnp.zeros_like, deltas(0)), 0)


@pytest.mark.parametrize("num, expected", [(1, 0), (2, 4 * 7), (4, 4 * 7 * 3 // 2)])
def test_a_ring_all_reduce_sends_the_documented_bytes(num, expected):
    """By hand: seven numbers of four bytes, times 2 (K - 1) / K."""
    params = {"a": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.ones((1,), jnp.float32)}
    assert mj.all_reduce_mean(mj.Workers(num)).wire_bytes(params) == expected


@pytest.mark.parametrize("decay", [-0.1, 1.5])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(
        ValueError, match=rf"error_decay must be in \[0, 1\], got {decay}"
    ):
        mj.reducer(mj.all_reduce_mean(mj.Workers(2)), decay)
