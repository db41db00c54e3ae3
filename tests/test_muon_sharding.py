"""Muon on meshes: the same updates, whole matrices, and few collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from problem import assert_close

import muloco_jax as mj

SHAPES = {
    "blocks": {"up": (3, 8, 16), "down": (3, 16, 8)},
    "query": (8, 8),
    "up": (8, 16),
    "down": (16, 8),
    "fused": (8, 2, 8),
    "qkv": (8, 24),
    "embed": (16, 8),
    "bias": (8,),
}
NUMBERS = mj.rules(
    {
        "fused": MuonDimensionNumbers(0, (1, 2)),
        "qkv": mj.SplitDimensionNumbers(0, 1, (8, 8, 8)),
    }
)
FSDP = {  # What a trainer would do, and every other way to shard a matrix.
    "blocks": {"up": P(None, "fsdp"), "down": P(None, None, "fsdp")},
    "query": P("fsdp", "data"),
    "up": P(None, ("data", "fsdp")),
    "down": P("fsdp"),
    "fused": P(None, "data", "fsdp"),
    "qkv": P(None, "fsdp"),
    "embed": P("fsdp"),
    "bias": P(),
}
STACKED = {"blocks": {"up": P("layers"), "down": P("layers", "fsdp")}}
# [8, 16] and [16, 8] that are sharded, replicated, and split by layers.
MIXED = {
    "blocks": {"up": P(None, None, "data"), "down": P()},
    "query": P(),
    "up": P(),
    "down": P(None, "fsdp"),
    "fused": P(None, "data"),
    "qkv": P(),
    "embed": P(),
    "bias": P(),
}
LAYOUTS = {
    "replicated": ({"data": 2, "fsdp": 4}, P(), ("data", "fsdp")),
    "fsdp": ({"data": 2, "fsdp": 4}, FSDP, ()),
    "both": ({"data": 2, "fsdp": 4}, FSDP, ("fsdp", "data")),
    "mixed": ({"data": 2, "fsdp": 4}, MIXED, ()),
    "mixed, shared": ({"data": 2, "fsdp": 4}, MIXED, ("fsdp",)),
    "one device": ({"data": 1, "fsdp": 1}, FSDP, ("data", "fsdp")),
}


def mesh(shape, kind=AxisType.Auto):
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), (kind,) * len(shape), devices=devices
    )


def draw(seed, shapes=None, dtype=jnp.float64):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(random.standard_normal(shape), dtype),
        SHAPES if shapes is None else shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def place(tree, mesh, specs):
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )
    return jax.device_put(tree, shardings)


def two_updates(optimizer, params):
    """The second update from two gradients, and the state after it."""
    update = jax.jit(optimizer.update)
    state = optimizer.init(params)
    grads = jax.tree.map(jnp.cos, params)
    _, state = update(params, state, params)
    return update(grads, state, params)


@functools.cache
def expected():
    return two_updates(muon(), draw(0))


def muon(**keywords):
    return mj.muon(
        0.1,
        weight_decay=0.3,
        nesterov=True,
        muon_weight_dimension_numbers=NUMBERS,
        **keywords,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_is_unsharded(layout):
    shape, specs, axes = LAYOUTS[layout]
    on = mesh(shape)
    params = place(draw(0), on, specs)
    updates, state = two_updates(muon(ns_axes=axes, specs=specs), params)
    assert_close(updates, expected()[0])
    assert_close(state, expected()[1])


@pytest.mark.parametrize("layout", ["replicated", "fsdp", "both"])
def test_explicit_axes_say_by_themselves_how_arrays_are_sharded(layout):
    shape, specs, axes = LAYOUTS[layout]
    on = mesh(shape, AxisType.Explicit)
    params = place(draw(0), on, specs)
    with jax.set_mesh(on):
        updates, state = two_updates(muon(ns_axes=axes), params)
        plain, _ = two_updates(muon(), params)
    assert_close(updates, expected()[0])
    assert_close(plain, expected()[0])
    assert_close(state, expected()[1])
    same = lambda update, param: jax.typeof(update) == jax.typeof(param)
    assert all(jax.tree.leaves(jax.tree.map(same, updates, params)))


@pytest.mark.parametrize("layout", ["replicated", "fsdp", "both"])
def test_inside_shard_map_a_shard_is_not_taken_for_the_matrix(layout):
    shape, specs, axes = LAYOUTS[layout]
    if layout != "replicated":  # Splits would have to be gathered.
        specs = specs | {"qkv": P("fsdp")}
    on = mesh(shape)
    optimizer = muon(ns_axes=axes, specs=specs)
    params = draw(0)
    whole = specs if isinstance(specs, dict) else jax.tree.map(lambda _: specs, params)

    def local(params):
        state = optimizer.init(params)
        _, state = optimizer.update(params, state, params)
        return optimizer.update(jax.tree.map(jnp.cos, params), state, params)[0]

    updates = jax.jit(
        jax.shard_map(local, mesh=on, in_specs=(whole,), out_specs=whole)
    )(params)
    assert_close(updates, expected()[0])


def test_matrices_of_a_sharded_stack_stay_where_they_are():
    on = mesh({"layers": 2, "fsdp": 4})
    shapes = {"blocks": {"up": (4, 8, 16), "down": (4, 16, 8)}}
    params = draw(1, shapes)
    optimizer = mj.muon(0.1, ns_axes=("layers", "fsdp"), specs=STACKED)
    update = jax.jit(optimizer.update)
    placed = place(params, on, STACKED)
    state = optimizer.init(placed)
    plain = mj.muon(0.1)
    reference, _ = plain.update(params, plain.init(params))
    assert_close(update(placed, state)[0], reference)
    for collective in collectives(update.lower(placed, state).compile()):
        assert not collective.crosses(on, "layers")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", [(), ("fsdp",), ("layers", "fsdp")])
def test_stacks_sharded_by_layers_live_beside_others(kind, axes):
    """Of one shape: what is equal along an axis stays so, beside what is not."""
    on = mesh({"layers": 2, "fsdp": 4}, kind)
    shapes = {"blocks": {"up": (4, 8, 16), "down": (2, 16, 8)}, "up": (8, 16)}
    specs = {"blocks": {"up": P("layers"), "down": P()}, "up": P()}
    params = draw(1, shapes)
    plain, optimizer = mj.muon(0.1), mj.muon(0.1, ns_axes=axes, specs=specs)
    placed = place(params, on, specs)
    with jax.set_mesh(on):
        updates, _ = jax.jit(optimizer.update)(placed, optimizer.init(placed))
    assert_close(updates, plain.update(params, plain.init(params))[0])


def test_types_have_the_last_word_on_explicit_axes():
    on = mesh({"x": 8}, AxisType.Explicit)
    params = draw(1, {"up": (8, 16)})
    placed = place(params, on, P("x"))
    optimizer, plain = mj.muon(0.1, specs=P(None, "x")), mj.muon(0.1)
    with jax.set_mesh(on):
        updates, _ = jax.jit(optimizer.update)(placed, optimizer.init(placed))
    assert_close(updates, plain.update(params, plain.init(params))[0])
    assert updates["up"].sharding.is_equivalent_to(placed["up"].sharding, 2)


def test_state_and_updates_are_sharded_as_the_parameters_are():
    shape, specs, _ = LAYOUTS["fsdp"]
    on = mesh(shape)
    params = place(draw(0), on, specs)
    optimizer = muon(specs=specs)
    for init in (optimizer.init, jax.jit(optimizer.init)):
        state = init(params)
        mu = state.inner_states["muon"].inner_state[0].mu
        for name in ("query", "up", "down", "fused"):
            assert mu[name].sharding.is_equivalent_to(
                params[name].sharding, mu[name].ndim
            )
    updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    mu = state.inner_states["muon"].inner_state[0].mu
    for name in ("query", "up", "down", "fused"):
        for x in (updates[name], mu[name]):
            assert x.sharding.is_equivalent_to(params[name].sharding, x.ndim), name


# Two shapes up to transposition: [8, 8] and [8, 16].
GROUPS = {f"{name}{i}": SHAPES[name] for i in range(8) for name in ("query", "up")}
GROUPS |= {f"down{i}": SHAPES["down"] for i in range(3)}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "spec, axes, expected",
    [
        (P("x"), (), {"all-to-all": 4}),
        (P(None, "x"), (), {"all-to-all": 4}),
        (P(), "x", {"all-gather": 2}),
        (P(), (), {}),
    ],
    ids=["rows", "columns", "replicated", "by itself"],
)
def test_a_shape_takes_two_all_to_alls_or_one_all_gather(kind, spec, axes, expected):
    on = mesh({"x": 8}, kind)
    params = place(draw(2, GROUPS), on, spec)
    optimizer = mj.muon(0.1, ns_axes=axes, specs=spec)
    with jax.set_mesh(on):
        update = jax.jit(optimizer.update)
        compiled = update.lower(params, optimizer.init(params), params).compile()
    found = [collective.kind for collective in collectives(compiled)]
    assert {kind: found.count(kind) for kind in found} == expected


@pytest.mark.parametrize("spmd", [None, "workers"])
def test_workers_side_by_side_do_not_share_matrices(spmd):
    """vmap over workers, with the axes inside a worker for each worker's matrices."""
    on = mesh({"workers": 2, "x": 4})
    params = [draw(seed, GROUPS) for seed in (0, 1)]
    stacked = place(
        jax.tree.map(lambda *x: jnp.stack(x), *params), on, P("workers", "x")
    )
    optimizer = mj.muon(0.1, specs=P("x"))
    plain = mj.muon(0.1)
    with jax.set_mesh(on):
        state = jax.vmap(optimizer.init)(stacked)
        update = jax.jit(jax.vmap(optimizer.update, spmd_axis_name=spmd))
        updates, _ = update(stacked, state, stacked)
        compiled = update.lower(stacked, state, stacked).compile()
    for worker, params_k in enumerate(params):
        reference, _ = plain.update(params_k, plain.init(params_k))
        assert_close(jax.tree.map(lambda x: x[worker], updates), reference)  # noqa: B023
    if spmd:
        found = collectives(compiled)
        assert len(found) == 4
        assert not any(collective.crosses(on) for collective in found)


