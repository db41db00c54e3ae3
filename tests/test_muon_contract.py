"""Whatever Muon is put into, it makes the updates that it makes alone."""

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
from problem import FAST, assert_close

import muloco_jax as mj

PRESETS = {
    "paper": mj.PAPER,
    "moonlight": mj.MOONLIGHT,
    "moonlight-update-norm": mj.MOONLIGHT_UPDATE_NORM,
    "jordan": mj.JORDAN_2024,
    "optax": mj.OPTAX,
}
SHAPES = {"bias": (4,), "down": (6, 4), "embed": (5, 4), "up": (4, 6)}
LR, STEPS = 0.1, 3
every_preset = pytest.mark.parametrize("preset", PRESETS)
fast = functools.partial(jax.jit, compiler_options=FAST)
leaves = jax.tree.leaves


def draw(seed):
    """In float64, but nothing that bfloat16 does not hold."""
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(random.standard_normal(shape), jnp.bfloat16).astype(float)
        for name, shape in SHAPES.items()
    }


PARAMS, GRADS = draw(0), [draw(1 + t) for t in range(STEPS)]


def stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def step_of(optimizer):
    def step(state, params, g):
        updates, state = optimizer.update(g, state, params)
        return state, optax.apply_updates(params, updates)

    return step


def run(optimizer, params=PARAMS, grads=GRADS, start=None, jit=fast):
    """The parameters and the state after all gradients."""
    step = jit(step_of(optimizer))
    state = optimizer.init(params) if start is None else start
    for g in grads:
        state, params = step(state, params, g)
    return params, state


def muon(preset, rate=LR, **keywords):
    return mj.muon(rate, **(PRESETS[preset] | keywords))


def numbers(preset):
    """Of each parameter."""
    by = "muon_weight_dimension_numbers"
    return PRESETS[preset].get(by, mj.hidden_matrices)(PARAMS)


@functools.cache
def plain(preset):
    """What all else is compared with."""
    params, state = run(muon(preset))
    assert all(jnp.isfinite(x).all() for x in leaves((params, state)))
    assert all((params[name] != PARAMS[name]).all() for name in SHAPES)
    return params, state


def eager(preset):
    return run(muon(preset), jit=lambda f: f), plain(preset)


def scan(preset):
    step = step_of(muon(preset))
    carry = muon(preset).init(PARAMS), PARAMS
    over = fast(
        lambda carry, g: jax.lax.scan(lambda c, g: (step(*c, g), None), carry, g)
    )
    (state, params), _ = over(carry, stack(GRADS))
    return (params, state), plain(preset)


def donation(preset):
    params = jax.tree.map(jnp.copy, PARAMS)
    state = muon(preset).init(params)
    given = leaves((params, state))
    jit = functools.partial(fast, donate_argnums=(0, 1))
    result = run(muon(preset), params, start=state, jit=jit)
    assert all(x.is_deleted() for x in given)
    return result, plain(preset)


def vmap(preset):
    """Over two workers."""
    optimizer, others = muon(preset), (draw(9), GRADS[::-1])
    both = optimizer._replace(
        init=jax.vmap(optimizer.init), update=jax.vmap(optimizer.update)
    )
    pairs = [stack(pair) for pair in zip(GRADS, others[1], strict=True)]
    one_by_one = stack([plain(preset), run(optimizer, *others)])
    return run(both, stack([PARAMS, others[0]]), pairs), one_by_one


def clipping(preset):
    norm = lambda g: jnp.sqrt(sum(jnp.sum(x**2) for x in leaves(g)))
    over = lambda g, n: jax.tree.map(lambda x: x / n, g)
    unit = [over(g, norm(g)) for g in GRADS]
    chained = optax.chain(optax.clip_by_global_norm(1.0), muon(preset))
    params, (_, state) = run(chained)
    return (params, state), run(muon(preset), grads=unit)


