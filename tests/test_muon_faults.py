"""Where Muon is easily wrong without an error, and that every error says what to do."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Numbers
from problem import assert_close, assert_near

import muloco_jax as mj

# With the identity for an iteration, `adaptive` undoes the division by the norm: what
# comes out is the momentum itself.
PLAIN = {"ns_coeffs": [(1.0, 0.0, 0.0)], "scale": lambda *_: 1.0}
MOMENTUM = PLAIN | {"adaptive": True}
PRECONDITIONINGS = ["frobenius", "spectral", "schatten", "aol"]
LAST = Numbers(-2, -1)
SPLIT = mj.SplitDimensionNumbers


def gaussian(*shape, seed=0, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


MLP = {"mlp": {"up": gaussian(4, 6), "down": gaussian(6, 4)}, "bias": jnp.ones(3)}
SIDES = {"mlp": True, "bias": False}
STACK = gaussian(2, 4, 6) * jnp.array([1.0, 100.0])[:, None, None]
FUSED = SPLIT(0, 1, splits=(1, 3, 2))


def routed(numbers, **keywords):
    return mj.muon(0.1, muon_weight_dimension_numbers=numbers, **keywords)


def run(optimizer, grads, steps=1, params=None):
    """The last updates of some steps with the same gradients."""
    params = grads if params is None else params
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(grads, state, params)
    return updates


@pytest.mark.parametrize(
    "form, nesterov, middle, expected",
    [
        ("heavy_ball", False, 1 / 2, [2, 5, -3.5]),  # 2; 2 / 2 + 4; 5 / 2 - 6
        ("heavy_ball", False, 1 / 4, [2, 4.5, -3.75]),  # 2; 2 / 4 + 4; 4.5 / 2 - 6
        ("heavy_ball", True, 1 / 2, [3, 6.5, -7.75]),  # Half of the above and 2, 4, -6.
        ("heavy_ball", True, 1 / 4, [3, 5.125, -7.875]),
        ("ema", False, 1 / 2, [1, 2.5, -1.75]),  # Half of the first row.
        (
            "ema",
            False,
            1 / 4,
            [1, 3.25, -1.375],
        ),  # 1; 1 / 4 + 4 * 3 / 4; (3.25 - 6) / 2
        ("ema", True, 1 / 2, [1.5, 3.25, -3.875]),
        ("ema", True, 1 / 4, [1.5, 3.8125, -3.6875]),  # Second: 3.25 / 4 + 4 * 3 / 4.
        ("debiased", False, 1 / 2, [1 / 0.5, 2.5 / 0.75, -1.75 / 0.875]),
        ("debiased", True, 1 / 2, [8 / 3, 10 / 7 + 8 / 3, -14 / 15 - 24 / 7]),
    ],
)
def test_momentum_by_hand(form, nesterov, middle, expected):
    """Of gradients 2, 4, -6 with a decay of a half, another, and a half."""
    decay = lambda step: jnp.array([0.5, middle, 0.5])[step]
    decay = 0.5 if middle == 0.5 else decay
    optimizer = mj.scale_by_muon(decay, nesterov, momentum=form, **MOMENTUM)
    state, found = optimizer.init({"w": jnp.eye(1)}), []
    for g in (2.0, 4.0, -6.0):
        updates, state = optimizer.update({"w": jnp.array([[g]])}, state)
        found.append(updates["w"].item())
    assert_near(found, expected)


@pytest.mark.parametrize(
    "nadam, expected",
    [(False, [1, 1]), (True, [0.09 / 0.19 + 1, 0.171 / 0.271 + 0.1 / 0.19])],
)
def test_the_other_side_looks_ahead_only_if_one_says_so(nadam, expected):
    """Of a constant gradient Adam makes its sign; NAdam looks ahead of the first mean.

    Nor does the eps of Muon count there.
    """
    params = {"kernel": jnp.eye(2), "bias": jnp.full(1, 1e-6)}
    optimizer = mj.muon(1.0, nesterov=True, eps=1.0, adam_eps=0.0, adam_nesterov=nadam)
    found = [-run(optimizer, params, steps)["bias"].item() for steps in (1, 2)]
    assert_near(found, expected)


def test_no_setting_is_kept_in_the_state():
    """So a state goes on under other settings, and zeros are a fresh start."""
    grads = {"kernel": gaussian(4, 6), "bias": jnp.ones(3)}
    dion, jordan = mj.muon(1.0), mj.muon(1.0, ns_coeffs="jordan", beta=0.5)
    after = lambda optimizer: optimizer.update(grads, optimizer.init(grads))[1]
    assert_close(after(dion), after(jordan), atol=0)
    resumed, expected = (jordan.update(grads, after(o))[0] for o in (dion, jordan))
    assert_close(resumed, expected, atol=0)
    zeros = jax.tree.map(jnp.zeros_like, after(dion))
    assert_close(dion.update(grads, zeros)[0], run(dion, grads), atol=0)


@pytest.mark.parametrize("wrap", ["masked", "partition"])
@pytest.mark.parametrize(
    "numbers", [mj.hidden_matrices, LAST, {"mlp": LAST, "bias": LAST}, {"mlp": LAST}]
)
def test_scale_by_muon_does_its_part_of_a_tree(numbers, wrap):
    muon = mj.scale_by_muon(weight_dimension_numbers=numbers)
    if wrap == "masked":
        optimizer = optax.masked(muon, SIDES)
    else:
        optimizer = optax.partition({True: muon, False: optax.identity()}, SIDES)
    updates = run(optimizer, MLP)
    np.testing.assert_array_equal(updates["bias"], MLP["bias"])
    for name, x in MLP["mlp"].items():
        assert_near(updates["mlp"][name], mj.spectral(*x.shape) * mj.orthogonalize(x))


@pytest.fixture(params=["one by one", "together"])
def batching(request, monkeypatch):
    """Matrices one by one, as on CPU, or several at a time, as on accelerators."""
    if request.param == "together":
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("batching")
@pytest.mark.parametrize(
    "grads, numbers",
    [
        (STACK[0], LAST),
        (STACK, LAST),
        (STACK.transpose(1, 0, 2), Numbers(0, 2)),
        (STACK[0] * jnp.logspace(0, 3, 6)[None], FUSED),
    ],
)
def test_the_dual_norm_is_of_each_matrix_by_itself(grads, numbers):
    """Or else it would not give back each gradient."""
    keywords = MOMENTUM | {"ns_dtype": float, "weight_dimension_numbers": numbers}
    assert_near(run(mj.scale_by_muon(**keywords), {"w": grads})["w"], grads)


@pytest.mark.usefixtures("batching")
def test_the_update_norm_is_of_each_matrix_by_itself():
    grads = {"stack": STACK.at[1].set(0.0), "fused": gaussian(4, 6)}
    numbers = {"stack": LAST, "fused": FUSED}
    keywords = {"update_norm": True, "scale": mj.adamw_rms, "ns_dtype": float}
    updates = run(mj.scale_by_muon(weight_dimension_numbers=numbers, **keywords), grads)
    rms = lambda x: jnp.sqrt((x**2).mean((-2, -1)))
    assert_near(rms(updates["stack"]), [0.2, 0.0])
    for part in jnp.split(updates["fused"], [1, 4], axis=1):
        assert_near(rms(part), 0.2)


@pytest.mark.parametrize("form", ["heavy_ball", "ema", "debiased"])
@pytest.mark.parametrize("exponent", [-100, 100])
def test_updates_are_free_of_the_scale_of_gradients(form, exponent):
    """By a power of two, whose products are exact, to 1e-30 and 1e30."""
    optimizer = mj.muon(1.0, momentum=form, nesterov=True)
    grads = {"w": gaussian(4, 6, dtype=jnp.float32)}
    scaled = jax.tree.map(lambda g: g * 2.0**exponent, grads)
    assert_close(run(optimizer, scaled, 2), run(optimizer, grads, 2), atol=0)


@pytest.mark.parametrize("size", [1e-6, 100.0])
def test_float16_neither_under_nor_overflows(size):
    """The squares of these are 0, or their sum above 65504, the largest number."""
    half = {"w": jnp.float16(size * gaussian(4, 6))}
    updates = run(mj.muon(1.0, eps=1e-12), half)
    expected = run(mj.muon(1.0, eps=1e-12), jax.tree.map(jnp.float32, half))
    assert updates["w"].dtype == jnp.float16
    assert_close(updates, expected, atol=1e-3)  # Numbers below two have 10 bits.


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
def test_eps_is_added_to_each_kind_of_norm(preconditioning):
    """By hand: 3 / (3 + 1)."""
    optimizer = mj.scale_by_muon(eps=1.0, preconditioning=preconditioning, **PLAIN)
    assert_near(run(optimizer, {"w": jnp.array([[3.0]])})["w"], [[0.75]])


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
@pytest.mark.parametrize("size", ["adaptive", "update_norm"])
def test_a_complex_phase_goes_through(preconditioning, size):
    optimizer = mj.muon(1.0, preconditioning=preconditioning, **{size: True})
    grads = {"w": gaussian(4, 6) + 1j * gaussian(4, 6, seed=1)}
    turned = run(optimizer, {"w": 1j * grads["w"]})["w"]
    assert turned.dtype == jnp.complex128
    assert jnp.isfinite(turned).all()
    assert_near(turned, 1j * run(optimizer, grads)["w"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "1"])
def test_a_factor_that_is_no_finite_number_is_refused(bad):
    optimizer = mj.scale_by_muon(scale=lambda fan_in, fan_out: bad)
    with pytest.raises(ValueError, match=rf"scale\(4, 6\) must be .* got {bad}"):
        run(optimizer, {"w": gaussian(4, 6)})


def test_to_make_an_optimizer_does_not_start_the_backend():
    """Which could not be configured any more, an error of jax."""
    program = """
        import jax
        import muloco_jax as mj
        mj.muon(0.1, **mj.MOONLIGHT, ns_axes="data")
        mj.scale_by_muon(mu_dtype="bfloat16")
        jax.config.update("jax_num_cpu_devices", 3)
        assert jax.device_count("cpu") == 3
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_empty_matrices_have_empty_updates_and_no_factor(shape):
    params = {"w": jnp.ones(shape)}
    [row] = mj.routing_table(params)
    assert run(mj.muon(0.1), params)["w"].shape == shape
    assert (row.side, row.factor) == ("muon", 1.0)