def test_workers_in_turn_share_the_work_inside_themselves():
    on = mesh({"workers": 2, "x": 4})
    workers = mj.Workers(4, on)
    optimizer = mj.muon(0.1, ns_axes="x")
    params = [draw(seed, GROUPS) for seed in range(4)]
    stacked = place(jax.tree.map(lambda *x: jnp.stack(x), *params), on, P("workers"))

    def step(params):
        return optimizer.update(params, optimizer.init(params), params)[0]

    update = jax.jit(workers.map(step, (0,)))
    updates = update(stacked)
    for worker, params_k in enumerate(params):
        reference, _ = mj.muon(0.1).update(params_k, mj.muon(0.1).init(params_k))
        assert_close(jax.tree.map(lambda x: x[worker], updates), reference)  # noqa: B023
    found = collectives(update.lower(stacked).compile())
    assert [collective.kind for collective in found] == ["all-gather"] * 2
    assert not any(collective.crosses(on) for collective in found)


def test_distributed_muon_sends_little_more_than_adamw():
    """Under ZeRO-1 both reduce gradients and gather parameters, in float32.

    Muon brings each matrix to one device besides and takes it back, in bfloat16: 4/N
    bytes a parameter more than the 8, if no device is idle (Moonlight: 2 more, as it
    gathers all on all).
    """
    N = 8
    on = mesh({"x": N})
    specs = P("x")

    def sent(optimizer):
        def step(grads, state, params):
            shard = lambda g: jax.lax.psum_scatter(g, "x", tiled=True) / N
            own = lambda p: p.reshape(N, -1, p.shape[1])[jax.lax.axis_index("x")]
            mine = jax.tree.map(own, params)
            updates, state = optimizer.update(jax.tree.map(shard, grads), state, mine)
            mine = optax.apply_updates(mine, updates)
            gather = lambda p: jax.lax.all_gather(p, "x", tiled=True, to="invarying")
            return jax.tree.map(gather, mine), state

        full = {name: GROUPS[name] for name in GROUPS if "down" not in name}
        params = draw(0, full, jnp.float32)
        grads = jax.tree.map(lambda x: jnp.stack([x] * N), params)
        init = jax.eval_shape(optimizer.init, params)
        states = jax.tree.map(lambda x: P("x") if x.ndim > 1 else P(), init)
        mapped = jax.shard_map(
            lambda grads, state, params: step(
                jax.tree.map(lambda g: g[0], grads), state, params
            ),
            mesh=on,
            in_specs=(P("x"), states, P()),
            out_specs=(P(), states),
        )
        # XLA on CPU would widen what travels in bfloat16.
        options = {"xla_disable_hlo_passes": "float-normalization-bf16"}
        lowered = jax.jit(mapped).lower(grads, init, params)
        total = 0
        for collective in collectives(lowered.compile(compiler_options=options)):
            others = len(collective.groups[0]) - 1
            factor = others if collective.kind == "all-gather" else others / N
            total += factor * collective.num_bytes
        return total

    muon = mj.muon(0.1, specs=specs, ns_dtype=jnp.bfloat16)
    ratio = sent(muon) / sent(optax.adamw(0.1))
    assert 1 < ratio <= 1.25
    assert ratio == pytest.approx(1 + 4 / N / 8)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16])
