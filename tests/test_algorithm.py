"""The algorithm against numbers by hand, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from problem import (
    NESTEROV,
    SPECS,
    H,
    K,
    algorithm,
    assert_close,
    assert_near,
    batches,
    loss,
    mesh,
    params,
)

import muloco_jax as mj
from muloco_jax.algorithm import AXES


def follow(params, batch):
    """A loss whose gradient is the batch itself."""
    return jnp.sum(params["x"] * batch)


def small(inner, outer, num=2, sync_every=1, **others):
    return mj.diloco(
        follow, inner, outer, workers=mj.Workers(num), sync_every=sync_every, **others
    )


def test_a_round_by_hand():
    """Two workers, two SGD steps of rate 0.5, outer Nesterov at 0.8, momentum 0.9.

    Gradients 1, 3 and 2, 2 give delta_k = 2, 2, so delta = 2: b = 2 and theta moves by
    0.8 (2 + 0.9 * 2) = 3.04. The second round has delta_k = 1, 3, the same delta = 2:
    b = 0.9 * 2 + 2 = 3.8, and theta moves by 0.8 (2 + 0.9 * 3.8) = 4.336.
    """
    algo = small(
        optax.sgd(0.5), optax.sgd(0.8, momentum=0.9, nesterov=True), sync_every=2
    )
    state = algo.init({"x": jnp.zeros(())})
    state, metrics = algo.round(state, jnp.array([[1.0, 3.0], [2.0, 2.0]]))
    assert_near(state.params["x"], -3.04)
    assert_near(metrics["grad_norm"], [[1, 3], [2, 2]])
    assert_near(metrics["loss"], [[0, -0.5 * 3], [0, -2]])
    assert_near(metrics["delta_k_norm"], [[2], [2]])
    state, metrics = algo.round(state, jnp.array([[1.0, 1.0], [4.0, 2.0]]))
    assert_near(state.params["x"], -3.04 - 4.336)
    assert_near(metrics["delta_k_norm"], [[1], [3]])
    assert_near(metrics["delta_norm"], [2])
    assert_near(metrics["update_norm"], [4.336])


def test_a_constant_delta_gives_the_trajectory_of_the_authors():
    """Delta -1 at rate 0.8, momentum 0.9, as torch.optim.SGD(nesterov=True) has it."""
    algo = small(optax.sgd(1.0), optax.sgd(0.8, momentum=0.9, nesterov=True))
    state = algo.init({"x": jnp.zeros(())})
    for expected in (1.52, 3.688, 6.4392, 9.71528):
        state, _ = algo.round(state, -jnp.ones((2, 1)))
        assert_near(state.params["x"], expected)


def test_keeping_some_of_the_local_parameters_by_hand():
    """delta_k = 1, 3, so theta = -2 after a unit step; a quarter of -1, -3 is kept."""
    algo = small(optax.sgd(1.0), optax.sgd(1.0), keep_local=0.25)
    state, _ = algo.round(algo.init({"x": jnp.zeros(())}), jnp.array([[1.0], [3.0]]))
    assert_near(state.params["x"], -2)
    assert_near(state.workers.params["x"], [-1.75, -2.25])


def test_a_delayed_sync_is_that_of_earlier_parameters_by_hand():
    """Sent after one of three steps: delta = 2; what the other two did is dropped."""
    algo = small(optax.sgd(1.0), optax.sgd(1.0), sync_every=3, delay=2)
    state = algo.init({"x": jnp.zeros(())})
    state, _ = algo.round(state, jnp.array([[1.0, 50, 60], [3.0, 70, 80]]))
    assert_near(state.params["x"], -2)
    assert_near(state.workers.params["x"], [-2, -2])


def test_fragments_sync_in_turn_by_hand():
    """x syncs after the first step, y after the second; each has its own momentum."""

    def loss(params, batch):
        return params["x"] * batch[0] + params["y"] * batch[1]

    algo = mj.diloco(
        loss,
        optax.sgd(1.0),
        optax.sgd(1.0, momentum=0.5),
        workers=mj.Workers(2),
        sync_every=2,
        fragments=[{"x": True, "y": False}, {"x": False, "y": True}],
    )
    gradients = jnp.array([[[1.0, 1.0], [5.0, 2.0]], [[3.0, 2.0], [7.0, 3.0]]])
    state = algo.init({"x": jnp.zeros(()), "y": jnp.zeros(())})
    state, metrics = algo.round(state, gradients)
    assert_near(state.params["x"], -2)  # Mean of 1, 3.
    assert_near(state.params["y"], -4)  # Mean of 1 + 2, 2 + 3.
    assert_near(state.workers.params["x"], [-2 - 5, -2 - 7])
    assert_near(state.workers.params["y"], [-4, -4])
    assert_near(metrics["delta_norm"], [2, 4])
    assert_near(metrics["delta_k_norm"], [[1, 3], [3, 5]])
    assert [s[0].trace for s in state.outer_state] == [
        {"x": 2, "y": None},
        {"x": None, "y": 4},
    ]


def test_a_round_is_its_parts():
    algo, round_, _ = algorithm()
    whole, _ = round_(algo.init(params()), batches(0))
    state, _ = jax.jit(algo.inner)(algo.init(params()), batches(0))
    state, delta = algo.send(state, 0)
    assert_close(algo.receive(state, delta, 0), whole)


def test_the_loss_may_report_more():
    def loss(params, batch):
        return jnp.sum(params["x"] * batch), {"twice": 2 * batch}

    algo = mj.diloco(
        loss, optax.sgd(1.0), optax.sgd(1.0), workers=mj.Workers(2), sync_every=2
    )
    _, metrics = algo.round(
        algo.init({"x": jnp.zeros(())}), jnp.array([[1.0, 2], [3, 4]])
    )
    np.testing.assert_array_equal(metrics["twice"], [[2, 4], [6, 8]])


def test_clipping_is_per_worker():
    """Norms 1 and 100 clipped to 2 give deltas 1, 2; clipping their mean would not."""
    inner = optax.chain(optax.clip_by_global_norm(2.0), optax.sgd(1.0))
    algo = small(inner, optax.sgd(1.0))
    state, metrics = algo.round(
        algo.init({"x": jnp.zeros(())}), jnp.array([[1.0], [100.0]])
    )
    assert_near(state.params["x"], -1.5)
    assert_near(metrics["grad_norm"], [[1], [100]])  # Before clipping.


def test_bfloat16_parameters_are_averaged_and_moved_in_float32():
    """Of deltas 1, 1, 1, 1 + 2^-6 around 1 the mean has no bfloat16."""
    algo = small(optax.sgd(1.0), optax.sgd(1.0, momentum=0.5), num=4)
    state = algo.init({"x": jnp.ones((), jnp.bfloat16)})
    gradients = jnp.array([1, 1, 1, 1 + 2**-6], jnp.bfloat16).reshape(4, 1)
    types = jax.tree.map(lambda x: x.dtype, state)
    state, _ = algo.round(state, gradients)
    assert jax.tree.map(lambda x: x.dtype, state) == types
    assert state.params["x"].dtype == jnp.bfloat16
    assert state.outer_state[0][0].trace["x"].dtype == jnp.float32
    assert float(state.outer_state[0][0].trace["x"]) == 1 + 2**-8


def test_donating_the_state_spares_the_parameters_that_it_came_from():
    algo, round_, _ = algorithm()
    start = jax.tree.map(jnp.array, params())
    round_(algo.init(start), batches(0))
    assert_close(start, params(), 0)


def test_a_second_round_compiles_nothing():
    for shape in ((("workers", 2),), (("workers", 2), ("fsdp", 2), ("data", 2))):
        algo, round_, _ = algorithm(shape=shape)
        state = algo.init(params())
        for r in range(3):
            state, _ = round_(state, batches(r))
        assert round_._cache_size() <= 2  # Placed batches, of other tests, and these.


def test_the_state_inherits_the_sharding_of_the_parameters():
    algo, _, _ = algorithm(shape=(("workers", 2), ("fsdp", 2), ("data", 2)))
    state = algo.init(params())
    spec = lambda tree: jax.tree.map(lambda x: x.sharding.spec, tree)
    stacked = {name: P("workers", *spec) for name, spec in SPECS.items()}
    assert spec(state.params) == SPECS
    assert spec(state.workers.params) == stacked
    assert spec(state.outer_state[0][0].trace) == SPECS
    muon = state.workers.opt_state.inner_states["muon"].inner_state[0]
    assert spec(muon.mu["up"]) == stacked["up"]
    assert spec(muon.count) == P("workers")
    adam = state.workers.opt_state.inner_states["adam"].inner_state[0]
    assert spec(adam.nu["embed"]) == stacked["embed"]


def test_axes_name_what_is_stacked():
    algo, _, _ = algorithm()
    state = algo.init(params())
    stacked = jax.tree.map(
        lambda axis, tree: {
            axis == 0 and x.shape[:1] == (K,) for x in jax.tree.leaves(tree)
        },
        AXES,
        state,
        is_leaf=lambda x: x is None,
    )
    assert stacked == AXES._replace(
        params={False}, outer_state={False}, workers={True}, step={False}
    )


class Record:
    """Some other tree: a custom node."""

    def __init__(self, x):
        self.x = x


jax.tree_util.register_pytree_with_keys(
    Record,
    lambda r: (((jax.tree_util.GetAttrKey("x"), r.x),), None),
    lambda _, c: Record(*c),
)


@pytest.mark.parametrize(
    "wrap, unwrap",
    [
        (lambda x: [x, None], lambda t: t[0]),
        (lambda x: (x,), lambda t: t[0]),
        (Record, lambda t: t.x),
        (lambda x: x, lambda t: t),
    ],
    ids=["list with None", "tuple", "custom node", "bare array"],
)
def test_any_tree_of_parameters_will_do(wrap, unwrap):
    algo = mj.diloco(
        lambda params, batch: jnp.sum(unwrap(params) * batch),
        optax.adam(0.1),
        optax.sgd(1.0, momentum=0.5),
        workers=mj.Workers(2, mesh(workers=2)),
        sync_every=1,
    )
    state, _ = algo.round(algo.init(wrap(jnp.zeros(3))), jnp.ones((2, 1)))
    assert_near(unwrap(state.params), [-0.1] * 3, atol=1e-7)


@pytest.mark.parametrize(
    "shape, message",
    [
        ((K, H + 1, 8), f"= .{K}, {H}, ...., got {H + 1} steps"),
        ((K + 1, H, 8), f"with K = {K}; got shapes"),
        ((K,), f"with K = {K}; got shapes"),
    ],
)
def test_batches_of_a_wrong_shape_are_refused(shape, message):
    algo, _, _ = algorithm()
    batch = {"x": np.zeros(shape, int), "y": np.zeros(shape, int)}
    with pytest.raises(ValueError, match=message):
        algo.round(algo.init(params()), batch)


@pytest.mark.parametrize("keep_local", [-0.1, 1.1])
def test_a_share_out_of_range_is_refused(keep_local):
    with pytest.raises(
        ValueError, match=rf"keep_local must be in \[0, 1\], got {keep_local}"
    ):
        small(optax.sgd(1.0), optax.sgd(1.0), keep_local=keep_local)


@pytest.mark.parametrize("spec", [P("workers"), P(None, ("fsdp", "model"))])
def test_specs_over_other_axes_are_refused(spec):
    with pytest.raises(ValueError, match=r"'fsdp'.*; P.* names .'(workers|model)'"):
        mj.diloco(
            loss,
            optax.sgd(0.1),
            NESTEROV,
            workers=mj.Workers(K, mesh(workers=2, fsdp=2)),
            sync_every=H,
            specs={"embed": spec},
        )


def test_specs_that_are_not_like_the_parameters_are_refused():
    algo = mj.diloco(
        loss,
        optax.sgd(0.1),
        NESTEROV,
        workers=mj.Workers(K, mesh(workers=2, fsdp=2)),
        sync_every=H,
        specs={"embed": P("fsdp")},
    )
    with pytest.raises(ValueError, match="specs"):
        algo.init(params())