def test_without_decay_no_parameters_are_needed():
    optimizer = mj.muon(0.1, weight_decay=0, adam_weight_decay=0.0)
    updates, _ = optimizer.update(MLP, optimizer.init(MLP))
    assert_close(updates, run(optimizer, MLP), atol=0)


def test_a_function_for_the_decay_mask_sees_all_parameters():
    seen = []

    def mask(params):
        seen.append(jax.tree.structure(params))
        return {"mlp": {"up": True, "down": False}, "bias": True}

    zeros = jax.tree.map(jnp.zeros_like, MLP)
    optimizer = mj.muon(1.0, weight_decay=0.5, weight_decay_mask=mask)
    updates = run(optimizer, zeros, params=MLP)
    assert set(seen) == {jax.tree.structure(MLP)}
    expected = jax.tree.map(lambda x: -0.5 * x, MLP)
    expected["mlp"]["down"] = zeros["mlp"]["down"]
    assert_close(updates, expected)


@pytest.mark.parametrize(
    "keywords",
    [
        {"ns_coeffs": "dion", "ns_steps": 5, "eps": 1e-8, "consistent_rms": 0.2},
        {"weight_decay_mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p)},
        {"muon_weight_dimension_numbers": mj.rules({"mlp/up": None})},
        {"muon_weight_dimension_numbers": lambda p: mj.by_ndim(p), "scale": mj.width},
        {"fallback": optax.sgd(0.25), "momentum": "ema", "adaptive": True},
    ],
)
def test_injected_settings_are_plain_settings(keywords):
    """With an `init` under `jit` too, and no more hyperparameters than may change."""
    keywords = {"learning_rate": 0.1, "weight_decay": 0.3} | keywords
    inject = optax.inject_hyperparams(mj.muon, static_args=mj.STATIC_ARGS)
    optimizer = inject(**keywords)
    state = jax.jit(optimizer.init)(MLP)
    assert set(state.hyperparams) == {"learning_rate", "weight_decay"}
    state.hyperparams["learning_rate"] = jnp.asarray(0.05)
    updates, _ = optimizer.update(MLP, state, MLP)
    assert_close(updates, run(mj.muon(**keywords | {"learning_rate": 0.05}), MLP))


def test_injection_does_not_round_the_decays_of_adam():
    """To bfloat16 parameters, in which 0.999 is 1 and Adam divides by zero.

    The numbers that may change are rounded: these are exact.
    """
    params = jax.tree.map(jnp.bfloat16, MLP)
    keywords = {"learning_rate": 0.125, "beta": 0.5, "adam_b2": 0.999}
    inject = optax.inject_hyperparams(mj.muon, static_args=mj.STATIC_ARGS)
    updates = run(inject(**keywords), params)
    assert jnp.isfinite(updates["bias"]).all()
    assert_close(updates, run(mj.muon(**keywords), params), atol=0)


@pytest.mark.parametrize("mu_dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "param_dtype, grad_dtype",
    [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16), (jnp.float32, float)],
)
def test_updates_and_the_state_keep_their_types(param_dtype, grad_dtype, mu_dtype):
    """Over a scan, which otherwise is refused while tracing."""
    like = lambda dtype: jax.tree.map(lambda x: x.astype(dtype), MLP)
    params, grads = like(param_dtype), like(grad_dtype)
    optimizer = mj.muon(0.1, weight_decay=0.1, mu_dtype=mu_dtype, nesterov=True)

    def step(state, _):
        updates, state = optimizer.update(grads, state, params)
        return state, updates

    scan = lambda: jax.lax.scan(step, optimizer.init(params), None, length=2)
    state, updates = jax.eval_shape(scan)
    dtypes = lambda tree: {x.dtype for x in jax.tree.leaves(tree)}
    assert dtypes(updates) == {jnp.dtype(param_dtype)}
    momentum = state.inner_states["muon"].inner_state[0].mu
    assert dtypes(momentum) == {jnp.dtype(mu_dtype or param_dtype)}


