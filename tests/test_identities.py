"""The identities that specify the algorithm, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import INNER as OPTIMIZERS
from problem import NESTEROV, B, H, K, assert_close, batches, loss, params, train

PLACEMENTS = [
    (shape, sequential)
    for workers in (1, 2, 4)
    for shape in ((("workers", workers),), (("workers", workers), ("data", 2)))
    for sequential in (True, False)
] + [
    ((("workers", 2), ("fsdp", 2), ("data", 2)), True),
    ((("workers", 2), ("fsdp", 2)), False),
]
SGD, UNIT = optax.sgd(0.1), optax.sgd(1.0)


def placement_id(value):
    if isinstance(value, tuple):
        return "-".join(f"{axis}{size}" for axis, size in value)
    return {True: "sequential", False: "vmapped"}.get(value, str(value))


placed = pytest.mark.parametrize("shape, sequential", PLACEMENTS, ids=placement_id)
with_inner = pytest.mark.parametrize("inner", OPTIMIZERS)


def run(inner, shape, sequential, data=batches):
    return train(data, inner=inner, shape=shape, sequential=sequential)


@functools.cache
def nested_loops(inner):
    """Two nested loops, written out, on one device and without the library."""
    optimizer, theta = OPTIMIZERS[inner], params()
    outer_state, states = NESTEROV.init(theta), [optimizer.init(theta)] * K

    @jax.jit
    def step(theta_k, state, batch):
        value, grads = jax.value_and_grad(loss)(theta_k, batch)
        updates, state = optimizer.update(grads, state, theta_k)
        return optax.apply_updates(theta_k, updates), state, value

    losses = np.zeros((K, H))
    for r in range(2):
        batch, ends = batches(r), []
        for k in range(K):
            theta_k = theta
            for h in range(H):
                one = {name: x[k, h] for name, x in batch.items()}
                theta_k, states[k], losses[k, h] = step(theta_k, states[k], one)
            ends.append(theta_k)
        mean = jax.tree.map(lambda *xs: sum(xs) / K, *ends)
        delta = jax.tree.map(jnp.subtract, theta, mean)
        updates, outer_state = NESTEROV.update(delta, outer_state, theta)
        theta = optax.apply_updates(theta, updates)
    return theta, jax.tree.map(lambda *xs: jnp.stack(xs), *states), losses


@placed
@with_inner
def test_every_placement_is_the_two_nested_loops(inner, shape, sequential):
    theta, opt_states, losses = nested_loops(inner)
    state, metrics = run(inner, shape, sequential)
    assert_close(state.params, theta)
    assert_close(metrics["loss"], losses)
    assert_close(state.workers.opt_state, opt_states)
    assert state.step == 2 * H


@placed
@with_inner
def test_workers_agree_after_a_round(inner, shape, sequential):
    state, _ = run(inner, shape, sequential)
    assert_close(
        state.workers.params,
        jax.tree.map(lambda x: jnp.stack([x] * K), state.params),
        0,
    )


@placed
@with_inner
def test_workers_are_exchangeable(inner, shape, sequential):
    def flipped(r):
        return {name: x[::-1] for name, x in batches(r).items()}

    state, _ = run(inner, shape, sequential)
    other, _ = run(inner, shape, sequential, flipped)
    assert_close(other.params, state.params)


@placed
@with_inner
def test_equal_data_makes_workers_redundant(inner, shape, sequential):
    def same(r):
        return {name: np.repeat(x, K, axis=0) for name, x in batches(r, k=1).items()}

    state, _ = run(inner, shape, sequential, same)
    alone, _ = train(lambda r: batches(r, k=1), inner=inner, num=1)
    assert_close(state.params, alone.params)


@placed
def test_one_inner_sgd_step_is_large_batch_sgd(shape, sequential):
    state, _ = train(
        lambda r: batches(r, n=1),
        inner=SGD,
        outer=UNIT,
        sync_every=1,
        shape=shape,
        sequential=sequential,
    )
    theta = params()
    for r in range(2):
        batch = {name: x.reshape(K * B) for name, x in batches(r, n=1).items()}
        theta = jax.tree.map(
            lambda p, g: p - 0.1 * g, theta, jax.grad(loss)(theta, batch)
        )
    assert_close(state.params, theta)


@pytest.mark.parametrize("data_axis", [False, True])
@with_inner
def test_one_worker_with_a_unit_outer_step_is_the_inner_optimizer(inner, data_axis):
    shape = (("workers", 1), ("data", 2)) if data_axis else (("workers", 1),)
    state, _ = train(
        lambda r: batches(r, k=1), inner=inner, num=1, outer=UNIT, shape=shape
    )
    optimizer, theta = OPTIMIZERS[inner], params()
    opt_state = optimizer.init(theta)
    for r in range(2):
        for h in range(H):
            batch = {name: x[0, h] for name, x in batches(r, k=1).items()}
            updates, opt_state = optimizer.update(
                jax.grad(loss)(theta, batch), opt_state, theta
            )
            theta = optax.apply_updates(theta, updates)
    assert_close(state.params, theta)