def masked(preset):
    """What is masked out passes through."""
    mine = {"bias": True, "down": False, "embed": False, "up": True}
    of = lambda tree: {name: tree[name] for name in ("bias", "up")}
    params, state = run(optax.masked(muon(preset), mine))
    expected, inner = run(muon(preset), of(PARAMS), list(map(of, GRADS)))
    for name in ("down", "embed"):
        expected[name] = PARAMS[name] + sum(g[name] for g in GRADS)
    return (params, leaves(state)), (expected, leaves(inner))


def sides(preset):
    """The two sides of `muon`, of its parts, Muon's with numbers for all leaves."""
    rest = dict(PRESETS[preset])
    decay = rest.pop("weight_decay", 0.0)
    adam_decay = rest.pop("adam_weight_decay", decay)
    rest.pop("muon_weight_dimension_numbers", None)
    adam = {key: rest.pop(key) for key in list(rest) if key.startswith("adam_")}
    adam = {key.removeprefix("adam_"): value for key, value in adam.items()}
    everywhere = dict.fromkeys(SHAPES, numbers(preset)["up"])
    tail = lambda decay: (
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(LR),
    )
    return (
        optax.chain(
            mj.scale_by_muon(weight_dimension_numbers=everywhere, **rest), *tail(decay)
        ),
        optax.chain(optax.scale_by_adam(**adam), *tail(adam_decay)),
    )


def sides_apart(preset):
    """By a partition, or by a mask for each."""
    (m, a), (expected, inner) = sides(preset), plain(preset)
    mine = {name: entry is not None for name, entry in numbers(preset).items()}
    others = {name: not muons for name, muons in mine.items()}
    params, state = run(optax.partition({True: m, False: a}, mine))
    masks = optax.chain(optax.masked(a, others), optax.masked(m, mine))
    also, also_state = run(masks)
    expected = expected, leaves(inner)
    return ((params, leaves(state)), (also, leaves(also_state))), (expected, expected)


CHANGING = {
    "rate": (0.1, 0.05, 0.2),
    "beta": (0.9, 0.5, 0.8),
    "weight_decay": (0.1, 0.3, 0.0),
}
SCHEDULES = {
    name: lambda count, values=values: jnp.asarray(values)[count]
    for name, values in CHANGING.items()
}


@functools.cache
def step_by_step(preset):
    """Each with an optimizer of its own that has the constants of the step."""
    params, state = PARAMS, None
    for t in range(STEPS):
        now = {name: values[t] for name, values in CHANGING.items()}
        params, state = run(muon(preset, **now), params, GRADS[t : t + 1], state)
    return params


def inject(preset, rate=LR, dtype=None, **keywords):
    factory = optax.inject_hyperparams(
        mj.muon, static_args=mj.STATIC_ARGS, hyperparam_dtype=dtype
    )
    return factory(rate, **(PRESETS[preset] | keywords))


def constants(preset):
    params, state = run(inject(preset))
    expected, inner = plain(preset)
    return (params, leaves(state.inner_state)), (expected, leaves(inner))


def schedules(preset):
    """Plain ones, and injected ones with a compiled init."""
    optimizer, expected = inject(preset, **SCHEDULES), step_by_step(preset)
    injected, state = run(optimizer, start=fast(optimizer.init)(PARAMS))
    last = state.hyperparams["learning_rate"], state.hyperparams["weight_decay"]
    params, _ = run(muon(preset, **SCHEDULES))
    return (injected, params, last), (expected, expected, (0.2, 0.0))


def multi_steps(preset):
    """Two gradients at a time, which have the usual ones as their means."""
    off = lambda g, sign: jax.tree.map(lambda x, d: x + sign * d, g, draw(8))
    grads = [off(g, sign) for g in GRADS for sign in (1, -1)]
    # The accumulator is float32 otherwise.
    optimizer = optax.MultiSteps(muon(preset), 2, accumulator_dtype=jnp.float64)
    params, state = run(optimizer, grads=grads)
    return (params, state.inner_opt_state), plain(preset)