@pytest.mark.parametrize("splits", [(4, 4, 4), (6, 2, 4)])
@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_fused_matrices_are_separate_ones(splits, axes):
    """With a factor each; in the layout of PyTorch too, where they lie along axis 0."""
    fused = gaussian(4, 12)
    parts = dict(enumerate(jnp.split(fused, np.cumsum(splits)[:-1], axis=1)))
    separate = run(mj.muon(0.1), parts)
    numbers, kernel = SPLIT(*axes, splits), {"qkv": fused.transpose(axes)}
    updates = run(routed(numbers), kernel)["qkv"].transpose(axes)
    assert_near(updates, jnp.concatenate([*separate.values()], axis=1))
    [row] = mj.routing_table(kernel, muon_weight_dimension_numbers=numbers)
    assert (row.fan_in, row.fan_out) == (4, splits)
    assert row.factor == tuple((n / 4) ** 0.5 for n in splits)


def test_splits_of_the_size_of_heads_are_heads_with_an_axis():
    heads = gaussian(6, 3, 4)
    batched = run(routed(Numbers(0, 2)), {"query": heads})["query"]
    numbers = SPLIT(splits=(4, 4, 4))
    split = run(routed(numbers), {"query": heads.reshape(6, 12)})["query"]
    assert_near(split.reshape(6, 3, 4), batched)


