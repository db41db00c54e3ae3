"""Where workers live when networks between devices differ."""

from types import SimpleNamespace

import numpy as np
import pytest

from muloco_jax import placement


def devices(num, per_group):
    """GPUs of several hosts: the groups that JAX calls slices."""
    return [
        SimpleNamespace(
            id=i,
            platform="gpu",
            device_kind="NVIDIA H100 80GB HBM3",
            process_index=i // per_group,
            slice_index=i // per_group,
        )
        for i in range(num)
    ]


@pytest.mark.parametrize(
    "workers, inside", [(2, (8,)), (4, (4,)), (8, (2, 1)), (16, ())]
)
def test_a_worker_stays_within_a_group_of_devices(workers, inside):
    mesh = placement.layout(devices(16, 8), (workers, *inside))
    assert mesh.shape == (workers, *inside)
    assert sorted(device.id for device in mesh.flat) == list(range(16))
    for worker in mesh.reshape(workers, -1):
        assert len({device.slice_index for device in worker}) == 1


def test_a_worker_may_be_larger_than_a_group():
    mesh = placement.layout(devices(16, 4), (2, 8))
    ids = np.vectorize(lambda device: device.id)(mesh)
    assert ids.tolist() == [list(range(8)), list(range(8, 16))]