def apply_if_finite(preset):
    """One NaN in the first gradient, or the third, keeps all as it was."""
    optimizer = optax.apply_if_finite(muon(preset), 5)
    spoil = lambda g, name: g | {name: g[name].at[(0,) * g[name].ndim].set(jnp.nan)}
    up, bias = spoil(GRADS[0], "up"), spoil(GRADS[1], "bias")
    params, state = run(optimizer, grads=[up])
    assert_close(
        (params, state.inner_state), (PARAMS, muon(preset).init(PARAMS)), atol=0
    )
    params, state = run(optimizer, grads=[up, GRADS[0], bias, *GRADS[1:]])
    assert state.total_notfinite == 2
    return (params, state.inner_state), plain(preset)


def schedule_free(preset):
    """`z` takes the steps, `x` is its mean, and gradients are of a point between."""
    optimizer = muon(preset)
    y, state = run(optax.contrib.schedule_free(optimizer, LR, b1=0.75))
    params, x, z, inner = PARAMS, PARAMS, PARAMS, optimizer.init(PARAMS)
    mix = lambda c, a, b: jax.tree.map(lambda a, b: (1 - c) * a + c * b, a, b)
    update = fast(optimizer.update)
    for t, g in enumerate(GRADS):
        updates, inner = update(g, inner, params)
        z = optax.apply_updates(z, updates)
        x = mix(1 / (1 + t), x, z)
        params = mix(0.75, z, x)
    return (y, state.z, state.base_optimizer_state), (params, z, inner)


def lookahead(preset):
    """Slow parameters go half of the way to the fast ones, which start again there."""
    params, state = run(
        optax.lookahead(muon(preset), 2, 0.5), optax.LookaheadParams.init_synced(PARAMS)
    )
    two, inner = run(muon(preset), grads=GRADS[:2])
    slow = jax.tree.map(lambda a, b: (a + b) / 2, PARAMS, two)
    last, inner = run(muon(preset), slow, GRADS[2:], inner)
    return (params.fast, params.slow, state.fast_state), (last, slow, inner)


class Model(nnx.Module):
    def __init__(self, params):
        for name, x in params.items():
            setattr(self, name, nnx.Param(x))


def nnx_optimizer(preset):
    """On a model whose loss is linear, so that its gradients are given."""
    model = Model(PARAMS)
    optimizer = nnx.Optimizer(model, muon(preset), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, g):
        loss = lambda m: sum(jnp.sum(getattr(m, name) * g[name]) for name in SHAPES)
        optimizer.update(model, nnx.grad(loss)(model))

    for g in GRADS:
        step(model, optimizer, g)
    assert optimizer.step[...] == STEPS
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), plain(preset)[0]


def train_state(preset):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=muon(preset))
    step = fast(lambda state, g: state.apply_gradients(grads=g))
    for g in GRADS:
        state = step(state, g)
    return (state.params, state.opt_state), plain(preset)


PROGRAMS = eager, scan, donation, vmap
OPTAX = clipping, masked, sides_apart, constants, schedules, multi_steps
WRAPPERS = apply_if_finite, schedule_free, lookahead, nnx_optimizer, train_state


@every_preset
@pytest.mark.parametrize(
    "use", PROGRAMS + OPTAX + WRAPPERS, ids=lambda use: use.__name__
)
def test_no_use_changes_the_updates(preset, use):
    actual, expected = use(preset)
    assert_close(actual, expected)


HALF, SINGLE = jnp.bfloat16, jnp.float32
# Rounding to bfloat16 moves parameters below 4 by up to 2^-7 in each step, and updates
# below 1 (of gradients in bfloat16) by up to 2^-9; in float32 both cost a few 2^-23.
ROUNDING = {
    (HALF, HALF): STEPS * 2**-7,
    (HALF, SINGLE): STEPS * 2**-7,
    (SINGLE, HALF): STEPS * 2**-9,
    (SINGLE, SINGLE): 1e-6,
}
TYPES = [("paper", *kinds) for kinds in ROUNDING] + [
    (preset, HALF, SINGLE) for preset in PRESETS if preset != "paper"
]


