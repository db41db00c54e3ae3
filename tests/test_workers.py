"""Workers: both views of the stack, and the collectives, on every placement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from problem import mesh

import muloco_jax as mj
from muloco_jax.workers import AXIS

K = 4
SLICES = pytest.mark.parametrize("slices", [1, 2, 4])


@SLICES
@pytest.mark.parametrize("sequential", [True, False])
def test_map_runs_the_program_of_one_worker_for_each(slices, sequential):
    workers = mj.Workers(K, mesh(workers=slices), sequential)
    own, shared = jnp.arange(8.0).reshape(K, 2), {"a": jnp.array([1.0, 10.0])}
    fn = lambda shared, own: {
        "sum": jnp.dot(own, shared["a"]),
        "both": (own, shared["a"]),
    }
    result = workers.map(fn, (None, 0))(shared, own)
    np.testing.assert_array_equal(result["sum"], [10.0, 32.0, 54.0, 76.0])
    np.testing.assert_array_equal(result["both"][0], own)
    np.testing.assert_array_equal(result["both"][1], np.tile([1.0, 10.0], (K, 1)))


@SLICES
def test_mean_is_that_of_all_workers_in_float32_at_least(slices):
    workers = mj.Workers(K, mesh(workers=slices))
    mean = workers.join(workers.mean, (P(AXIS),), P())
    values = jnp.arange(12.0).reshape(K, 3)
    np.testing.assert_array_equal(mean(values), values.mean(0))
    # 1 + 2^-8 is no bfloat16, but the mean of 1, 1, 1 and 1 + 2^-6 is it in float32.
    assert float(mean(jnp.array([1, 1, 1, 1 + 2**-6], jnp.bfloat16))) == 1 + 2**-8


@SLICES
def test_gather_gives_everyone_what_all_have(slices):
    workers = mj.Workers(K, mesh(workers=slices))
    gather = workers.join(workers.gather, (P(AXIS),), P())
    values = {"x": jnp.arange(8).reshape(K, 2)}
    np.testing.assert_array_equal(gather(values)["x"], values["x"])


@SLICES
def test_exchange_swaps_sender_and_receiver(slices):
    """Entry j of worker k becomes entry k of worker j: a transpose of the stack."""
    workers = mj.Workers(K, mesh(workers=slices))
    exchange = workers.join(workers.exchange, (P(AXIS),), P(AXIS))
    values = jnp.arange(K * K * 3).reshape(K, K, 3)
    np.testing.assert_array_equal(exchange(values), values.swapaxes(0, 1))


@SLICES
def test_claiming_that_workers_agree_without_a_mean_is_an_error_while_tracing(slices):
    workers = mj.Workers(K, mesh(workers=slices))
    forgot = workers.join(lambda x: x[0], (P(AXIS),), P())
    with pytest.raises(ValueError, match=r"vary|varying|replicated"):
        jax.eval_shape(forgot, jnp.ones((K, 2)))


def test_a_program_of_shared_arguments_alone_is_refused():
    with pytest.raises(ValueError, match=r"must be 0 .stacked., got .None,."):
        mj.Workers(K).map(lambda x: x, (None,))


def test_put_places_stacked_leaves_on_slices_and_global_ones_everywhere():
    workers = mj.Workers(K, mesh(workers=2))
    tree = {"mine": {"x": np.ones((K, 3))}, "ours": np.ones(3)}
    placed = workers.put(tree, {"mine": 0, "ours": None})
    assert placed["mine"]["x"].sharding.spec == P(AXIS)
    assert placed["mine"]["x"].addressable_shards[0].data.shape == (2, 3)
    assert placed["ours"].sharding.spec == P()


def test_put_refuses_a_stack_of_another_number_of_workers():
    with pytest.raises(ValueError, match=r"4 entries.*\(3, 2\)"):
        mj.Workers(K).put(np.ones((3, 2)), 0)


def test_without_a_mesh_all_workers_live_on_one_device():
    workers = mj.Workers(K)
    assert (workers.slices, workers.local) == (1, K)
    assert dict(workers.mesh.shape) == {AXIS: 1}


@pytest.mark.parametrize("num", [0, -1, 2.0, True, "4"])
def test_the_number_of_workers_is_a_positive_int(num):
    with pytest.raises(ValueError, match="num must be a positive int"):
        mj.Workers(num)


def test_workers_that_do_not_divide_over_the_mesh_name_the_sizes_that_would():
    with pytest.raises(ValueError, match="size 4; it may have size 1, 2, 3, 6"):
        mj.Workers(6, mesh(workers=4))


def test_a_mesh_without_the_axis_is_refused():
    with pytest.raises(ValueError, match="needs an axis 'workers'"):
        mj.Workers(2, mesh(data=2))


def test_explicit_axes_are_refused_with_what_to_write():
    explicit = jax.make_mesh(
        (2,), (AXIS,), (AxisType.Explicit,), devices=jax.devices()[:2]
    )
    with pytest.raises(ValueError, match=r"axis_types=\(AxisType.Auto,\) \* 1"):
        mj.Workers(2, explicit)