def test_a_consistent_rms_is_a_factor():
    both = {"consistent_rms": 0.2}, {"scale": mj.match_rms_adamw}
    ours, expected = (mj.routing_table(MLP, **keywords) for keywords in both)
    assert ours == expected
    ours, expected = (run(mj.muon(1.0, **keywords), MLP) for keywords in both)
    assert_close(ours, expected, atol=0)


def test_another_optimizer_may_have_the_other_side():
    """All of it: neither the rate nor the decay of Muon is there."""
    plain = mj.muon(0.1, weight_decay=0.5)
    fallback = optax.sgd(0.25, momentum=0.5)
    updates = run(mj.muon(0.1, weight_decay=0.5, fallback=fallback), MLP, 2)
    assert_near(updates["bias"], -0.25 * 1.5 * MLP["bias"])
    assert_close(updates["mlp"], run(plain, MLP, 2)["mlp"], atol=0)


SHAPES = {
    "embed": jnp.ones((5, 4)),
    "layers": [{"up": jnp.ones((4, 6))}, {"up": jnp.ones((4, 6))}],
    "stack": jnp.ones((2, 3, 4)),
    "bias": jnp.ones(3),
}
UPS, REST = "layers/0/up layers/1/up", {"stack": None, "bias": None}


@pytest.mark.parametrize(
    "numbers, muons",
    [
        (mj.by_ndim, f"embed {UPS}"),
        (lambda params: mj.by_ndim(params), f"embed {UPS}"),
        (mj.rules({"stack": None}), UPS),
        (mj.rules({"stack": LAST, "embed": LAST}, otherwise=None), "embed stack"),
        (mj.rules({"bias|.*/1/.*": None, ".*": LAST}), "embed layers/0/up stack"),
        (mj.rules({r"layers/\d/up": LAST, ".*": None}), UPS),
        (REST | {"layers": LAST, "embed": LAST}, f"embed {UPS}"),
        (REST | {"layers": {"0": LAST, "1": None}, "embed": None}, "layers/0/up"),
        ({"": LAST, "bias": None}, f"embed {UPS} stack"),
    ],
)
def test_routes_are_found_by_name(numbers, muons):
    rows = mj.routing_table(SHAPES, muon_weight_dimension_numbers=numbers)
    assert [row.path for row in rows if row.side == "muon"] == muons.split()