@pytest.mark.parametrize("preset, dtype, grad_dtype", TYPES)
def test_types_are_kept(preset, dtype, grad_dtype):
    optimizer, params = muon(preset), cast(PARAMS, dtype)

    def step(carry, g):
        state, params = carry
        updates, state = optimizer.update(g, state, params)
        return (state, optax.apply_updates(params, updates)), updates

    start = optimizer.init(params)
    over = fast(lambda carry, g: jax.lax.scan(step, carry, g))
    (state, params), updates = over((start, params), cast(stack(GRADS), grad_dtype))
    types = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
    assert types(updates) == types(params) == dict.fromkeys(SHAPES, dtype)
    assert types(state) == types(start)
    assert_close(params, plain(preset)[0], atol=ROUNDING[dtype, grad_dtype])


@every_preset
@pytest.mark.parametrize("dtype", [None, SINGLE])
def test_schedules_may_be_injected_into_bfloat16(preset, dtype):
    """Without a dtype that rounds learning rates and decays too, by 2^-9 of them."""
    params, grads = cast(PARAMS, HALF), [cast(g, HALF) for g in GRADS]
    optimizer = inject(preset, dtype=dtype, **SCHEDULES)
    params, state = run(optimizer, params, grads, fast(optimizer.init)(params))
    assert all(jnp.isfinite(x).all() for x in leaves((params, state)))
    assert_close(params, step_by_step(preset), atol=ROUNDING[HALF, HALF])


same = lambda x: x
pair = lambda tree: (tree["bias"], [tree["down"], tree["embed"]], tree["up"])
HOLES = {"a": None, "b": optax.MaskedNode(), "c": ({}, ())}
# How parameters and how numbers are held.
CONTAINERS = {
    "FrozenDict": (flax.core.freeze, same),
    "State": (lambda tree: nnx.state(Model(tree), nnx.Param), same),
    "tuple": (pair, pair),
    "holes": (lambda tree: tree | HOLES, same),
}


@every_preset
@pytest.mark.parametrize("container", CONTAINERS)
def test_the_container_does_not_matter(preset, container):
    put, put_numbers = CONTAINERS[container]
    held = put_numbers(numbers(preset))
    optimizer = muon(preset, muon_weight_dimension_numbers=held)
    params, state = run(optimizer, put(PARAMS), list(map(put, GRADS)))
    assert jax.tree.structure(params) == jax.tree.structure(put(PARAMS))
    assert_close(leaves((params, state)), leaves(plain(preset)))


@every_preset
@pytest.mark.parametrize("empty", [{}, ()])
def test_a_tree_may_be_empty(preset, empty):
    params, state = run(muon(preset), empty, [empty] * STEPS)
    assert params == empty
    assert leaves(state) == [STEPS, STEPS]


def orbax(state, blank, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", blank)


def msgpack(state, blank, path):
    (path / "state").write_bytes(flax.serialization.to_bytes(state))
    return flax.serialization.from_bytes(blank, (path / "state").read_bytes())


@every_preset
@pytest.mark.parametrize("saved", [orbax, msgpack], ids=["orbax", "msgpack"])
def test_it_goes_on_from_a_file(preset, saved, tmp_path):
    optimizer = muon(preset)
    params, state = run(optimizer, grads=GRADS[:2])
    restored = saved(state, optimizer.init(PARAMS), tmp_path)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    result = run(optimizer, params, GRADS[2:], restored)
    assert_close(result, plain(preset), atol=0)


@every_preset
def test_init_needs_shapes_alone(preset):
    optimizer = muon(preset)
    shapes = jax.eval_shape(optimizer.init, jax.eval_shape(lambda: PARAMS))
    real = optimizer.init(PARAMS)
    assert jax.tree.structure(shapes) == jax.tree.structure(real)
    kinds = lambda tree: [(x.shape, x.dtype) for x in leaves(tree)]
    assert kinds(shapes) == kinds(real)


@every_preset
def test_optax_finds_the_parameters_in_the_state(preset):
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    named = optax.tree_map_params(
        muon(preset),
        lambda x, name: x if is_masked(x) else name,
        muon(preset).init(PARAMS),
        {name: name for name in SHAPES},
        transform_non_params=lambda _: "count",
        is_leaf=is_masked,
    )
    adams = [name for name, entry in numbers(preset).items() if entry is None]
    muons = [name for name in SHAPES if name not in adams]
    assert leaves(named) == ["count", *adams, *adams, "count", *muons]
