"""Muon: golden numbers, routing, and what it must keep."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden import MUON, wave
from optax.contrib import MuonDimensionNumbers
from problem import assert_close, assert_near

import muloco_jax as mj

SCALES = {"spectral": mj.spectral, "rms": mj.match_rms_adamw}


@pytest.mark.parametrize("case", MUON, ids=["spectral", "nesterov-rms"])
def test_muon_is_the_authors(case):
    """Within what rounding costs them.

    The authors round the iteration, and lr times its result, to bfloat16, which moves
    each of the three updates by up to 1e-3; ours is in float32 on CPU.
    """
    shape = case["fan_out"], case["fan_in"]
    optimizer = mj.muon(
        case["lr"],
        beta=case["momentum"],
        nesterov=case["nesterov"],
        weight_decay=case["weight_decay"],
        scale=SCALES[case["scale"]],
    )
    params = {"kernel": jnp.asarray(wave(shape, case["w0_k"]).T)}  # Flax: [in, out].
    state = optimizer.init(params)
    for step, expected in enumerate(case["weights"]):
        grads = {"kernel": jnp.asarray(wave(shape, 1 + 0.3 * step).T)}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["kernel"].T, expected, rtol=0, atol=2e-3)
    (momentum,) = (x for x in jax.tree.leaves(state) if x.shape == shape[::-1])
    np.testing.assert_allclose(momentum.T, case["momentum_buffer"], rtol=0, atol=1e-5)


def test_adam_has_the_other_side_with_the_same_rate_and_decay():
    params = {"kernel": jnp.eye(2), "bias": jnp.array([1.0, -2.0]), "embed": jnp.eye(3)}
    grads = jax.tree.map(lambda x: jnp.cos(x + 0.3), params)
    adamw = optax.adamw(0.1, b1=0.9, b2=0.99, weight_decay=0.3)
    muon = mj.muon(0.1, weight_decay=0.3)
    state, expected_state = muon.init(params), adamw.init(params)
    for _ in range(3):
        updates, state = muon.update(grads, state, params)
        expected, expected_state = adamw.update(grads, expected_state, params)
        for name in ("bias", "embed"):
            np.testing.assert_array_equal(updates[name], expected[name])
    assert not np.allclose(updates["kernel"], expected["kernel"])


def test_the_sides_may_have_rates_and_decays_of_their_own():
    params = {"kernel": jnp.eye(2), "bias": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    muon = mj.muon(
        0.1,
        weight_decay=0.5,
        adam_learning_rate=lambda step: 0.01,
        adam_weight_decay=0.2,
    )
    updates, _ = muon.update(zeros, muon.init(params), params)
    assert_near(updates["kernel"], -0.1 * 0.5 * jnp.eye(2))
    assert_near(updates["bias"], [-0.01 * 0.2] * 2)


def test_the_decay_is_of_the_parameters_before_the_step():
    """So with it an update differs by exactly the learning rate times it, unscaled."""
    params = {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}
    grads = jax.tree.map(jnp.cos, params)
    plain, _ = _update(mj.muon(0.1), grads)
    muon = mj.muon(0.1, weight_decay=0.5)
    decayed, _ = muon.update(grads, muon.init(params), params)
    for name in params:
        assert_near(decayed[name] - plain[name], -0.1 * 0.5 * params[name])


def test_the_defaults_are_the_papers():
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(mj.muon).parameters.items()
    }
    expected = {
        "ns_coeffs": mj.DION,
        "beta": 0.9,
        "nesterov": False,
        "scale": mj.spectral,
        "adam_b1": 0.9,
        "adam_b2": 0.99,
        "adam_eps": 1e-8,
        "adam_learning_rate": None,
        "adam_weight_decay": None,
        "muon_weight_dimension_numbers": mj.hidden_matrices,
    }
    assert {name: defaults[name] for name in expected} == expected


def test_hyperparameters_may_be_injected():
    injected = optax.inject_hyperparams(mj.muon, static_args=mj.STATIC_ARGS)
    grads = {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}
    updates, _ = _update(
        injected(lambda step: 0.1 / (1 + step), weight_decay=0.3), grads
    )
    expected, _ = _update(mj.muon(0.1, weight_decay=0.3), grads)
    assert_close(updates, expected)


def test_the_state_is_a_count_and_the_momentum_beside_that_of_adamw():
    """And nothing else that a checkpoint would have to hold."""
    params = {"up": jnp.ones((4, 6)), "down": jnp.ones((6, 4)), "bias": jnp.ones(5)}
    inner = mj.muon(0.1, weight_decay=0.1).init(params).inner_states
    adamw = optax.adamw(0.1).init({"bias": params["bias"]})
    num = lambda state: len(jax.tree.leaves(state))
    assert num(inner["muon"]) == 1 + len(("up", "down"))
    assert num(inner["adam"]) == num(adamw)
    assert inner["muon"].inner_state[1:] == (optax.EmptyState(), optax.EmptyState())


def test_masked_parameters_do_not_decay():
    params = {"kernel": jnp.eye(2), "bias": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    muon = mj.muon(0.1, weight_decay=0.5, weight_decay_mask=mask)
    updates, _ = muon.update(zeros, muon.init(params), params)
    assert_near(updates["kernel"], -0.05 * jnp.eye(2))
    np.testing.assert_array_equal(updates["bias"], jnp.zeros(2))


@pytest.mark.parametrize(
    "factor, tall, wide",
    [(mj.spectral, 0.5, 2.0), (mj.width, 1.0, 2.0), (mj.match_rms_adamw, 1.6, 1.6)],
)
def test_factors_are_functions_of_fan_in_and_fan_out(factor, tall, wide):
    assert factor(64, 16) == pytest.approx(tall)
    assert factor(16, 64) == pytest.approx(wide)


def test_a_stack_of_layers_is_its_layers_one_by_one():
    stack = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 6)))
    grads = {"blocks": {"up": stack, "norm": stack[:, 0]}}
    updates, _ = _update(mj.muon(1.0), grads)
    for layer in range(3):
        alone, _ = _update(mj.muon(1.0), {"up": stack[layer]})
        assert_near(updates["blocks"]["up"][layer], alone["up"], atol=1e-12)


def test_dimension_numbers_say_where_the_matrix_is():
    """A fused kernel [D, N, H] with fan-in D is the matrix [D, N H]."""
    kernel = jnp.asarray(np.random.default_rng(0).standard_normal((6, 2, 4)))
    numbers = {"kernel": MuonDimensionNumbers(0, (1, 2))}
    fused, _ = _update(
        mj.muon(1.0, muon_weight_dimension_numbers=numbers), {"kernel": kernel}
    )
    plain, _ = _update(mj.muon(1.0), {"kernel": kernel.reshape(6, 8)})
    assert_near(fused["kernel"].reshape(6, 8), plain["kernel"], atol=1e-12)


def test_the_layout_of_pytorch_is_the_transpose():
    kernel = jnp.asarray(np.random.default_rng(0).standard_normal((6, 3)))
    numbers = {"weight": MuonDimensionNumbers(reduction_axis=1, output_axis=0)}
    optimizer = mj.muon(1.0, muon_weight_dimension_numbers=numbers)
    torch_like, _ = _update(optimizer, {"weight": kernel.T})
    flax_like, _ = _update(mj.muon(1.0), {"kernel": kernel})
    assert_near(torch_like["weight"].T, flax_like["kernel"])


def test_a_leaf_that_no_rule_covers_is_named():
    with pytest.raises(ValueError, match=r"conv/kernel has shape \(3, 3, 4, 8\)"):
        mj.muon(0.1).init({"conv": {"kernel": jnp.ones((3, 3, 4, 8))}})


def test_scale_by_muon_alone_refuses_what_is_no_matrix():
    optimizer = mj.scale_by_muon()
    with pytest.raises(ValueError, match="bias"):
        optimizer.init({"kernel": jnp.eye(2), "bias": jnp.ones(2)})


@pytest.mark.parametrize(
    "numbers",
    [
        MuonDimensionNumbers(0, 2),
        MuonDimensionNumbers(0, -2),
        MuonDimensionNumbers((), 1),
    ],
)
def test_axes_that_are_not_there_or_twice_are_refused(numbers):
    optimizer = mj.muon(0.1, muon_weight_dimension_numbers={"w": numbers})
    with pytest.raises(ValueError, match="w with shape"):
        optimizer.init({"w": jnp.ones((2, 3))})


@pytest.mark.parametrize(
    "name, value",
    [
        ("beta", 1.0),
        ("beta", np.float32(-0.5)),
        ("eps", -1.0),
        ("weight_decay", -0.1),
        ("adam_b1", 1.5),
        ("adam_b2", float("nan")),
        ("adam_eps", -1e-8),
    ],
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, .*{value}"):
        mj.muon(0.1, **{name: value})


def test_rows_are_never_cut():
    with pytest.raises(ValueError, match="ns_steps is 3, but ns_coeffs has 5 rows"):
        mj.muon(0.1, ns_steps=3)
    mj.muon(0.1, ns_steps=5)


@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("grad_dtype", [jnp.bfloat16, jnp.float32])
def test_the_state_keeps_its_types_over_a_scan(param_dtype, grad_dtype):
    params = {"kernel": jnp.ones((4, 6), param_dtype)}
    grads = {"kernel": jnp.ones((4, 6), grad_dtype)}
    optimizer = mj.scale_by_muon()

    def step(state, _):
        updates, state = optimizer.update(grads, state)
        return state, updates["kernel"].dtype == grad_dtype

    state, ok = jax.lax.scan(step, optimizer.init(params), None, length=2)
    assert ok.all()
    assert state.mu["kernel"].dtype == param_dtype
    assert state.count == 2


def test_the_learning_rate_may_be_a_schedule():
    rates = jnp.array([0.5, 0.25])
    optimizer = mj.muon(lambda step: rates[step])
    grads = {"kernel": jnp.eye(2)}
    state, first = optimizer.init(grads), None
    for expected in (1.0, 0.5):
        updates, state = optimizer.update(grads, state, grads)
        first = updates["kernel"] if first is None else first
        assert_near(updates["kernel"], expected * first)


ROUTED = {
    "embed": (9, 4),
    "blocks": {"up": (3, 4, 16), "down": (3, 16, 4), "norm": (3, 4)},
    "fused": (6, 2, 4),
    "bias": (5,),
}
MASK = {"embed": False, "blocks": True, "fused": True, "bias": False}


def _numbers(params):
    """By name, but for a kernel [N, D, H] whose fan-in is D."""
    plain = {name: params[name] for name in params if name != "fused"}
    return {**mj.hidden_matrices(plain), "fused": MuonDimensionNumbers(1, (0, 2))}


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"weight_decay": 0.3},
        {"weight_decay": 0.3, "adam_weight_decay": 0.2, "scale": mj.match_rms_adamw},
        {"weight_decay": 0.3, "adam_weight_decay": 0.0, "scale": mj.width},
        {
            "weight_decay": 0.3,
            "weight_decay_mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
        },
        {"weight_decay": 0.3, "weight_decay_mask": MASK},
    ],
    ids=["plain", "decay", "two decays", "one decay", "mask", "prefix mask"],
)
@pytest.mark.parametrize("from_shapes", [False, True])
def test_the_routing_table_tells_what_muon_does(keywords, from_shapes):
    """The first update, from each row alone: Muon turns the first gradient into its
    nearest orthogonal matrices, Adam into its sign; both decay."""
    random = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(random.standard_normal(shape))
    is_shape = lambda x: isinstance(x, tuple)
    params = jax.tree.map(draw, ROUTED, is_leaf=is_shape)
    grads = jax.tree.map(draw, ROUTED, is_leaf=is_shape)
    keywords = keywords | {"muon_weight_dimension_numbers": _numbers}
    muon = mj.muon(0.1, adam_eps=0.0, **keywords)
    updates, _ = muon.update(grads, muon.init(params), params)
    shapes = jax.eval_shape(lambda: params)
    table = mj.routing_table(shapes if from_shapes else params, **keywords)
    by_path = lambda tree: {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree.leaves_with_path(tree)
    }
    updates, grads, params = by_path(updates), by_path(grads), by_path(params)
    assert [row.path for row in table] == list(params)
    for row in table:
        assert row.shape == params[row.path].shape
        if row.side == "muon":
            direction = _orthogonal(row, grads[row.path])
        else:
            assert (row.side, row.fan_in, row.fan_out) == ("adam", None, None)
            direction = jnp.sign(grads[row.path])
        expected = row.factor * direction + row.decay * params[row.path]
        assert_near(updates[row.path], -0.1 * expected, err_msg=row.path)


def _orthogonal(row, gradient):
    """Of the matrices `[fan_in, fan_out]` in `gradient`, whose layout is known here."""
    if row.path == "fused":
        assert (row.fan_in, row.fan_out) == (2, 24)
        gradient = gradient.swapaxes(0, 1).reshape(2, 24)
        return mj.orthogonalize(gradient).reshape(2, 6, 4).swapaxes(0, 1)
    assert (row.fan_in, row.fan_out) == gradient.shape[-2:]
    return mj.orthogonalize(gradient)


def test_the_routing_table_takes_what_muon_takes():
    params = {"up": jnp.ones((16, 16)), "bias": jnp.ones(16)}
    bias, up = mj.routing_table(params, **mj.MOONLIGHT)
    assert (bias.side, bias.decay) == ("adam", 0.1)
    assert (up.side, up.factor, up.decay) == ("muon", 0.8, 0.1)
    with pytest.raises(TypeError, match="muon has no arguments weight_decai"):
        mj.routing_table(params, weight_decai=0.1)


def test_the_routing_table_shows_the_first_decay_of_a_schedule():
    params = {"up": jnp.ones((16, 16)), "bias": jnp.ones(16)}
    decay = optax.linear_schedule(0.5, 0.0, 10)
    bias, up = mj.routing_table(params, weight_decay=decay)
    assert (bias.decay, up.decay) == (0.5, 0.5)
    bias, up = mj.routing_table(params, weight_decay=decay, fallback=optax.sgd(1.0))
    assert np.isnan(bias.decay)
    assert up.decay == 0.5


def test_the_routing_table_names_what_it_cannot_route():
    with pytest.raises(ValueError, match=r"conv has shape \(3, 3, 4, 8\)"):
        mj.routing_table({"conv": jnp.ones((3, 3, 4, 8))})


@functools.partial(jax.jit, static_argnums=0)
def _update(optimizer, grads):
    return optimizer.update(grads, optimizer.init(grads), grads)
