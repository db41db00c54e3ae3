"""Checkpoints come back as they were, on any mesh, and only whole ones count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problem import (
    NESTEROV,
    SPECS,
    H,
    K,
    assert_close,
    batches,
    loss,
    mesh,
    params,
    place,
)

import muloco_jax as mj
from muloco_jax import checkpoint

MESHES = [{"workers": 1}, {"workers": 2}, {"workers": 4}, {"workers": 2, "fsdp": 2}]


def algorithm(shape):
    """Muon inside, with error feedback, so that every part of the state has leaves."""
    workers = mj.Workers(K, mesh(**shape))
    return mj.diloco(
        loss,
        mj.muon(0.02),
        NESTEROV,
        workers=workers,
        sync_every=H,
        reduce=mj.reducer(mj.all_reduce_mean(workers), error_decay=0.9),
        specs=SPECS if "fsdp" in shape else None,
    )


def abstract(algo):
    shapes = jax.eval_shape(algo.init, params())
    place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    return jax.tree.map(place, shapes, algo.shardings(shapes))


def assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir with a state after one round on four slices, and that state."""
    workdir, algo = tmp_path_factory.mktemp("saved"), algorithm({"workers": 4})
    state, _ = jax.jit(algo.round)(algo.init(params()), batches(0))
    # Errors that are not zero, as those of a lossy mean.
    noise = lambda x: x + jnp.asarray(np.random.default_rng(0).normal(size=x.shape))
    errors = jax.tree.map(noise, state.workers.reduce_state)
    state = state._replace(workers=state.workers._replace(reduce_state=errors))
    with checkpoint.Checkpoints(workdir, 1) as checkpoints:
        checkpoints.save(H, state, {"examples": 96, "name": "round one"}, 2.5)
    return workdir, state


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_state_comes_back_bit_by_bit_on_any_mesh_and_trains_on(saved, shape):
    workdir, state = saved
    algo = algorithm(shape)
    like = abstract(algo)
    with checkpoint.Checkpoints(workdir) as checkpoints:
        assert checkpoints.latest == H
        assert checkpoints.about(H) == {"examples": 96, "name": "round one"}
        restored = checkpoints.restore(H, like)
    assert_equal(restored, state)
    where = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    assert where(restored) == where(like)
    step = jax.jit(algo.round, donate_argnums=0)
    after, _ = step(restored, place(batches(1), mesh(**shape)))
    assert restored.params["up"].is_deleted()  # It could be donated.
    expected, _ = jax.jit(algorithm({"workers": 4}).round)(state, batches(1))
    assert_close(after, expected, atol=1e-10)


def test_the_latest_ones_and_the_best_are_kept(tmp_path):
    """Of losses 3, 1, 2 and one unknown: the last two, and the second."""
    algo = algorithm({"workers": 1})
    state = algo.init(params())
    with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
        for step, eval_loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, None)):
            moved = jax.tree.map(lambda x, s=step: x + s, state.params)
            checkpoints.save(step, state._replace(params=moved), {}, eval_loss)
    assert checkpoint.saved_steps(tmp_path) == [2, 4, 5]
    for step, moved in (("latest", 5), ("best", 2), (4, 4)):
        theta = checkpoint.load_params(tmp_path, step)
        assert_equal(theta, jax.tree.map(lambda x, m=moved: x + m, params()))


def test_theta_needs_neither_the_mesh_nor_the_algorithm(saved):
    workdir, state = saved
    theta = checkpoint.load_params(workdir)
    assert_equal(theta, state.params)
    assert {x.sharding.device_set.pop() for x in jax.tree.leaves(theta)} == {
        jax.local_devices()[0]
    }
    like = abstract(algorithm({"workers": 2, "fsdp": 2})).params
    theta = checkpoint.load_params(workdir, like=like)
    assert_equal(theta, state.params)
    assert theta["up"].sharding == like["up"].sharding


def test_what_is_not_there_is_named(saved, tmp_path):
    workdir, _ = saved
    with pytest.raises(
        FileNotFoundError, match=rf"no checkpoints in workdir {tmp_path}"
    ):
        checkpoint.load_params(tmp_path)
    for step in (7, "first"):
        with pytest.raises(FileNotFoundError, match=rf"{step!r} .* there are \[{H}\]"):
            checkpoint.load_params(workdir, step)
    assert checkpoint.saved_steps(tmp_path) == []
    assert list(tmp_path.iterdir()) == []  # Looking makes nothing.


def test_other_shapes_are_refused(saved):
    workdir, _ = saved
    like = abstract(algorithm({"workers": 1}))
    wider = like.params | {"bias": jax.ShapeDtypeStruct((17,), jnp.float64)}
    message = r"theta bias has shape \(16,\) in the checkpoint of step 3, and \(17,\)"
    with (
        checkpoint.Checkpoints(workdir) as checkpoints,
        pytest.raises(ValueError, match=message),
    ):
        checkpoints.restore(H, like._replace(params=wider))
    with pytest.raises(ValueError, match=message):
        checkpoint.load_params(workdir, like=wider)
    with pytest.raises(ValueError, match=r"up has shape .* and None here"):
        checkpoint.load_params(
            workdir,
            like={"down": like.params["down"]}
            | {"bias": like.params["bias"], "embed": like.params["embed"]},
        )


def test_what_was_left_half_done_does_not_count(saved, tmp_path):
    """A killed process leaves a folder whose name says that it is not complete."""
    _, state = saved
    with checkpoint.Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(1, state, {})
    whole = tmp_path / "checkpoints" / "1"
    whole.rename(whole.with_name("2.orbax-checkpoint-tmp"))
    assert checkpoint.saved_steps(tmp_path) == []
    with checkpoint.Checkpoints(tmp_path, 1) as checkpoints:
        assert checkpoints.latest is None
        checkpoints.save(2, state, {})
    assert checkpoint.saved_steps(tmp_path) == [2]


@pytest.mark.parametrize("when", ["save", "wait_until_finished"])
def test_a_write_that_fails_is_noticed(saved, tmp_path, monkeypatch, when):
    """At once, before the next, or at the end."""
    _, state = saved

    def fail(*arguments, **keywords):
        raise RuntimeError("the disk is full")

    checkpoints = checkpoint.Checkpoints(tmp_path, 1)
    monkeypatch.setattr(checkpoints._manager, when, fail)
    message = "a checkpoint could not be written: RuntimeError: the disk is full"
    with pytest.raises(checkpoint.WriteError, match=message), checkpoints:
        checkpoints.save(1, state, {})
