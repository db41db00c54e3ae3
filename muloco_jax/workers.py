"""K workers and where they live: an axis of arrays, placed on an axis of a mesh.

Everything that workers own is stacked along a leading axis of size K. That axis is laid
over the mesh axis "workers" of size M, where M divides K; each slice of the mesh runs
its K/M workers one after another or side by side. M = 1 simulates all workers on one
device, M = K gives each a slice of its own, and both are the same code.

Two views of the stack, and nothing else in the library knows how they are made:

- `Workers.map`: the program of one worker, which calls no collective over workers.
  Mesh axes other than "workers" are left to the compiler, to shard the work inside one.
- `Workers.join`: the program of one device, which sees its own shard of its own workers
  `[K/M, ...]` and may call `mean`, `gather` and `exchange`.

`join` checks that what is declared equal on all workers is so: forgetting to average is
an error while tracing.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "workers"
_GLOBAL = P()

PyTree = Any
Axes = Any  # Prefix tree of 0 (stacked over workers, axis 0) or None (global).


def wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype in which deltas are formed and averaged: float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def stacked(specs: PyTree) -> PyTree:
    """Partition specs of leaves `[K, ...]` from those of leaves `[...]`."""
    return jax.tree.map(lambda spec: P(AXIS, *spec), specs)


def optimizer_specs(
    state: PyTree, params: PyTree, specs: PyTree, prefix: P = _GLOBAL
) -> PyTree:
    """Partition specs of an optimizer's state: a leaf like a parameter has its spec.

    A leaf is like a parameter if its path ends in that of the parameter and it has the
    same shape: momenta are, however deep in chains and masks they stand.

    Args:
        state: an optimizer's state, or its shapes.
        params: the parameters, or their shapes.
        specs: partition specs of the parameters.
        prefix: spec of the axes in front: `P(AXIS)` if the state is stacked.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    known = {path: leaf.shape for path, leaf in leaves}
    spec_of = dict(zip(known, jax.tree.leaves(specs), strict=True))

    def leaf(path, x):
        for start in range(len(path) + 1):
            if known.get(path[start:]) == x.shape[len(prefix) :]:
                return P(*prefix, *spec_of[path[start:]])
        return prefix

    return jax.tree_util.tree_map_with_path(leaf, state)


