"""Where in a parameter its matrices are.

A leaf is one matrix, a stack of them, a convolution, or several fused side by side.
This module hides how it is turned into matrices and back.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers


class SplitDimensionNumbers(NamedTuple):
    """`MuonDimensionNumbers` of matrices fused side by side along their fan-out.

    Each is orthogonalized, and has its learning-rate factor, for itself. A kernel
    `[D, 3 D]` that holds query, key and value has `splits=(D, D, D)`; one matrix per
    head of it is `splits=(head_dim,) * (3 * heads)`. Heads with an axis of their own,
    as in `[D, heads, head_dim]`, need no splits: leave out their axis, and it is a
    batch.

    Attributes:
        reduction_axis: axis or axes of fan-in.
        output_axis: axis or axes of fan-out.
        splits: fan-outs of the matrices, whose sum is the fan-out of the leaf.
    """

    reduction_axis: int | Sequence[int] = -2
    output_axis: int | Sequence[int] = -1
    splits: Sequence[int] = ()


class Layout(NamedTuple):
    """Where the matrices of a leaf are.

    Attributes:
        batch: axes that count matrices.
        reduction: axes of fan-in.
        output: axes of fan-out.
        splits: fan-outs of the matrices that lie side by side; empty for one.
    """

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]
    splits: tuple[int, ...] = ()

    def fans(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """`(fan_in, fan_out)` of each matrix of a leaf, all splits one by one."""
        fan_in, fan_out = (
            math.prod(shape[a] for a in axes) for axes in (self.reduction, self.output)
        )
        return [(fan_in, split) for split in self.splits or (fan_out,)]

    def matrices(self, x: jax.Array) -> list[jax.Array]:
        """A leaf, or a shard of it, as `[b, fan_in, fan_out]` per split."""
        moved = x.transpose(self._order)
        [(fan_in, _), *_] = self.fans(x.shape)
        fan_out = math.prod(x.shape[a] for a in self.output)
        batch = math.prod(x.shape[a] for a in self.batch)
        whole = moved.reshape(batch, fan_in, fan_out)
        if not self.splits:
            return [whole]
        return jnp.split(whole, np.cumsum(self.splits)[:-1], axis=-1)

    def leaf(self, matrices: Sequence[jax.Array], shape: Sequence[int]) -> jax.Array:
        """What `matrices` makes of a leaf of some shape, undone."""
        moved = [shape[a] for a in self._order]
        inverse = [self._order.index(a) for a in range(len(shape))]
        return jnp.concatenate(matrices, axis=-1).reshape(moved).transpose(inverse)

    @property
    def _order(self):
        return self.batch + self.reduction + self.output


class Leaf(NamedTuple):
    """A parameter and where it goes.

    Attributes:
        path: its name.
        x: the array, or its shape and dtype.
        layout: of its matrices, for Muon; None for the other optimizer.
    """

    path: str
    x: Any
    layout: Layout | None


def of(
    name: str,
    shape: Sequence[int],
    numbers: MuonDimensionNumbers | SplitDimensionNumbers,
) -> Layout:
    """The layout of a parameter of some shape.

    >>> of("kernel", (3, 4, 8), MuonDimensionNumbers(-2, -1))
    Layout(batch=(0,), reduction=(1,), output=(2,), splits=())

    Raises:
        ValueError: naming the parameter, for axes that are not there or stand twice.
    """
    groups = []
    if len(shape) < 2:
        raise ValueError(
            f"{name} has shape {shape}, but {numbers} name a matrix; use None to give "
            f"it to the other optimizer"
        )
    for key in ("reduction_axis", "output_axis"):
        axes = _ints(name, key, getattr(numbers, key))
        if not axes:
            raise ValueError(f"{name} with shape {shape}: {key} is empty")
        for axis in axes:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"{name} with shape {shape}: {key}={axis} is out of range for "
                    f"{len(shape)} axes"
                )
        groups.append(tuple(axis % len(shape) for axis in axes))
    reduction, output = groups
    for axis in range(len(shape)):
        if (reduction + output).count(axis) > 1:
            raise ValueError(
                f"{name} with shape {shape}: axis {axis} stands twice in {numbers}"
            )
    batch = tuple(a for a in range(len(shape)) if a not in reduction + output)
    layout = Layout(batch, reduction, output)
    if isinstance(numbers, MuonDimensionNumbers):
        return layout
    splits = _ints(name, "splits", numbers.splits)
    [(_, fan_out)] = layout.fans(shape)
    if not splits or sum(splits) != fan_out or min(splits) < 1:
        raise ValueError(
            f"{name} with shape {shape}: splits must be positive and sum to the "
            f"fan-out {fan_out}, got {splits} (inside shard_map such a leaf cannot be "
            f"sharded along its fan-out)"
        )
    return layout._replace(splits=splits)


def _ints(name, key, value):
    """One integer or several as a tuple."""
    try:
        values = tuple(value) if isinstance(value, Iterable) else (value,)
        if not any(isinstance(x, bool) for x in values):
            return tuple(map(operator.index, values))
    except TypeError:
        pass
    raise ValueError(f"{name} must have integers for {key}, got {value!r}")