def test_rules_pass_over_what_is_masked_out():
    route = mj.rules({"a": None, "b": LAST, "c": LAST, "d": None})
    params = {"a": jnp.ones(2), "b": jnp.eye(2), "c": optax.MaskedNode(), "d": None}
    assert route(params) == params | {"a": None, "b": LAST}


def test_a_rule_for_an_array_alone_has_the_empty_path():
    rule = mj.rules({"": Numbers(1, 0)})
    [row] = mj.routing_table(jnp.ones((2, 8)), muon_weight_dimension_numbers=rule)
    assert (row.fan_in, row.fan_out) == (8, 2)


@pytest.mark.parametrize(
    "keywords, match",
    [
        ({"learning_rate": None}, "learning_rate .* scale_by_muon"),
        ({"learning_rate": -0.1}, r"^learning_rate must be in \[0, inf\), got -0.1"),
        ({"adam_learning_rate": -0.1}, r"adam_learning_rate must be in \[0, inf"),
        ({"beta": 1.5}, r"beta must be in \[0, 1\), got 1.5"),
        ({"consistent_rms": -0.2}, r"consistent_rms must be in \[0, inf\), got -0.2"),
        ({"ns_coeffs": "muon"}, "unknown ns_coeffs 'muon'; use one of .*polar_expr"),
        ({"ns_coeffs": "dion", "ns_steps": 70}, "5 rows.* leave .* or .* of 70 rows"),
        ({"ns_steps": 0}, "ns_steps must be a static int >= 1, got 0"),
        ({"ns_steps": 5.0}, "ns_steps must be a static int >= 1, got 5.0"),
        ({"ns_steps": True}, "ns_steps must be a static int >= 1, got True"),
        ({"preconditioning": "frobenious"}, "one of frobenius, spectral, .*'frobenio"),
        ({"momentum": "nag"}, "momentum must be one of .*heavy_ball.* got 'nag'"),
        ({"scale": "width"}, "scale must be a function .*mj.spectral.* got 'width'"),
        ({"ns_method": "fast"}, "must be 'auto', 'standard' or 'gram', got 'fast'"),
        ({"ns_method": "gram", "ns_dtype": jnp.bfloat16}, "use dtype float32 with"),
        ({"ns_method": "gram", "ns_precision": None}, "or method='standard'"),
        ({"nesterov": "False"}, "nesterov must be True or False, got 'False'"),
        ({"update_norm": 1}, "update_norm must be True or False, got 1"),
        ({"adam_nesterov": None}, "adam_nesterov must be True or False, got None"),
        (
            {"adaptive": True, "update_norm": True},
            "adaptive and update_norm .* one out",
        ),
        ({"adam_b2": lambda step: 0.9}, "adam_b2 must be a number, got <function"),
        ({"adam_eps": optax.constant_schedule(0)}, "adam_eps must be a number"),
        ({"mu_dtype": "int8"}, "mu_dtype must be .* 16 bits or more, got int8"),
        ({"mu_dtype": jnp.float8_e4m3fn}, "mu_dtype .* 16 bits .*float8_e4m3fn"),
        ({"fallback": optax.sgd(1), "adam_learning_rate": 1.0}, "leave out adam_learn"),
        ({"fallback": optax.sgd(1), "adam_weight_decay": 0.0}, "leave out adam_learn"),
    ],
)
def test_bad_settings_are_refused_at_construction(keywords, match):
    with pytest.raises(ValueError, match=match):
        mj.muon(**{"learning_rate": 0.1} | keywords)