@pytest.mark.parametrize(
    "keywords",
    [
        {"preconditioning": "aol"},
        {"adaptive": True},
        {"update_norm": True, "scale": mj.adamw_rms},
    ],
)
def test_what_a_matrix_is_measured_by_is_of_the_whole_matrix(keywords, dtype):
    """Rows, norms and sizes; and what travels in bfloat16 is rounded to it anyway."""
    shapes = {"up": (16, 64), "down": (64, 16)}
    params = draw(3, shapes, jnp.float64 if dtype == jnp.float64 else jnp.float32)
    plain, optimizer = (
        mj.muon(1.0, ns_dtype=dtype, specs=specs, **keywords) for specs in (P(), P("x"))
    )
    expected, _ = two_updates(plain, params)
    updates, _ = two_updates(optimizer, place(params, mesh({"x": 8}), P("x")))
    for name, update in updates.items():
        largest = jnp.abs(expected[name]).max()
        # 8 bits of what comes back; by itself the iteration would blow up 1e-3 to 6e-2.
        atol = largest * (1e-12 if dtype == jnp.float64 else 5e-3)
        np.testing.assert_allclose(update, expected[name], rtol=0, atol=atol)


def test_bfloat16_travels_where_the_iteration_is_in_it():
    on = mesh({"x": 8})
    params = place(draw(2, GROUPS, jnp.float32), on, P("x"))
    optimizer = mj.muon(0.1, specs=P("x"), ns_dtype=jnp.bfloat16)
    state = optimizer.init(params)
    text = jax.jit(optimizer.update).lower(params, state, params).as_text()
    sent = [line for line in text.splitlines() if "all_to_all" in line]
    assert len(sent) == 4
    assert all("bf16" in line and "f32" not in line for line in sent)


