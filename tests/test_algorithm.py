"""The algorithm against numbers by hand, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from problem import (
    FAST,
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
    place,
    train,
)

import muloco_jax as mj

FSDP = (("workers", 2), ("fsdp", 2), ("data", 2))


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


@pytest.mark.parametrize("shape", [{"workers": 1}, {"workers": 2, "fsdp": 2}], ids=str)
def test_layers_of_a_leaf_may_sync_apart_with_error_feedback(shape):
    """Delayed and lossy, against loops over workers, fragments and layers in numpy."""
    mesh_, rounding = mesh(**shape), np.round
    workers = mj.Workers(2, mesh_)

    def coarse(deltas):
        sent = jax.tree.map(jnp.round, deltas)
        return workers.mean(sent), sent

    algo = mj.diloco(
        lambda params, batch: jnp.sum(params["blocks"] * batch),
        optax.sgd(1.0),
        optax.sgd(0.5, momentum=0.5),
        workers=workers,
        sync_every=4,
        reduce=mj.reducer(mj.compress.Mean(coarse, lambda params: 0), 0.5),
        fragments=[{"blocks": jnp.array([0, 2])}, {"blocks": jnp.array([1])}],
        delay=1,
        keep_local=0.25,
        specs={"blocks": P(None, "fsdp")} if "fsdp" in shape else None,
    )
    random = np.random.default_rng(0)
    gradients = random.normal(size=(2, 2, 4, 3, 2))  # [round, K, H, layers, width]
    theta = random.normal(size=(3, 2))
    state = algo.init({"blocks": jnp.asarray(theta)})
    theta_k = np.stack([theta] * 2)
    error, momentum = np.zeros((2, 3, 2)), np.zeros((3, 2))
    for r in range(2):
        for layers, start in ([0, 2], 0), ([1], 2):
            theta_k = theta_k - gradients[r, :, start]
            asked = (theta - theta_k + 0.5 * error)[:, layers]
            error[:, layers] = asked - rounding(asked)
            delta = rounding(asked).mean(0)
            theta_k = theta_k - gradients[r, :, start + 1]
            momentum[layers] = 0.5 * momentum[layers] + delta
            theta[layers] = theta[layers] - 0.5 * momentum[layers]
            mixed = 0.75 * theta[layers] + 0.25 * theta_k[:, layers]
            theta_k[:, layers] = mixed
        state, _ = jax.jit(algo.round)(state, gradients[r])
        assert_near(state.params["blocks"], theta)
        assert_near(state.workers.params["blocks"], theta_k)
    owed = sum(m.error["blocks"].sum() for m in state.workers.reduce_state)
    assert_near(owed, error.sum())


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


MICROBATCHES = (1, 2, 4, 8)


@pytest.mark.parametrize("shape", [{"workers": 1}, {"workers": 2, "fsdp": 2}], ids=str)
def test_any_microbatch_gives_the_same_round(shape):
    """B = 8: in parts, up to the order of sums, which float64 hides."""

    def reporting(params, batch):
        value = loss(params, batch)
        return value, {"twice": 2 * value, "tokens": batch["x"].size * jnp.ones(2)}

    results, mesh_ = [], mesh(**shape)
    for microbatch in MICROBATCHES:
        if microbatch % shape.get("fsdp", 1):
            continue
        algo = mj.diloco(
            reporting,
            mj.muon(0.02),
            NESTEROV,
            workers=mj.Workers(K, mesh_),
            sync_every=H,
            microbatch=microbatch,
            specs=SPECS if "fsdp" in shape else None,
        )
        round_ = jax.jit(algo.round, compiler_options=FAST)
        state, metrics = round_(algo.init(params()), place(batches(0), mesh_))
        assert_near(metrics["twice"], 2 * metrics["loss"])
        assert_near(metrics.pop("tokens"), np.full((K, H, 2), float(microbatch)))
        results.append((state, metrics))
    for result in results:
        assert_close(result, results[-1])


def test_gradients_of_microbatches_are_added_in_float32():
    """1 + 2^-8 + 2^-8 is 1.0078125; bfloat16 would lose each of the small ones."""
    algo = small(optax.sgd(1.0), optax.sgd(1.0), num=1, microbatch=1)
    state = algo.init({"x": jnp.zeros((), jnp.bfloat16)})
    batch = jnp.array([1.0, 2**-8, 2**-8, 0.0], jnp.bfloat16)
    state, _ = algo.round(state, batch[None, None])
    assert_near(state.params["x"], -(1 + 2**-7) / 4)


@pytest.mark.parametrize(
    "microbatch, message",
    [
        (-1, "microbatch must not be negative, got -1"),
        (1.0, "microbatch must be an int, got 1.0"),
        (True, "microbatch must be an int, got True"),
        (3, r"microbatch=3 must divide .* leaf of shape \(4,\)"),
        (8, r"microbatch=8 must divide .* leaf of shape \(4,\)"),
    ],
)
def test_a_microbatch_that_does_not_fit_is_refused(microbatch, message):
    state = small(optax.sgd(1.0), optax.sgd(1.0)).init({"x": jnp.zeros(())})
    build = lambda: small(optax.sgd(1.0), optax.sgd(1.0), microbatch=microbatch)
    with pytest.raises(ValueError, match=message):
        build().round(state, jnp.zeros((2, 1, 4)))


@pytest.mark.parametrize("name", ["loss", "grad_norm", "update_norm"])
def test_the_loss_may_not_report_what_is_measured_already(name):
    algo = mj.diloco(
        lambda params, batch: (params * batch, {name: batch}),
        optax.sgd(1.0),
        optax.sgd(1.0),
        workers=mj.Workers(1),
        sync_every=1,
    )
    with pytest.raises(ValueError, match=f"reports .*{name}.*; rename it"):
        algo.round(algo.init(jnp.zeros(())), jnp.ones((1, 1)))


def test_the_inner_optimizer_may_ask_for_the_loss():
    """Polyak's step on |x| is |x| itself, so one step from anywhere ends at zero."""
    algo = mj.diloco(
        lambda params, batch: abs(params * batch),
        optax.polyak_sgd(max_learning_rate=100.0),
        optax.sgd(1.0),
        workers=mj.Workers(2),
        sync_every=1,
    )
    state, _ = algo.round(algo.init(jnp.array(7.0)), jnp.ones((2, 1)))
    assert_near(state.params, 0.0)