@pytest.mark.parametrize(
    "patterns, match",
    [
        ({"w": (0, 1)}, r"rule 'w' must be MuonDimensionNumbers.* got \(0, 1\)"),
        ({"w": True}, "rule 'w' must be .*SplitDimensionNumbers or None.* got True"),
        ({"(w": None}, r"'\(w' is no regular expression: missing \)"),
    ],
)
def test_bad_rules_are_refused_at_construction(patterns, match):
    with pytest.raises(ValueError, match=match):
        mj.rules(patterns)


WIDE, DEEP = jnp.ones((2, 3)), jnp.ones((8, 16, 4))


@pytest.mark.parametrize(
    "x, numbers, match",
    [
        (DEEP, Numbers(0, 5), r"\(8, 16, 4\): output_axis=5 is out of range for 3"),
        (DEEP, Numbers(0, (1, 3)), "output_axis=3 is out of range for 3 axes"),
        (WIDE, Numbers(-3, 1), r"\(2, 3\): reduction_axis=-3 is out of range for 2"),
        (WIDE, Numbers(0, -2), "axis 0 stands twice in"),
        (DEEP, Numbers((0, 0), 1), "axis 0 stands twice in"),
        (WIDE, Numbers(0, ()), "output_axis is empty"),
        (jnp.ones(3), Numbers(), r"has shape \(3,\).* use None to give it to"),
        (jnp.ones(()), LAST, r"has shape \(\).* use None to give it to the other"),
        (WIDE, SPLIT(0, 1, (1, 1)), r"sum to the fan-out 3, got \(1, 1\)"),
        (WIDE, SPLIT(0, 1, (4, -1)), r"must be positive .* got \(4, -1\)"),
        (WIDE, (0, 1), r"must be Muon.*axis=0, output_axis=1\); got \(0, 1\)"),
        (WIDE, True, r"must be MuonDimensionNumbers.* or None.* got True"),
        (
            WIDE,
            Numbers(False, True),
            "must have integers for reduction_axis, got False",
        ),
        (WIDE, SPLIT(0, 1), r"sum to the fan-out 3, got \(\)"),
        (jnp.ones((2, 2), int), None, "has dtype int64.* optax.masked"),
        (jnp.ones((2, 2), bool), LAST, "has dtype bool.* optax.masked"),
        (jax.random.key(0), None, "has dtype key.* optax.masked"),
        (2.5, None, "is 2.5, a float; parameters must be arrays"),
    ],
)
def test_a_parameter_that_cannot_be_routed_is_named_with_a_way_out(x, numbers, match):
    optimizer = routed({"a": {"w": numbers}, "b": LAST})
    with pytest.raises(ValueError, match=f"a/w .*{match}"):
        optimizer.init({"a": {"w": x}, "b": WIDE})


@pytest.mark.parametrize(
    "params, numbers, match",
    [
        ({"a": WIDE, "b": WIDE}, {"a": LAST}, "dimension_numbers has no entry for b"),
        ({"a": WIDE}, {"a": LAST, "c": None}, "an entry for c, which is no parameter"),
        ({"a": {"b": WIDE}}, {"a": {"c": LAST}}, "no entry for a/b and .* for a/c"),
        ({"up": WIDE}, mj.rules({"u": None}), "'u' matches no .* end to end, as of up"),
        ({"up": WIDE}, mj.rules({".*": None}), "no parameter is for Muon; .*, of up$"),
        ({"mlp": DEEP}, mj.hidden_matrices, r"rules\({.*or None .* the keys r'mlp'$"),
        ({"blocks": {"q": DEEP[None]}}, mj.hidden_matrices, r"keys r'blocks/q'$"),
        (
            {"0": {"q": DEEP}, "1": {"q": DEEP}, "o.2": DEEP},
            mj.hidden_matrices,
            r"^0/q has .*, 1/q .*, o.2 has .* keys r'\\d\+/q', r'o\\.\\d\+'$",
        ),
        (
            {str(i): WIDE for i in range(20)},
            mj.rules({"layers/.*": LAST}),
            r"matches no parameter.* as of (\d+, ){7}\d+$",
        ),
        ({"up": WIDE}, "hidden", "must be MuonDimensionNumbers, .*; got 'hidden'"),
    ],
)
def test_a_tree_that_cannot_be_routed_is_refused_with_a_way_out(params, numbers, match):
    with pytest.raises(ValueError, match=match):
        routed(numbers).init(params)


