"""One function of all matrices of a tree, wherever their shards are.

Sharding is read from the types of arrays (mesh axes of type Explicit) or from partition
specs (Auto, or Manual inside `shard_map`). This module hides which axes of the mesh
need to be manual for the matrices to be dealt out over devices, as `stacks` does.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from muloco_jax import layouts, stacks, tree

PyTree = Any
# Of one array: per array axis the mesh axes that shard it, major to minor.
Placement = tuple[tuple[str, ...], ...]


def placements(specs: PyTree | None, updates: PyTree) -> list[Placement]:
    """How each leaf is sharded.

    Args:
        specs: `PartitionSpec`, `NamedSharding` or None (replicated) per parameter, for
            a subtree or for all; types have the last word.
        updates: arrays.

    Raises:
        ValueError: if there is no spec for a leaf, or one has more entries than axes,
            or others than names, or a name twice.
    """
    given = tree.match(specs, updates, _is_spec, "specs")
    found = []
    for path, x in jax.tree.leaves_with_path(updates):
        own = _checked(given[tree.name(path)], tree.name(path), x)
        sharding = jax.typeof(x).sharding
        kinds = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
        typed = {axis for axis, kind in kinds if kind == AxisType.Explicit}
        pairs = zip(_axes(sharding.spec, x.ndim), own, strict=True)
        found.append(
            tuple(
                of_type + tuple(axis for axis in of_spec if axis not in typed)
                for of_type, of_spec in pairs
            )
        )
    return found


def _is_spec(x):
    """Specs, or tuples of names of mesh axes, which are an error of their own."""
    names = isinstance(x, tuple) and any(isinstance(name, str) for name in x)
    return isinstance(x, P | NamedSharding) or names


def _checked(spec, path, x):
    """Per array axis the mesh axes that a spec names."""
    spec = spec.spec if isinstance(spec, NamedSharding) else spec or P()
    if isinstance(spec, P) and len(spec) <= x.ndim:
        entries = _axes(spec, x.ndim)
        axes = sum(entries, ())
        if len(set(axes)) == len(axes) and all(isinstance(axis, str) for axis in axes):
            return entries
    raise ValueError(
        f"the spec of {path} with shape {x.shape} must be a PartitionSpec of at most "
        f"{x.ndim} entries, each None or names of mesh axes, none twice; got {spec!r}"
    )


def apply(
    fn: Callable[[jax.Array], jax.Array],
    factor: Callable[[int, int], float],
    arrays: Sequence[jax.Array],
    leaves: Sequence[layouts.Leaf],
    specs: Sequence[Placement],
    axes: Sequence[str],
    wire_dtype: Callable[[DTypeLike], DTypeLike],
) -> list[jax.Array]:
    """Applies a function of matrices to all matrices of arrays.

    Args:
        fn: as in `stacks.apply`.
        factor: of `(fan_in, fan_out)`, to multiply the result by.
        arrays: of the shapes of the leaves.
        leaves: with the layouts of their matrices.
        specs: how they are sharded.
        axes: mesh axes along which devices that hold the same share the work.
        wire_dtype: what a dtype travels as.

    Returns:
        Arrays of the shapes and shardings of the inputs.

    Raises:
        ValueError: if there is no mesh, or it lacks an axis.
    """
    mesh = _mesh(arrays)
    used = {axis for spec in specs for entry in spec for axis in entry} | set(axes)
    if unknown := sorted(used - set(mesh.axis_names)):
        raise ValueError(
            f"ns_axes or specs name {', '.join(unknown)}, but the mesh has the axes "
            f"{mesh.axis_names}; call under jax.set_mesh(mesh), or place the "
            f"parameters on the mesh"
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = {axis for axis, kind in kinds.items() if kind == AxisType.Manual}
    _check_sizes(leaves, specs, {a: mesh.shape[a] for a in kinds if a not in manual})
    idle = {a for a in kinds if mesh.shape[a] == 1 and kinds[a] == AxisType.Auto}
    specs = [tuple(tuple(a for a in e if a not in idle) for e in s) for s in specs]
    axes = [axis for axis in axes if axis not in idle]
    cutting = {axis for axis in manual if mesh.shape[axis] > 1}
    needed = [
        _unsplit(leaf, spec, cutting) for leaf, spec in zip(leaves, specs, strict=True)
    ]
    local = lambda arrays: _local(fn, factor, arrays, leaves, needed, axes, wire_dtype)
    if used <= manual | idle:
        return local(arrays)
    return _mapped(local, arrays, specs, needed, mesh, set(kinds) - manual)


def _mapped(local, arrays, specs, needed, mesh, left):
    """`local` of the shards of arrays, along the mesh axes that are left to map.

    All of them: `jax.vmap(..., spmd_axis_name=)` needs its axis to be manual.
    """
    outer = lambda spec: P(*[tuple(a for a in e if a in left) for e in spec])
    own, own_specs = list(arrays), [outer(spec) for spec in needed]
    for i, (x, spec) in enumerate(zip(arrays, specs, strict=True)):
        if spec != needed[i] and any(_axes(jax.typeof(x).sharding.spec, x.ndim)):
            own[i] = jax.sharding.reshard(x, NamedSharding(mesh, own_specs[i]))
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(own_specs,), out_specs=own_specs, axis_names=left
    )
    # Under `jit`, so that the mesh of the arrays will do where none is set.
    done = jax.jit(mapped)(own)
    return [
        y if x is before else jax.sharding.reshard(y, jax.typeof(before).sharding)
        for y, x, before in zip(done, own, arrays, strict=True)
    ]


def _mesh(arrays):
    """The mesh that is set, or else that of the arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        meshes = [jax.typeof(x).sharding.mesh for x in arrays]
        mesh = next((m for m in meshes if not m.empty), mesh)
    return mesh


