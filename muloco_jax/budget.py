"""What a run will take, as numbers and as text, before anything is allocated.

All of it follows from shapes and shardings. Nothing here prints.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from muloco_jax.fragments import Fragment
from muloco_jax.optimizers import Route

PyTree = Any

# A number, and perhaps its unit: "1,280", "-0.5%", "12.3 MiB", "150.6M".
_QUANTITY = re.compile(r"[-+]?[\d,.]+(e[-+]\d+)?( ?[A-Za-z%][\w/%]*)?")


def describe(plan: Any) -> list[str]:
    """What a run takes, as lines of text.

    Args:
        plan: an `experiment.Plan`.
    """
    workers, state = plan.workers, plan.state
    inner, outer = plan.names
    per_step = plan.batch_sizes * plan.sequence_length
    total = int(per_step.sum()) * plan.sync_every
    axes = workers.mesh.shape.items()
    spread = ", ".join(f"{axis}: {size}" for axis, size in axes)
    device = workers.mesh.devices.flat[0]
    parts = memory(state)
    of_parts = ", ".join(
        f"{name} {bytes_text(size)}" for name, size in parts.items() if size
    )
    # A batch schedule makes several of each, in its order.
    each = lambda values: " then ".join(
        f"{n:,}" for n in dict.fromkeys(values.tolist())
    )
    return [
        f"model      {plan.num_params:,} parameters, "
        f"{plan.flops_per_token:,} FLOPs per token trained",
        f"optimizers {inner} inside, {outer} outside",
        f"workers    {workers.num} on {device.device_kind} mesh {{{spread}}}",
        f"steps      {len(plan.learning_rates):,} one after another, in "
        f"{plan.rounds:,} rounds of {plan.sync_every}",
        f"tokens     per step {each(per_step)}, of each worker "
        f"{each(per_step // workers.num)}",
        f"           per round {each(per_step * plan.sync_every)}, in all {total:,}",
        f"compute    {total * plan.flops_per_token:.3g} FLOPs in all",
        f"sends      {bytes_text(plan.wire_bytes)} ({plan.wire_bytes:,} bytes) of each "
        f"worker per round, {bytes_text(plan.rounds * plan.wire_bytes)} in all, if "
        f"each has devices of its own",
        f"memory     {bytes_text(sum(parts.values()))} of state on each device, "
        f"besides gradients and activations:",
        f"           {of_parts}",
        "",
        *parameters(plan.routes, plan.fragments, plan.shapes),
        "",
    ]


def memory(state: Any) -> dict[str, int]:
    """Bytes of a run's state on the fullest device, by part.

    Args:
        state: a `DiLoCoState` of arrays, or of shapes with their shardings.
    """

    def on_a_device(x):  # Shards are of one shape, so no device is fuller.
        return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    sizes = jax.tree.map(on_a_device, state)
    parts = {
        "theta": sizes.params,
        "theta_k": sizes.workers.params,
        "inner state": sizes.workers.opt_state,
        "outer state": sizes.outer_state,
        "error feedback": sizes.workers.reduce_state,
    }
    return {name: sum(jax.tree.leaves(part)) for name, part in parts.items()}


def parameters(
    routes: Sequence[Route], fragments: Sequence[Fragment], params: PyTree
) -> list[str]:
    """What happens to each parameter, as lines of text.

    Args:
        routes: of `optimizers.routing_table`.
        fragments: what syncs when, see `muloco_jax.fragments`.
        params: arrays or their shapes.
    """
    takes = [jax.tree.leaves(jax.tree.broadcast(f, params)) for f in fragments]
    some = lambda which: which if isinstance(which, bool) else len(which) > 0
    rows = []
    for route, *of_leaf in zip(routes, *takes, strict=True):
        members = [i for i, which in enumerate(of_leaf) if some(which)]
        row = [route.path, str(route.shape), route.side]
        row += [f"{route.factor:.4g}", f"{route.decay:.4g}", _ranges(members)]
        rows.append(row)
    header = ["parameter", "shape", "optimizer", "lr factor", "decay", "fragments"]
    return table(header, rows)


def _ranges(numbers):
    """Ascending numbers as text, those without a gap as their first and last."""
    first, last = numbers[0], numbers[-1]
    if 1 < len(numbers) == last - first + 1:
        return f"{first}-{last}"
    return ", ".join(map(str, numbers))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines of text: columns of numbers, with or without unit, to the right.

    >>> table(["part", "bytes"], [["theta", "8 MiB"], ["all", "64 MiB"]])
    ['part    bytes', 'theta   8 MiB', 'all    64 MiB']
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(map(_QUANTITY.fullmatch, column[1:])) for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if to_the_right else cell.ljust(width)
            for cell, width, to_the_right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def bytes_text(num: int) -> str:
    """A number of bytes, to four digits.

    >>> bytes_text(512), bytes_text(12_900_000)
    ('512 B', '12.3 MiB')
    """
    return _scaled(num, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(num, step, units):
    if num < step:
        return f"{num}{units[0]}"
    for unit in units[1:]:
        num /= step
        if round(num, 1) < step or unit == units[-1]:
            break
    return f"{num:.1f}{unit}"
