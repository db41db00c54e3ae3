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
SHAPES = {"embed": (5, 4), "up": (4, 6), "down": (6, 4), "bias": (4,)}
LR, STEPS = 0.1, 3
RATES, BETAS, DECAYS = (0.1, 0.05, 0.2), (0.9, 0.5, 0.8), (0.1, 0.3, 0.0)
every_preset = pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)


def draw(seed):
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(random.standard_normal(shape))
        for name, shape in SHAPES.items()
    }


def stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def part(tree, names):
    return {name: tree[name] for name in names}


PARAMS, GRADS = draw(0), [draw(1 + t) for t in range(STEPS)]
fast = functools.partial(jax.jit, compiler_options=FAST)


def run(optimizer, params=PARAMS, grads=GRADS, jit=fast, start=None):
    """The parameters and the state after all gradients."""
    update = jit(lambda *args: optimizer.update(*args))
    state = optimizer.init(params) if start is None else start
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def muon(preset, rate=LR, **keywords):
    return mj.muon(rate, **(preset | keywords))


def numbers(preset):
    """Of each parameter."""
    return preset.get("muon_weight_dimension_numbers", mj.hidden_matrices)(PARAMS)


_plain = {}


def plain(preset):
    """What all else is compared with."""
    name = next(name for name, value in PRESETS.items() if value is preset)
    if name not in _plain:
        _plain[name] = run(muon(preset))
    return _plain[name]


def eager(preset):
    return run(muon(preset), jit=lambda f: f), plain(preset)


def scan_and_donate(preset):
    optimizer = muon(preset)

    def step(carry, g):
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    scan = fast(lambda carry, g: jax.lax.scan(step, carry, g)[0], donate_argnums=0)
    params = jax.tree.map(jnp.copy, PARAMS)
    carry = (params, optimizer.init(params))
    result = scan(carry, stack(GRADS))
    assert all(x.is_deleted() for x in jax.tree.leaves(carry))
    return result, plain(preset)


def vmap_over_workers(preset):
    optimizer = muon(preset)
    others = draw(9), GRADS[::-1]
    mapped = optimizer._replace(
        init=jax.vmap(optimizer.init), update=jax.vmap(optimizer.update)
    )
    pairs = [stack(pair) for pair in zip(GRADS, others[1], strict=True)]
    together = run(mapped, stack([PARAMS, others[0]]), pairs)
    return together, stack([plain(preset), run(optimizer, *others)])


def chain_after_clipping(preset):
    norm = lambda g: jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(g)))
    unit = [jax.tree.map(lambda x, n=norm(g): x / n, g) for g in GRADS]
    chained = optax.chain(optax.clip_by_global_norm(1.0), muon(preset))
    params, (_, state) = run(chained)
    return (params, state), run(muon(preset), grads=unit)


def masked(preset):
    """What is masked out passes through."""
    mine = {"up": True, "down": False, "embed": False, "bias": True}
    of = lambda tree: part(tree, ("up", "bias"))
    params, state = run(optax.masked(muon(preset), mine))
    expected, inner = run(muon(preset), of(PARAMS), list(map(of, GRADS)))
    for name in ("down", "embed"):
        expected[name] = PARAMS[name] + sum(g[name] for g in GRADS)
    return (params, jax.tree.leaves(state)), (expected, jax.tree.leaves(inner))


def sides(preset):
    """The two sides of `muon`, of its parts."""
    rest = dict(preset)
    decay = rest.pop("weight_decay", 0.0)
    adam_decay = rest.pop("adam_weight_decay", decay)
    rest.pop("muon_weight_dimension_numbers", None)
    adam = {key: rest.pop(key) for key in list(rest) if key.startswith("adam_")}
    adam = {key.removeprefix("adam_"): value for key, value in adam.items()}
    everywhere = dict.fromkeys(SHAPES, mj.hidden_matrices(PARAMS)["up"])
    tail = lambda decay: (
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(LR),
    )
    return (
        optax.chain(
            mj.scale_by_muon(weight_dimension_numbers=everywhere, **rest), *tail(decay)
        ),
        optax.chain(optax.scale_by_adam(**{"b2": 0.99, **adam}), *tail(adam_decay)),
    )


def partition(preset):
    labels = {
        name: "a" if entry is None else "m" for name, entry in numbers(preset).items()
    }
    m, a = sides(preset)
    params, state = run(optax.partition({"m": m, "a": a}, labels))
    expected, (inner,) = plain(preset)
    by_label = {"m": inner["muon"], "a": inner["adam"]}
    return (params, state.inner_states), (expected, by_label)


def masked_sides(preset):
    """Each has an entry, or a moment, for its own parameters alone."""
    mine = {name: entry is not None for name, entry in numbers(preset).items()}
    others = {name: not muons for name, muons in mine.items()}
    m, a = sides(preset)
    chained = optax.chain(optax.masked(m, mine), optax.masked(a, others))
    return run(chained)[0], plain(preset)[0]