def _axes(spec, ndim):
    entries = [e if isinstance(e, tuple) else (e,) if e else () for e in spec]
    return tuple(entries + [()] * (ndim - len(entries)))


def _check_sizes(leaves, specs, sizes):
    for leaf, spec in zip(leaves, specs, strict=True):
        for size, entry in zip(leaf.x.shape, spec, strict=True):
            if size % math.prod(sizes[axis] for axis in entry if axis in sizes):
                raise ValueError(
                    f"the spec of {leaf.path} does not divide its shape "
                    f"{leaf.x.shape}: an axis of size {size} over {', '.join(entry)}"
                )


def _unsplit(leaf, spec, cutting):
    """The spec of a leaf, but that matrices side by side lie on one device."""
    if not leaf.layout.splits:
        return spec
    if cut := {a for axis in leaf.layout.output for a in spec[axis]} & cutting:
        raise ValueError(
            f"{leaf.path} has splits, so that it cannot be sharded along its fan-out "
            f"over {', '.join(sorted(cut))} inside shard_map"
        )
    return tuple(
        () if axis in leaf.layout.output else entry for axis, entry in enumerate(spec)
    )


def _local(fn, factor, arrays, leaves, specs, axes, wire_dtype):
    """What one device does with its shards."""
    todo, factors, counts = [], [], []
    for x, leaf, spec in zip(arrays, leaves, specs, strict=True):
        over = lambda group, spec=spec: sum((spec[axis] for axis in group), ())
        rows, columns = over(leaf.layout.reduction), over(leaf.layout.output)
        others = tuple(sorted(over(leaf.layout.batch)))
        copies = tuple(axis for axis in axes if axis not in rows + columns + others)
        if differs := _varying(x) & set(copies):
            raise ValueError(
                f"ns_axes are axes along which devices hold the same, but along "
                f"{', '.join(sorted(differs))} {leaf.path} differs; if it is sharded, "
                f"say so with specs"
            )
        stacks_of = [
            stacks.Stack(matrices, rows, columns, copies, others)
            for matrices in leaf.layout.matrices(x)
        ]
        todo += stacks_of
        factors += [factor(*stack.shape) for stack in stacks_of]
        counts.append(len(stacks_of))
    done = stacks.apply(fn, todo, wire_dtype)
    parts = iter([f * y for f, y in zip(factors, done, strict=True)])
    return [
        leaf.layout.leaf([next(parts) for _ in range(count)], x.shape)
        for x, leaf, count in zip(arrays, leaves, counts, strict=True)
    ]


def _varying(x):
    """Manual mesh axes along which an array may differ, where `shard_map` checks it."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()))
