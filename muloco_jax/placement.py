"""Devices: the mesh of a run, and batches on it.

The axes of a mesh are "workers" and, inside a worker, "data" (the batch is split),
"fsdp" (the batch and the parameters are) and "tensor" (heads, MLP and vocabulary are).
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from muloco_jax.workers import AXIS

# Axes inside a worker that sequences are spread over.
BATCH_AXES = ("data", "fsdp")
_MOST_CPU_DEVICES = 512  # Making them takes time; a mesh that needs more is refused.


def set_cpu_devices(num: int) -> None:
    """Makes `num` CPU devices, in case JAX ends up on CPU.

    A number that someone set (`JAX_NUM_CPU_DEVICES`) is left alone, and so is a JAX
    that has already looked for devices.
    """
    if jax.config.jax_num_cpu_devices < 0:  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", min(num, _MOST_CPU_DEVICES))


def make_mesh(num_workers: int, slices: int, inside: Mapping[str, int]) -> Mesh:
    """The mesh of a run.

    Args:
        num_workers: K.
        slices: M, the size of the axis "workers"; 0: as many as there are devices for.
        inside: sizes of the axes inside a worker; those of size 1 are left out.

    Raises:
        ValueError: if there are too few devices, or processes without any.
    """
    inside = {axis: size for axis, size in inside.items() if size > 1}
    per_slice, available = math.prod(inside.values()), jax.device_count()
    if slices == 0:
        divisors = [m for m in range(1, num_workers + 1) if num_workers % m == 0]
        slices = max([m for m in divisors if m * per_slice <= available], default=1)
    shape = {AXIS: slices, **inside}
    if slices * per_slice > available:
        raise ValueError(
            f"a mesh of {shape} needs {slices * per_slice} devices, but there are "
            f"{available}; make one of its axes smaller"
        )
    devices = jax.devices()[: slices * per_slice]
    if len({device.process_index for device in devices}) < jax.process_count():
        raise ValueError(
            f"a mesh of {shape} takes the first {len(devices)} of {available} devices, "
            f"which leaves some processes without any; make one of its axes larger, or "
            f"start fewer processes (on CPU, set JAX_NUM_CPU_DEVICES)"
        )
    return Mesh(
        layout(devices, tuple(shape.values())),
        tuple(shape),
        axis_types=(AxisType.Auto,) * len(shape),
    )


def layout(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Devices as a mesh whose first axis is that of workers.

    Where devices are in several groups with slow networks between them (slices of TPUs,
    hosts of GPUs), the workers are split over the groups, so that only they communicate
    over those, if their number allows that.
    """
    groups = len({getattr(device, "slice_index", 0) for device in devices})
    if groups == 1:
        return mesh_utils.create_device_mesh(shape, devices)
    if shape[0] % groups:
        return np.array(devices).reshape(shape)
    within, between = (shape[0] // groups, *shape[1:]), (groups, *[1] * len(shape[1:]))
    return mesh_utils.create_hybrid_device_mesh(within, between, devices)


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of `mesh` that sequences are spread over inside a worker."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.shape)


def place(
    mesh: Mesh, spec: P, shape: tuple[int, ...], read: Callable[..., np.ndarray]
) -> jax.Array:
    """An array on the mesh, of which each process reads just what its devices hold.

    Args:
        mesh: where.
        spec: partition spec of the array.
        shape: of the whole array.
        read: a tuple of slices, one per axis -> that part of the array.
    """
    known = {}  # Devices of a tensor group hold the same part.

    def part(where):
        key = str(where)
        if key not in known:
            known[key] = read(where)
        return known[key]

    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), part)