def step_by_step(preset):
    """Each with an optimizer of its own that has the constants of the step."""
    params, state = PARAMS, None
    for t, (rate, beta, decay) in enumerate(zip(RATES, BETAS, DECAYS, strict=True)):
        optimizer = muon(preset, rate, beta=beta, weight_decay=decay)
        params, state = run(optimizer, params, GRADS[t : t + 1], lambda f: f, state)
    return params


SCHEDULES = {
    name: lambda count, values=values: jnp.asarray(values)[count]
    for name, values in {"rate": RATES, "beta": BETAS, "weight_decay": DECAYS}.items()
}


def schedules(preset):
    return run(muon(preset, **SCHEDULES))[0], step_by_step(preset)


def inject(preset, rate=LR, dtype=None, **keywords):
    factory = optax.inject_hyperparams(
        mj.muon, static_args=mj.STATIC_ARGS, hyperparam_dtype=dtype
    )
    return factory(rate, **(preset | keywords))


def injected_constants(preset):
    params, state = run(inject(preset))
    return (params, state.inner_state), plain(preset)


def injected_schedules(preset):
    """With a compiled init."""
    optimizer = inject(preset, **SCHEDULES)
    params, state = run(optimizer, start=fast(optimizer.init)(PARAMS))
    last = [state.hyperparams[key] for key in ("learning_rate", "beta", "weight_decay")]
    return (params, last), (step_by_step(preset), [RATES[-1], BETAS[-1], DECAYS[-1]])


def multi_steps(preset):
    grads = [g for mean in GRADS for g in (jax.tree.map(lambda x: x / 2, mean),) * 2]
    grads[1::2] = [
        jax.tree.map(lambda mean, g: 2 * mean - g, mean, g)
        for mean, g in zip(GRADS, grads[::2], strict=True)
    ]
    params, state = run(optax.MultiSteps(muon(preset), 2), grads=grads)
    return (params, state.inner_opt_state), plain(preset)


def apply_if_finite(preset):
    """The first and the third gradient, which have one NaN, do nothing."""
    optimizer = optax.apply_if_finite(muon(preset), 5)
    start = optimizer.init(PARAMS)
    spoilt = lambda g, name: g | {name: g[name].at[(0,) * g[name].ndim].set(jnp.nan)}
    bad = spoilt(GRADS[0], "up"), spoilt(GRADS[1], "bias")
    params, state = run(optimizer, grads=bad[:1])
    same = params, state.inner_state
    for a, b in zip(*map(jax.tree.leaves, (same, (PARAMS, start.inner_state)))):
        np.testing.assert_array_equal(a, b)
    grads = [bad[0], GRADS[0], bad[1], *GRADS[1:]]
    params, state = run(optimizer, grads=grads)
    assert state.total_notfinite == 2
    return (params, state.inner_state), plain(preset)


def schedule_free(preset):
    """`z` takes the steps, `x` is their mean, and gradients are of a point between."""
    between, optimizer = 0.75, muon(preset)
    y, state = run(optax.contrib.schedule_free(optimizer, LR, b1=between))
    params, x, z, inner = PARAMS, PARAMS, PARAMS, optimizer.init(PARAMS)
    mix = lambda c, a, b: jax.tree.map(lambda a, b: (1 - c) * a + c * b, a, b)
    for t, g in enumerate(GRADS):
        updates, inner = optimizer.update(g, inner, params)
        z = optax.apply_updates(z, updates)
        x = mix(1 / (1 + t), x, z)
        params = mix(between, z, x)
    return (y, state.z, state.base_optimizer_state), (params, z, inner)


def lookahead(preset):
    """Slow parameters go half of the way to the fast ones, which start again there."""
    params, state = run(
        optax.lookahead(muon(preset), 2, 0.5), optax.LookaheadParams.init_synced(PARAMS)
    )
    two, inner = run(muon(preset), grads=GRADS[:2])
    slow = jax.tree.map(lambda a, b: (a + b) / 2, PARAMS, two)
    last, inner = run(muon(preset), slow, GRADS[2:], start=inner)
    return (params.fast, params.slow, state.fast_state), (last, slow, inner)


class Model(nnx.Module):
    def __init__(self, params):
        for name, x in params.items():
            setattr(self, name, nnx.Param(x))


def nnx_optimizer(preset):
    model = Model(PARAMS)
    optimizer = nnx.Optimizer(model, muon(preset), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, g):  # Gradients of a loss that is linear.
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


USES = [
    eager,
    scan_and_donate,
    vmap_over_workers,
    chain_after_clipping,
    masked,
    masked_sides,
    partition,
    schedules,
    injected_constants,
    injected_schedules,
    multi_steps,
    apply_if_finite,
    schedule_free,
    lookahead,
    nnx_optimizer,
    train_state,
]


@every_preset
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_no_use_changes_the_updates(preset, use):
    actual, expected = use(preset)
    assert_close(actual, expected)