@pytest.mark.parametrize(
    "fragments, message",
    [
        ([{"x": True, "y": False}], "y is in 0 of 1 fragments"),
        ([True, {"x": True, "y": False}], "x is in 2 of 2 fragments"),
        ([{"x": np.array([0, 2]), "y": True}], "layer 1 of x is in 0 of 1"),
        ([{"x": np.array([0, 1, 2, 1]), "y": True}], "layer 1 of x is in 2 of 1"),
        (
            [{"x": np.array([0, 1, 5]), "y": True}],
            r"layers \[0 1 5\] of x, which has 3",
        ),
    ],
)
def test_fragments_that_leave_out_or_repeat_a_parameter_are_refused(fragments, message):
    algo = small(optax.sgd(1.0), optax.sgd(1.0), sync_every=2, fragments=fragments)
    with pytest.raises(ValueError, match=message):
        algo.init({"x": jnp.zeros((3, 2)), "y": jnp.zeros(3)})


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


@pytest.mark.parametrize("shape", [(("workers", 2),), FSDP], ids=str)
def test_a_round_leaves_everything_where_it_was(shape):
    """So a second round compiles nothing, and donated memory is used again."""
    algo, _, mesh_ = algorithm(shape=shape)
    round_ = jax.jit(algo.round, donate_argnums=0, compiler_options=FAST)
    state = algo.init(params())
    for r in range(3):
        state, _ = round_(state, place(batches(r), mesh_))
        where = jax.tree.map(lambda x: x.sharding, state)
        assert where == algo.shardings(state)
    assert round_._cache_size() == 1


def test_the_state_inherits_the_sharding_of_the_parameters():
    algo, _, _ = algorithm(shape=FSDP)
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


def rnn(params, batch):
    """A loss with loops and branches that start from constants."""

    def step(h, x):
        return jnp.tanh(params["up"] @ h + x), None

    h, _ = jax.lax.scan(step, jnp.zeros(3), batch)
    total = jax.lax.fori_loop(0, 3, lambda i, t: t + h[i], 0.0)
    return jax.lax.cond(total > 0, lambda: total**2, lambda: 0.0) + params["b"] ** 2


