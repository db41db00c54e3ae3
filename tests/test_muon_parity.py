"""Presets against the formulas and the code that they are named after."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers
from problem import assert_close, assert_near

import muloco_jax as mj

SHAPES = {
    "tall": (12, 6),
    "wide": (6, 12),
    "square": (8, 8),
    "heads": (6, 2, 4),
    "conv": (3, 3, 2, 8),
    "stack": (3, 4, 6),
    "bias": (7,),
}
NUMBERS = {
    "tall": MuonDimensionNumbers(0, 1),
    "wide": MuonDimensionNumbers(0, 1),
    "square": MuonDimensionNumbers(0, 1),
    "heads": MuonDimensionNumbers(0, (1, 2)),
    "conv": MuonDimensionNumbers((0, 1, 2), 3),
    "stack": MuonDimensionNumbers(1, 2),
    "bias": None,
}


def draw(seed, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(random.standard_normal(shape), dtype)
        for name, shape in SHAPES.items()
    }


def trajectory(optimizer, steps, dtype=jnp.float32):
    """Parameters after some steps whose gradients do not depend on them."""
    params = draw(0, dtype)
    grads = jax.tree.map(
        lambda *g: jnp.stack(g), *[draw(1 + t, dtype) for t in range(steps)]
    )

    def step(carry, g):
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        return (optax.apply_updates(params, updates), state), updates

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, grads))
    return run((params, optimizer.init(params)))[1]


VARIANTS = {
    "defaults": {},
    "dion": {"ns_coeffs": "dion"},
    "heavy": {"nesterov": False, "beta": 0.8, "weight_decay": 0.1},
    "rms": {"consistent_rms": 0.2, "adam_learning_rate": 0.003},
    "adaptive": {"adaptive": True},
    "aol": {"preconditioning": "aol"},
    "schatten": {"preconditioning": "schatten"},
    "spectral": {"preconditioning": "spectral"},
    "adam": {"adam_b1": 0.8, "adam_b2": 0.95, "adam_weight_decay": 0.1},
    "adam eps root": {"adam_eps_root": 1e-3},
    "one row": {"ns_coeffs": (2.0, -1.5, 0.5), "ns_steps": 7},
    "mu_dtype": {"mu_dtype": "float32"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_optax_preset_is_optax(variant):
    """Within 1e-5 over 20 steps, as the sums of a product have another order."""
    keywords = {"muon_weight_dimension_numbers": NUMBERS, **VARIANTS[variant]}
    # In optax this switches the other side too.
    ours = {"adam_nesterov": keywords.get("nesterov", True), **keywords}
    updates = trajectory(mj.muon(0.02, **mj.OPTAX | ours), 20)
    expected = trajectory(optax.contrib.muon(0.02, **keywords), 20)
    if variant == "adaptive":  # Optax sums the dual norms of the matrices of a stack.
        del updates["stack"], expected["stack"]
    assert_close(updates, expected, atol=1e-5)


def test_the_optax_preset_routes_as_optax_does():
    params = {"kernel": jnp.eye(3), "embed": jnp.eye(2), "stack": jnp.ones((2, 2, 2))}
    updates = [
        optimizer.update(params, optimizer.init(params), params)[0]
        for optimizer in (mj.muon(0.1, **mj.OPTAX), optax.contrib.muon(0.1))
    ]
    assert_close(*updates, atol=1e-6)


def test_every_keyword_of_optax_is_one_of_ours():
    theirs = inspect.signature(optax.contrib.muon).parameters
    ours = inspect.signature(mj.muon).parameters
    assert not theirs.keys() - ours.keys()
    positional = [n for n, p in theirs.items() if p.kind != p.KEYWORD_ONLY]
    assert list(ours)[: len(positional)] == positional


def test_every_keyword_of_scale_by_muon_of_optax_is_one_of_ours():
    theirs = inspect.signature(optax.contrib.scale_by_muon).parameters
    assert not theirs.keys() - inspect.signature(mj.scale_by_muon).parameters.keys()


def newton_schulz(x, rows):
    x = x / np.linalg.norm(x)
    for a, b, c in rows:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def test_the_preset_of_2024_is_the_formula_of_torch():
    """In PyTorch's terms: `buf.lerp_(grad, 1 - beta)`, `grad.lerp(buf, beta)`, then
    the factor `sqrt(max(1, rows / columns))` of a weight `[out, in]`."""
    beta, lr, decay = 0.95, 0.02, 0.1
    random = np.random.default_rng(0)
    weight = random.standard_normal((12, 6))
    optimizer = mj.muon(lr, weight_decay=decay, **mj.JORDAN_2024)
    params = {"kernel": jnp.asarray(weight.T)}
    state, buf = optimizer.init(params), np.zeros((12, 6))
    update = jax.jit(optimizer.update)
    for _ in range(5):
        grad = random.standard_normal((12, 6))
        updates, state = update({"kernel": jnp.asarray(grad.T)}, state, params)
        params = optax.apply_updates(params, updates)
        buf = buf + (1 - beta) * (grad - buf)
        ahead = grad + beta * (buf - grad)
        ortho = newton_schulz(ahead.T, [(3.4445, -4.7750, 2.0315)] * 5).T
        weight = weight * (1 - lr * decay) - lr * np.sqrt(max(1, 12 / 6)) * ortho
    # PyTorch adds no eps, but has 1e-7 as a floor of a norm that is about 1 here.
    assert_near(params["kernel"].T, weight, atol=1e-7)


def test_moonlight_is_its_equation_4():
    beta, lr, decay = 0.95, 0.02, 0.1
    random = np.random.default_rng(0)
    weight, momentum = random.standard_normal((6, 12)), np.zeros((6, 12))
    optimizer = mj.muon(lr, **mj.MOONLIGHT)
    params = {"kernel": jnp.asarray(weight)}
    state = optimizer.init(params)
    for _ in range(3):
        grad = random.standard_normal((6, 12))
        updates, state = optimizer.update({"kernel": jnp.asarray(grad)}, state, params)
        params = optax.apply_updates(params, updates)
        momentum = beta * momentum + grad
        ahead = beta * momentum + grad
        ortho = newton_schulz(ahead, [(3.4445, -4.7750, 2.0315)] * 5)
        weight = weight - lr * (0.2 * ortho * np.sqrt(12) + decay * weight)
    # The preset has the eps of 1e-7 of the authors' code, beside norms of about 10.
    assert_near(params["kernel"], weight, atol=1e-8)


@pytest.mark.parametrize("shape", [(128, 128), (128, 512), (512, 128)])
def test_moonlight_has_the_update_rms_of_adamw(shape):
    gradient = np.random.default_rng(0).standard_normal(shape)
    params = {"kernel": jnp.asarray(gradient, jnp.float32)}
    for preset, tolerance in ((mj.MOONLIGHT, 0.15), (mj.MOONLIGHT_UPDATE_NORM, 1e-5)):
        optimizer = mj.muon(1.0, **preset | {"weight_decay": 0.0})
        updates, _ = optimizer.update(params, optimizer.init(params))
        rms = jnp.sqrt(jnp.mean(updates["kernel"] ** 2))
        assert rms == pytest.approx(0.2, rel=tolerance)


def test_the_papers_preset_is_the_default():
    grads = draw(0)
    plain = mj.muon(0.1, muon_weight_dimension_numbers=NUMBERS)
    paper = mj.muon(0.1, muon_weight_dimension_numbers=NUMBERS, **mj.PAPER)
    updates = [o.update(grads, o.init(grads))[0] for o in (plain, paper)]
    assert_close(*updates, atol=0)
    defaults = inspect.signature(mj.muon).parameters
    assert {name: defaults[name].default for name in mj.PAPER} == mj.PAPER