PAIR = {"a": WIDE, "b": WIDE}
ALL, FIRST = LAST, {"a": LAST, "b": None}
FLIPPED, NONE = PAIR | {"b": WIDE.T}, PAIR | {"b": None}


@pytest.mark.parametrize(
    "grads, params, before, now, match",
    [
        (FLIPPED, PAIR, ALL, ALL, r"gradient of b has .*\(3, 2\).* \(2, 3\)"),
        (FLIPPED, None, ALL, ALL, r"gradient of b has .*\(3, 2\).* \(2, 3\)"),
        ({"a": WIDE}, PAIR, ALL, ALL, "parameters but no gradients of b"),
        (NONE, PAIR, FIRST, FIRST, "parameters but no gradients of b"),
        (NONE, None, ALL, ALL, "momenta but no gradients of b"),
        (PAIR | {"c": WIDE}, PAIR, ALL, ALL, "gradients but no parameters of c"),
        (PAIR, PAIR, FIRST, ALL, "no momenta of b: .* routing .*, call init again"),
        (PAIR, PAIR, ALL, FIRST, "no gradients of b: .* routing .*, call init again"),
    ],
)
def test_gradients_or_a_state_of_something_else_are_refused(
    grads, params, before, now, match
):
    """A state as one routing made it, and an update under one that is now."""
    with pytest.raises(ValueError, match=match):
        routed(now).update(grads, routed(before).init(PAIR), params)


def test_a_decay_asks_for_the_parameters():
    optimizer = mj.muon(0.1, weight_decay=0.1)
    with pytest.raises(
        ValueError, match=r"weight_decay needs .*update\(grads, state, p"
    ):
        optimizer.update(MLP, optimizer.init(MLP))


NUMBERS = "muon_weight_dimension_numbers"
RULES, NONES = mj.rules({"mlp.*": LAST}), lambda params: None
MASK = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)


@pytest.mark.parametrize(
    "name, value, match",
    [
        (NUMBERS, mj.hidden_matrices, "hidden_matrices was called with a step count.*"),
        (NUMBERS, mj.by_ndim, "by_ndim was called with a step count.*"),
        (NUMBERS, RULES, "rules was called with a step count.*"),
        (NUMBERS, NONES, NUMBERS + ".*"),
        ("weight_decay_mask", MASK, "weight_decay_mask must .* booleans.* got False.*"),
        ("ns_steps", 5, "ns_steps must be a static int.*"),
        ("eps", 0.0, "eps must be .* static.*"),
        ("adam_b2", 0.999, r"adam_b2 must be in \[0, 1\), got 1.0.*"),
    ],
)
def test_injection_of_what_is_static_is_refused(name, value, match):
    """That is, if it is left out of `static_args`."""
    static = [arg for arg in mj.STATIC_ARGS if arg != name]
    inject = optax.inject_hyperparams(mj.muon, static_args=static)
    init = inject(learning_rate=0.1, weight_decay=0.1, **{name: value}).init
    init = jax.jit(init) if name == "eps" else init  # Or else it is a number still.
    with pytest.raises(ValueError, match=match + r"static_args=mj.STATIC_ARGS"):
        init(jax.tree.map(jnp.bfloat16, MLP))


def test_a_decay_that_is_one_in_bfloat16_is_refused():
    """A cast of 0.999, where beta is left out of `static_args`."""
    static = [name for name in mj.STATIC_ARGS if name != "beta"]
    inject = optax.inject_hyperparams(mj.muon, static_args=static)
    params = jax.tree.map(jnp.bfloat16, MLP)
    with pytest.raises(ValueError, match=r"beta .* got 1.0.*hyperparam_dtype"):
        inject(0.1, beta=0.999).init(params)
    with pytest.raises(ValueError, match=r"beta has been rounded.*hyperparam_dtype"):
        jax.jit(inject(0.1, beta=0.999).init)(params)
