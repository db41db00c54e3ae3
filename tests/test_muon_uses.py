"""Every preset under every use that optax and flax offer, against plain updates."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from optax.contrib import MuonDimensionNumbers
from problem import assert_close

import muloco_jax as mj

PRESETS = {
    name: getattr(mj, name)
    for name in ("PAPER", "MOONLIGHT", "MOONLIGHT_UPDATE_NORM", "JORDAN_2024", "OPTAX")
}
STEPS, LR = 3, 0.1
SHAPES = {"embed": (9, 4), "up": (4, 6), "down": (6, 4), "bias": (5,)}
NUMBERS = {name: None for name in SHAPES} | {
    name: MuonDimensionNumbers(0, 1) for name in ("up", "down")
}


def draw(seed, dtype=jnp.float64):
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(random.standard_normal(shape), dtype)
        for name, shape in SHAPES.items()
    }


PARAMS, GRADS = draw(0), [draw(1 + t) for t in range(STEPS)]


def muon(preset, learning_rate=LR, **keywords):
    keywords = {"muon_weight_dimension_numbers": NUMBERS, **keywords}
    return mj.muon(learning_rate, **PRESETS[preset] | keywords)


def trained(optimizer, params=PARAMS, grads=GRADS, jit=True):
    """Parameters after all steps, and the last state."""
    update = jax.jit(optimizer.update) if jit else optimizer.update
    state = optimizer.init(params)
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@functools.cache
def plain(preset):
    return trained(muon(preset))


every_preset = pytest.mark.parametrize("preset", PRESETS)


@every_preset
def test_it_is_the_same_without_jit(preset):
    assert_close(trained(muon(preset), jit=False), plain(preset))


@every_preset
def test_it_is_the_same_in_a_scan_and_donates(preset):
    optimizer = muon(preset)

    def step(carry, g):
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    scan = jax.jit(lambda carry, g: jax.lax.scan(step, carry, g)[0], donate_argnums=0)
    params = jax.tree.map(jnp.copy, PARAMS)
    grads = jax.tree.map(lambda *g: jnp.stack(g), *GRADS)
    assert_close(scan((params, optimizer.init(params)), grads), plain(preset))
    assert params["up"].is_deleted()


@every_preset
@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("grad_kind", [jnp.bfloat16, jnp.float32])
def test_dtypes_are_those_of_parameters_and_do_not_drift(preset, kind, grad_kind):
    optimizer = muon(preset)
    params, grads = (
        draw(0, kind),
        jax.tree.map(
            lambda *g: jnp.stack(g), *[draw(1 + t, grad_kind) for t in range(STEPS)]
        ),
    )

    def step(carry, g):
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        return (optax.apply_updates(params, updates), state), updates

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, grads))
    (params, _), updates = run((params, optimizer.init(params)))
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(kind)}
    # In bfloat16 parameters are rounded by up to 2^-8 of their 2 or so, three times.
    lossy = jnp.bfloat16 in (kind, grad_kind)
    assert_close(params, plain(preset)[0], atol=0.05 if lossy else 1e-5)


@every_preset
def test_workers_side_by_side_are_one_by_one(preset):
    optimizer = muon(preset)
    stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
    params, grads = stack(PARAMS, GRADS[0]), stack(GRADS[1], GRADS[2])
    state = jax.vmap(optimizer.init)(params)
    updates, _ = jax.jit(jax.vmap(optimizer.update))(grads, state, params)
    for k, (p, g) in enumerate([(PARAMS, GRADS[1]), (GRADS[0], GRADS[2])]):
        expected, _ = optimizer.update(g, optimizer.init(p), p)
        assert_close(jax.tree.map(lambda x: x[k], updates), expected)  # noqa: B023


@every_preset
def test_it_chains_after_clipping(preset):
    clipped = []
    for g in GRADS:
        norm = optax.tree.norm(g)
        clipped.append(jax.tree.map(lambda x: x / norm, g))  # noqa: B023
    chained = optax.chain(optax.clip_by_global_norm(1.0), muon(preset))
    expected = trained(muon(preset), grads=clipped)
    assert_close(trained(chained)[0], expected[0], atol=1e-10)


@every_preset
def test_masked_it_is_the_same_on_what_is_left(preset):
    mask = {"embed": False, "up": True, "down": False, "bias": True}
    only = lambda tree: {name: x for name, x in tree.items() if mask[name]}
    params, _ = trained(optax.masked(muon(preset), mask))
    expected, _ = trained(
        muon(preset, muon_weight_dimension_numbers=only(NUMBERS)),
        only(PARAMS),
        list(map(only, GRADS)),
    )
    assert_close(only(params), expected)


@every_preset
def test_its_directions_compose_by_partition(preset):
    """The parts of `muon`, put together by hand."""
    preset_ = dict(PRESETS[preset])
    decay = preset_.pop("weight_decay", 0.0)
    adam_decay = preset_.pop("adam_weight_decay", decay)
    preset_.pop("muon_weight_dimension_numbers", None)
    adam = {
        name.removeprefix("adam_"): preset_.pop(name)
        for name in list(preset_)
        if name.startswith("adam_")
    }
    directions = mj.scale_by_muon(
        **preset_,
        weight_dimension_numbers={**NUMBERS, "embed": NUMBERS["up"]},  # Masked out.
    )
    sides = {
        "m": optax.chain(
            directions,
            optax.add_decayed_weights(decay),
            optax.scale_by_learning_rate(LR),
        ),
        "a": optax.adamw(LR, weight_decay=adam_decay, **adam),
    }
    labels = {"embed": "a", "up": "m", "down": "m", "bias": "a"}
    assert_close(trained(optax.partition(sides, labels))[0], plain(preset)[0])


def schedule(values):
    return lambda count: jnp.asarray(values)[count]


RATES, BETAS, DECAYS = (0.1, 0.05, 0.2), (0.9, 0.5, 0.8), (0.1, 0.3, 0.0)


@functools.cache
def scheduled(preset):
    """Step by step, each by an optimizer with the constants of that step."""
    params, state = PARAMS, None
    for g, rate, beta, decay in zip(GRADS, RATES, BETAS, DECAYS, strict=True):
        keywords = {"beta": beta, "weight_decay": decay, "adam_weight_decay": decay}
        optimizer = muon(preset, rate, **keywords)
        state = optimizer.init(params) if state is None else state
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


@every_preset
def test_rates_and_decays_may_be_schedules(preset):
    optimizer = muon(
        preset,
        schedule(RATES),
        beta=schedule(BETAS),
        weight_decay=schedule(DECAYS),
        adam_weight_decay=schedule(DECAYS),
    )
    assert_close(trained(optimizer)[0], scheduled(preset))


def injected(preset, **keywords):
    factory = optax.inject_hyperparams(mj.muon, static_args=mj.STATIC_ARGS, **keywords)
    preset_ = PRESETS[preset] | {"muon_weight_dimension_numbers": NUMBERS}
    return lambda rate, **more: factory(rate, **preset_ | more)


@every_preset
def test_hyperparameters_may_be_injected_and_init_compiled(preset):
    optimizer = injected(preset)(
        schedule(RATES),
        beta=schedule(BETAS),
        weight_decay=schedule(DECAYS),
        adam_weight_decay=schedule(DECAYS),
    )
    compiled = optimizer._replace(init=jax.jit(optimizer.init))
    assert_close(trained(compiled)[0], scheduled(preset))


@every_preset
def test_bfloat16_parameters_do_not_spoil_injected_hyperparameters(preset):
    kind = jnp.bfloat16
    data = draw(0, kind), [draw(1 + t, kind) for t in range(STEPS)]
    own, _ = trained(injected(preset)(LR, weight_decay=0.1), *data)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(own))
    wide = injected(preset, hyperparam_dtype=jnp.float32)(LR, weight_decay=0.1)
    expected, _ = trained(muon(preset, weight_decay=0.1), *data)
    # One rounding to bfloat16 of parameters up to 2.
    assert_close(trained(wide, *data)[0], expected, atol=2**-7)


@every_preset
def test_many_small_steps_are_one_of_the_mean_gradient(preset):
    optimizer = optax.MultiSteps(muon(preset), 2, accumulator_dtype=jnp.float64)
    params, _ = trained(optimizer, grads=GRADS[:2])
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *GRADS[:2])
    assert_close(params, trained(muon(preset), grads=[mean])[0])


@every_preset
def test_a_step_that_is_not_finite_is_as_if_it_had_not_been(preset):
    bad = jax.tree.map(lambda x: x * jnp.nan, GRADS[0])
    optimizer = optax.apply_if_finite(muon(preset), 5)
    params, state = trained(optimizer, grads=[GRADS[0], bad, *GRADS[1:]])
    assert_close(params, plain(preset)[0])
    assert_close(state.inner_state, plain(preset)[1])


@every_preset
def test_it_is_schedule_free(preset):
    """With interpolation 0 gradients are taken at z, which are plain steps."""
    optimizer = optax.contrib.schedule_free(muon(preset, weight_decay=0.0), LR, b1=0.5)
    params, state = trained(optimizer)
    z = trained(muon(preset, weight_decay=0.0))[0]
    # Decay aside, z moves as plain parameters do, whose gradients are given here.
    assert_close(state.z, z)
    assert not np.allclose(params["up"], z["up"])


@every_preset
def test_it_looks_ahead(preset):
    """Slow weights go half of the way of three fast steps."""
    optimizer = optax.lookahead(muon(preset), sync_period=STEPS, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(PARAMS)
    state = optimizer.init(params)
    for g in GRADS:
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
    half = jax.tree.map(lambda a, b: (a + b) / 2, PARAMS, plain(preset)[0])
    assert_close(params.slow, half)


@every_preset
def test_flax_takes_it(preset):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=muon(preset))
    for g in GRADS:
        state = state.apply_gradients(grads=g)
    assert_close(state.params, plain(preset)[0])


class Model(nnx.Module):
    def __init__(self, params):
        for name, x in params.items():
            setattr(self, name, nnx.Param(x))


@every_preset
def test_nnx_takes_it(preset):
    model = Model(PARAMS)
    optimizer = nnx.Optimizer(model, muon(preset), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, g):
        optimizer.update(model, nnx.state(Model(g), nnx.Param))

    for g in GRADS:
        step(model, optimizer, g)
    assert_close(nnx.to_pure_dict(nnx.state(model)), plain(preset)[0])


CONTAINERS = {
    "FrozenDict": flax.core.freeze,
    "nested": lambda tree: {"a": tree},
    "with None": lambda tree: {**tree, "none": None},
    "with MaskedNode": lambda tree: {**tree, "masked": optax.MaskedNode()},
    "with nothing": lambda tree: {**tree, "empty": {}, "nothing": ()},
}


@every_preset
@pytest.mark.parametrize("container", CONTAINERS)
def test_the_container_does_not_matter(preset, container):
    put = CONTAINERS[container]
    numbers = NUMBERS if container != "nested" else {"a": NUMBERS}
    optimizer = muon(preset, muon_weight_dimension_numbers=numbers)
    params, _ = trained(optimizer, put(PARAMS), list(map(put, GRADS)))
    assert_close(params, put(plain(preset)[0]))


@every_preset
def test_tuples_and_bare_arrays_are_trees_too(preset):
    numbers = MuonDimensionNumbers(0, 1)
    optimizer = muon(preset, muon_weight_dimension_numbers=numbers)
    bare = trained(optimizer, PARAMS["up"], [g["up"] for g in GRADS])[0]
    pair = lambda tree: (tree["up"], [tree["down"]])
    both = trained(optimizer, pair(PARAMS), list(map(pair, GRADS)))[0]
    assert_close((bare, both), (plain(preset)[0]["up"], pair(plain(preset)[0])))


@every_preset
@pytest.mark.parametrize("empty", [{}, ()])
def test_a_tree_may_be_empty(preset, empty):
    optimizer = mj.muon(LR, **PRESETS[preset])
    updates, _ = optimizer.update(empty, optimizer.init(empty), empty)
    assert updates == empty


@every_preset
def test_the_state_goes_through_checkpoints(preset, tmp_path):
    optimizer = muon(preset)
    params, state = trained(optimizer, grads=GRADS[:2])
    blank = jax.tree.map(jnp.zeros_like, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        orbax = checkpointer.restore(tmp_path / "state", blank)
    packed = flax.serialization.to_bytes(state)
    for restored in (orbax, flax.serialization.from_bytes(blank, packed)):
        updates, _ = jax.jit(optimizer.update)(GRADS[2], restored, params)
        assert_close(optax.apply_updates(params, updates), plain(preset)[0], atol=0)


@every_preset
def test_init_needs_no_arrays(preset):
    optimizer = muon(preset)
    shapes = jax.eval_shape(optimizer.init, jax.eval_shape(lambda: PARAMS))
    real = jax.eval_shape(lambda: optimizer.init(PARAMS))
    assert jax.tree.leaves(shapes) == jax.tree.leaves(real)
    assert jax.tree.structure(shapes) == jax.tree.structure(optimizer.init(PARAMS))


@every_preset
def test_the_state_is_a_count_and_the_momentum_beside_that_of_adamw(preset):
    """And nothing else that a checkpoint would have to hold."""
    inner = muon(preset).init(PARAMS).inner_states
    adamw = optax.adamw(LR).init({"embed": PARAMS["embed"], "bias": PARAMS["bias"]})
    num = lambda state: len(jax.tree.leaves(state))
    assert num(inner["muon"]) == 1 + len(("up", "down"))
    assert num(inner["adam"]) == num(adamw)
    assert inner["muon"].inner_state[1:] == (optax.EmptyState(), optax.EmptyState())


@every_preset
def test_optax_finds_what_is_like_parameters_in_the_state(preset):
    optimizer = muon(preset)
    state = optimizer.init(PARAMS)
    doubled = optax.tree_map_params(optimizer, lambda x: x + 1, state)
    mu = doubled.inner_states["muon"].inner_state[0]
    assert_close(mu.mu["up"], jnp.ones(SHAPES["up"]))
    assert mu.count == 0