@pytest.mark.parametrize(
    "keywords, match",
    [
        ({"ns_axes": "tensor"}, r"name tensor, but the mesh has the axes \('x',\)"),
        ({"specs": P("tensor")}, r"name tensor, but the mesh has the axes \('x',\)"),
        ({"specs": P(None, None, "x")}, "spec of w with shape"),
        ({"specs": {"v": P("x")}}, "specs has no entry for w and an entry for v"),
        ({"specs": {"w": "x"}}, "spec of w .* must be a PartitionSpec"),
        ({"specs": {"w": ("x", None)}}, r"spec of w .*; got \('x', None\)"),
        ({"specs": P("x", "x")}, "spec of w .* none twice"),
        ({"specs": P(P.UNCONSTRAINED)}, "spec of w .* names of mesh axes"),
        ({"specs": P("x")}, "spec of w does not divide its shape"),
    ],
)
def test_what_the_mesh_cannot_do_is_refused(keywords, match):
    params = {"w": jnp.ones((4, 6))}
    optimizer = mj.muon(0.1, **keywords)
    with jax.set_mesh(mesh({"x": 8})), pytest.raises(ValueError, match=match):
        optimizer.update(params, optimizer.init(params), params)


def test_what_differs_along_an_axis_is_no_copy_to_share_work_of():
    optimizer = mj.muon(0.1, ns_axes="x")
    step = lambda params: optimizer.update(params, optimizer.init(params))[0]
    local = jax.shard_map(step, mesh=mesh({"x": 8}), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match="along x w differs; if it is sharded, say so"):
        jax.jit(local)({"w": jnp.ones((16, 6))})


def test_without_a_mesh_there_is_nothing_to_share_work_along():
    params = {"w": jnp.ones((4, 6))}
    optimizer = mj.muon(0.1, ns_axes="x")
    with pytest.raises(ValueError, match=r"call under jax\.set_mesh"):
        optimizer.update(params, optimizer.init(params), params)


@pytest.mark.parametrize("axes", [("x", "x"), ("x", None)])
def test_axes_are_different_names(axes):
    with pytest.raises(ValueError, match="ns_axes must be different names"):
        mj.muon(0.1, ns_axes=axes)


@pytest.mark.parametrize("keywords", [{"specs": P("x")}, {"ns_axes": "x"}])
def test_empty_matrices_are_fine_on_a_mesh(keywords):
    params = place({"w": jnp.ones((0, 8)), "v": jnp.ones((8, 8))}, mesh({"x": 8}), P())
    optimizer = mj.muon(0.1, **keywords)
    updates, _ = optimizer.update(params, optimizer.init(params))
    assert updates["w"].shape == (0, 8)


def test_workers_are_no_axis_to_share_work_along():
    with pytest.raises(ValueError, match="'workers' matrices are those of different"):
        mj.muon(0.1, ns_axes=("x", "workers"))
