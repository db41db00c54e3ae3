"""What a run takes, against what its arrays then hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import INNER, NESTEROV, SPECS, K, loss, mesh, params

import muloco_jax as mj
from muloco_jax import budget


def build(shape, outer=NESTEROV, reduce=None, fragments=None):
    mesh_ = mesh(**shape)
    workers = mj.Workers(K, mesh_)
    if reduce:
        reduce = mj.reducer(mj.all_reduce_mean(workers), error_decay=0.9)
    return mj.diloco(
        loss,
        INNER["muon"],
        outer,
        workers=workers,
        sync_every=2,
        reduce=reduce,
        fragments=fragments,
        specs=SPECS if "fsdp" in mesh_.shape else None,
    )


def held(tree):
    """Bytes of arrays on each device that holds any, and the most of those."""
    on = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            on[shard.device] = on.get(shard.device, 0) + shard.data.nbytes
    return max(on.values(), default=0)


NONE, LATE = np.array([], int), np.arange(2, 6)
HALVES = [
    {"embed": True, "up": np.arange(5), "down": False, "bias": True},
    {"embed": False, "up": np.arange(5, 8), "down": True, "bias": False},
]


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("fragments", [None, HALVES])
@pytest.mark.parametrize(
    "shape", [{"workers": 4}, {"workers": 2}, {"workers": 2, "fsdp": 2}], ids=str
)
def test_memory_is_what_the_arrays_of_a_device_hold(shape, feedback, fragments):
    algorithm = build(shape, reduce=feedback, fragments=fragments)
    start = params(jnp.bfloat16)  # The rest is wider.
    shapes = jax.eval_shape(algorithm.init, jax.eval_shape(lambda: start))
    told = budget.memory(
        jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            shapes,
            algorithm.shardings(shapes),
        )
    )
    state = algorithm.init(start)
    expected = {
        "theta": held(state.params),
        "theta_k": held(state.workers.params),
        "inner state": held(state.workers.opt_state),
        "outer state": held(state.outer_state),
        "error feedback": held(state.workers.reduce_state),
    }
    assert list(told.items()) == list(expected.items())
    assert (told["error feedback"] > 0) == feedback


def test_a_part_without_bytes_is_told():
    algorithm = build({"workers": 1}, outer=optax.sgd(1.0))
    shapes = jax.eval_shape(algorithm.init, params())
    told = budget.memory(
        jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            shapes,
            algorithm.shardings(shapes),
        )
    )
    assert (told["outer state"], told["error feedback"]) == (0, 0)
    size = 8 * sum(x.size for x in params().values())
    assert (told["theta"], told["theta_k"]) == (size, K * size)


def test_the_table_of_parameters_by_hand():
    tree = {
        "embed": jnp.ones((9, 4)),
        "blocks": {"up": jnp.ones((6, 4, 8)), "down": jnp.ones((6, 8, 4))},
        "norm": jnp.ones(4),
    }
    first, second, third = np.arange(6).reshape(3, 2)
    fragments = [
        {"embed": True, "blocks": {"up": first, "down": first}, "norm": False},
        {"embed": False, "blocks": {"up": second, "down": NONE}, "norm": False},
        {"embed": False, "blocks": {"up": third, "down": LATE}, "norm": True},
    ]
    mask = {"embed": True, "blocks": True, "norm": False}
    routes = mj.routing_table(tree, weight_decay=0.00125, weight_decay_mask=mask)
    assert budget.parameters(routes, fragments, tree) == [
        "parameter    shape      optimizer  lr factor    decay  fragments",
        "blocks/down  (6, 8, 4)  muon          0.7071  0.00125  0, 2",
        "blocks/up    (6, 4, 8)  muon           1.414  0.00125  0-2",
        "embed        (9, 4)     adam               1  0.00125  0",
        "norm         (4,)       adam               1        0  2",
    ]


def test_one_fragment_has_all_parameters():
    tree = {"up": jnp.ones((4, 8)), "gone": None}
    text = budget.parameters(mj.routing_table(tree), [True], tree)
    assert text == [
        "parameter  shape   optimizer  lr factor  decay  fragments",
        "up         (4, 8)  muon           1.414      0          0",
    ]


def test_columns_of_numbers_are_to_the_right():
    rows = [
        ["a", "(6, 4)", "1.414", "1e-05", "12.3 MiB", "0"],
        ["0/b", "(6,)", "1", "0.00125", "1,024 B", "0-2"],
    ]
    assert budget.table(["name", "shape", "x", "y", "size", "z"], rows) == [
        "name  shape       x        y      size  z",
        "a     (6, 4)  1.414    1e-05  12.3 MiB  0",
        "0/b   (6,)        1  0.00125   1,024 B  0-2",
    ]


def test_a_table_without_rows_is_its_header():
    assert budget.table(["name", "bytes"], []) == ["name  bytes"]


@pytest.mark.parametrize(
    "num, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (3 * 2**39, "1.5 TiB"),
        (5000 * 2**50, "5000.0 PiB"),
    ],
)
def test_bytes_come_in_powers_of_1024(num, text):
    assert budget.bytes_text(num) == text