@dataclasses.dataclass(frozen=True)
class Workers:
    """K workers and their placement.

    Attributes:
        num: the number of workers, K.
        mesh: a mesh with an axis "workers" whose size M divides K, and any other axes,
            of type Auto. By default the first device alone, so M = 1.
        sequential: whether the K/M workers of a slice run one after another (matrix
            products of full speed, the activations of one worker at a time) or side by
            side as a batch.

    Raises:
        ValueError: if the workers do not fit the mesh.
    """

    num: int
    mesh: Mesh = None  # type: ignore[assignment]
    sequential: bool = True

    def __post_init__(self):
        if isinstance(self.num, bool) or not isinstance(self.num, int) or self.num < 1:
            raise ValueError(f"num must be a positive int, got {self.num!r}")
        if self.mesh is None:
            mesh = jax.make_mesh(
                (1,), (AXIS,), (AxisType.Auto,), devices=jax.local_devices()[:1]
            )
            object.__setattr__(self, "mesh", mesh)
        shape = dict(self.mesh.shape)
        if AXIS not in shape:
            raise ValueError(
                f"the mesh needs an axis {AXIS!r} (of size 1 if it has nothing to "
                f"spread), got axes {tuple(shape)}"
            )
        if any(kind != AxisType.Auto for kind in self.mesh.axis_types):
            raise ValueError(
                f"mesh axes must be of type Auto, got {self.mesh.axis_types}; pass "
                f"axis_types=(AxisType.Auto,) * {len(shape)} to jax.make_mesh"
            )
        if self.num % shape[AXIS]:
            sizes = [m for m in range(1, self.num + 1) if self.num % m == 0]
            raise ValueError(
                f"{self.num} workers do not divide evenly over mesh axis {AXIS!r} of "
                f"size {shape[AXIS]}; it may have size {', '.join(map(str, sizes))}"
            )

    @property
    def slices(self) -> int:
        """M, the size of the mesh axis "workers"."""
        return self.mesh.shape[AXIS]

    @property
    def local(self) -> int:
        """K/M, the number of workers that share a slice of the mesh."""
        return self.num // self.slices

    def map(self, fn: Callable, in_axes: tuple[int | None, ...]) -> Callable:
        """Turns a function of one worker into a function of all of them.

        Args:
            fn: the program of one worker, which calls no collective over workers.
            in_axes: per argument, 0 if it is stacked over workers, None if all workers
                share it. One at least is stacked.

        Returns:
            A function of the stacked arguments whose results are stacked.

        Raises:
            ValueError: if no argument is stacked.
        """
        if 0 not in in_axes:
            raise ValueError(f"one of in_axes must be 0 (stacked), got {in_axes}")

        def local(*args):
            stacked = [a for a, axis in zip(args, in_axes, strict=True) if axis == 0]

            def one(stacked):
                own = iter(stacked)
                pairs = zip(in_axes, args, strict=True)
                return fn(*[next(own) if axis == 0 else arg for axis, arg in pairs])

            if self.sequential:
                return jax.lax.map(one, stacked)
            return jax.vmap(one)(stacked)

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(P() if axis is None else P(AXIS) for axis in in_axes),
            out_specs=P(AXIS),
            axis_names={AXIS},
            # There is nothing to check: no result is declared equal on all workers. And
            # the check would refuse loops whose carry starts from constants, which are
            # in many losses and optimizers.
            check_vma=False,
        )

    def join(self, fn: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
        """Runs `fn` once per device, each on its shard: where workers communicate.

        Args:
            fn: the program of one device. A stacked argument arrives as the shard
                `[K/M, ...]` of the workers of this slice.
            in_specs: partition specs of the arguments over all mesh axes.
            out_specs: partition specs of the results; leaving out "workers" claims that
                a result is equal on all workers, which is checked.
        """
        return jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def mean(self, tree: PyTree) -> PyTree:
        """Averages over all workers, inside `join`: `[K/M, ...]` -> `[...]`."""
        return jax.tree.map(lambda x: jax.lax.pmean(wide(x).mean(0), AXIS), tree)

    def gather(self, tree: PyTree) -> PyTree:
        """Stacks what all workers have, inside `join`: `[K/M, ...]` -> `[K, ...]`."""
        gather = lambda x: jax.lax.all_gather(x, AXIS, tiled=True, to="invarying")
        return jax.tree.map(gather, tree)

    def exchange(self, tree: PyTree) -> PyTree:
        """Sends entry j of each worker to worker j, inside `join`.

        Leaves go from `[K/M, K (to), ...]` to `[K/M, K (from), ...]`.
        """

        def leaf(x):
            x = x.reshape(self.local, self.slices, self.local, *x.shape[2:])
            x = jax.lax.all_to_all(x, AXIS, 1, 1)  # [K/M (from), M, K/M (to), ...]
            return (
                jnp.moveaxis(x, 2, 0)
                .swapaxes(1, 2)
                .reshape(x.shape[2], -1, *x.shape[3:])
            )

        return jax.tree.map(leaf, tree)

    def check_specs(self, specs: PyTree, params: PyTree) -> None:
        """Checks partition specs of parameters over the axes inside a worker.

        Raises:
            ValueError: if they are no tree like the parameters, name other axes, or do
                not divide a parameter.
        """
        expected, found = jax.tree.structure(params), jax.tree.structure(specs)
        if expected != found:
            raise ValueError(
                f"specs must be a tree like the parameters, {expected}; got {found}"
            )
        inside = {axis: n for axis, n in self.mesh.shape.items() if axis != AXIS}

        def leaf(path, x, spec):
            where = f"the spec {spec} of {jax.tree_util.keystr(path)} {x.shape}"
            if len(spec) > len(x.shape):
                raise ValueError(f"{where} has more entries than that has axes")
            for size, entry in zip(x.shape, spec, strict=False):
                axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
                if not set(axes) <= inside.keys():
                    raise ValueError(
                        f"{where} may name the axes inside a worker, {list(inside)}"
                    )
                if size % math.prod(inside[axis] for axis in axes):
                    raise ValueError(f"{where} does not divide axis of size {size}")

        jax.tree_util.tree_map_with_path(leaf, params, specs)

    def shardings(self, specs: PyTree) -> PyTree:
        """NamedShardings on this mesh from partition specs."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def put(self, tree: PyTree, axes: Axes) -> PyTree:
        """Places host arrays on the mesh.

        Args:
            tree: arrays; of several processes, each must hold them whole and equal.
            axes: prefix tree of 0 (stacked over workers) or None (global).

        Raises:
            ValueError: if a stacked leaf does not have K entries.
        """

        def leaf(axis, subtree):
            for x in jax.tree.leaves(subtree):
                if axis == 0 and np.shape(x)[:1] != (self.num,):
                    raise ValueError(
                        f"a stacked leaf must have {self.num} entries, one per worker, "
                        f"along its first axis; got shape {np.shape(x)}"
                    )
            spec = P() if axis is None else P(AXIS)
            return jax.device_put(subtree, NamedSharding(self.mesh, spec))

        return jax.tree.map(leaf, axes, tree, is_leaf=lambda x: x is None)