@pytest.mark.parametrize("shape", [{"workers": 2}, {"workers": 2, "data": 2}], ids=str)
@pytest.mark.parametrize(
    "inner, factored",
    [
        (optax.sgd(0.1), False),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), True),
        (optax.MultiSteps(optax.adam(0.1), 2), False),
        (optax.apply_if_finite(optax.lion(0.1), 3), False),
        (optax.contrib.schedule_free_sgd(0.1), False),
        (optax.inject_hyperparams(optax.adamw)(lambda step: 0.1 / (1 + step)), False),
    ],
    ids=[
        "sgd",
        "adafactor",
        "MultiSteps",
        "apply_if_finite",
        "schedule_free",
        "inject",
    ],
)
def test_losses_and_optimizers_may_loop_from_constants(inner, factored, shape):
    """Each worker's parameters after two steps are those of two steps alone."""
    algo = mj.diloco(
        rnn, inner, optax.sgd(1.0), workers=mj.Workers(2, mesh(**shape)), sync_every=2
    )
    start = {"up": jnp.eye(3) / 2, "b": jnp.array(0.5)}
    batches = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 4, 3)))
    state, _ = jax.jit(algo.inner, compiler_options=FAST)(algo.init(start), batches)
    for k in range(2):
        params, opt_state = start, inner.init(start)
        for batch in batches[k]:
            grads = jax.grad(rnn)(params, batch)
            updates, opt_state = inner.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        mine = jax.tree.map(lambda x, k=k: x[k], state.workers.params)
        # Adafactor keeps float32 statistics even of float64.
        assert_close(mine, params, 1e-8 if factored else 1e-12)


def test_a_mesh_that_is_set_changes_nothing():
    shape = (("workers", 2), ("data", 2))
    expected, _ = train(batches, shape=shape)
    with jax.set_mesh(mesh(**dict(shape))):
        state, _ = train(batches, shape=shape)
    assert_close(state.params, expected.params, 0)


def test_norms_of_half_precision_do_not_overflow():
    """By hand: sqrt(3) times 300, though 300^2 is beyond float16."""
    algo = small(optax.sgd(1e-3), optax.sgd(1.0), num=1)
    state = algo.init({"x": jnp.ones(3, jnp.float16)})
    _, metrics = algo.round(state, jnp.full((1, 1), 300.0, jnp.float16))
    np.testing.assert_allclose(metrics["grad_norm"], 300 * 3**0.5, rtol=1e-6)


def test_parameters_that_cannot_be_trained_are_refused():
    algo = small(optax.sgd(1.0), optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"parameter \['n'\] has dtype int32"):
        algo.init({"x": jnp.ones(2), "n": jnp.int32(3)})


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


@pytest.mark.parametrize(
    "change, message",
    [
        ({"up": P("workers")}, r"\['up'\] .8, 12. may name the axes .* \['fsdp'\]"),
        ({"up": P(None, ("fsdp", "model"))}, "may name the axes inside a worker"),
        ({"up": P(None, None, "fsdp")}, "has more entries than that has axes"),
        ({"odd": P("fsdp")}, "does not divide axis of size 3"),
        ({"up": None}, "specs must be a tree like the parameters"),
    ],
)
def test_specs_that_do_not_fit_the_parameters_are_refused(change, message):
    algo = mj.diloco(
        loss,
        optax.sgd(0.1),
        NESTEROV,
        workers=mj.Workers(K, mesh(workers=2, fsdp=2)),
        sync_every=H,
        specs=SPECS | {"odd": P()} | change,
    )
    with pytest.raises(ValueError, match=message):
        algo.init(params() | {"odd": jnp.ones(3)})


def test_a_tree_of_dimension_numbers_will_do_for_a_sharded_muon():
    """Whose state optax could only find by initializing it with no parameters."""
    matrix = optax.contrib.MuonDimensionNumbers(-2, -1)
    numbers = {"embed": None, "up": matrix, "down": matrix, "bias": None}
    inner = mj.muon(0.02, muon_weight_dimension_numbers=numbers)
    algo, round_, mesh_ = algorithm(inner=inner, shape=FSDP)
    state, _ = round_(algo.init(params()), place(batches(0), mesh_))
    alone, _ = train(batches, rounds=1, inner=mj.muon(0.02))
    assert_close(state.params, alone.params)


def test_an_extra_result_of_the_loss_is_a_dict():
    algo = mj.diloco(
        lambda params, batch: (params * batch, batch),
        optax.sgd(1.0),
        optax.sgd(1.0),
        workers=mj.Workers(1),
        sync_every=1,
    )
    with pytest.raises(ValueError, match=r"must return a scalar or .scalar, dict."):
        algo.round(algo.init(jnp.zeros(())), jnp.ones((1, 1)))
