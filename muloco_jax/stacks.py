"""One function of many matrices: batched by shape, and dealt out over devices.

Of the matrices of a shape each device gets some: whole ones, where the device held a
shard of each, and a part of them, where all devices held the same. The results go back
to where they belong. This takes one all-to-all each way per shape for matrices that are
sharded, and one all-gather for those that are not. Nothing is communicated in between,
however many products the function takes.

Legend: m <= n, the global shape of a matrix; B, b, how many of them; S, the product of
the mesh axes that shard the matrix; R, of those that hold equal copies of it.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Axes = tuple[str, ...]
# Of what is batched at once. On CPU, where batched products are slower than one after
# another, to stack small matrices saves the compiler work.
PACK_BYTES = 2**28
CPU_PACK_BYTES = 2**20


class Stack(NamedTuple):
    """Matrices of one shape, or this device's shard of each.

    Attributes:
        x: `[b, m, n]`, or a shard of it.
        rows: mesh axes that shard m, major to minor; manual, as all mesh axes here.
        columns: mesh axes that shard n.
        copies: mesh axes along which all devices hold the same, to share the work.
        others: mesh axes along which devices hold other matrices.
    """

    x: jax.Array
    rows: Axes = ()
    columns: Axes = ()
    copies: Axes = ()
    others: Axes = ()

    @property
    def shape(self) -> tuple[int, int]:
        """M and n, not those of the shard."""
        _, m, n = self.x.shape
        return m * _size(self.rows), n * _size(self.columns)


def apply(
    fn: Callable[[jax.Array], jax.Array],
    stacks: Sequence[Stack],
    wire_dtype: Callable[[DTypeLike], DTypeLike] = lambda dtype: dtype,
    one_by_one: bool | None = None,
) -> list[jax.Array]:
    """Applies a function of matrices to each matrix.

    Args:
        fn: a function of `[..., m, n]` with m <= n that keeps the shape, takes each
            matrix by itself, and commutes with taking the adjoint and with permuting
            rows or columns: what several axes make of a matrix, as those of a
            convolution, is put together from its shards in another order.
        stacks: what to apply it to.
        wire_dtype: what a dtype travels as.
        one_by_one: whether `fn` takes a matrix at a time; None: on CPU.

    Returns:
        The results, one per stack and shaped like it.
    """
    if one_by_one is None:
        one_by_one = jax.default_backend() == "cpu"
    wide = [_wide(stack) for stack in stacks]
    groups, results = {}, {}
    for i, stack in enumerate(wide):
        if stack.x.size == 0:
            results[i] = stack.x
            continue
        # Together with others, what is equal along an axis would seem to differ.
        key = (*stack.shape, stack.x.dtype, _axes(stack), stack.copies, stack.others)
        groups.setdefault(key, []).append(i)
    for members in groups.values():
        group = [wide[i] for i in members]
        if _axes(group[0]) or group[0].copies:
            together = lambda x: _batched(fn, x, one_by_one)
            done = _dealt_out(together, group, wire_dtype)
        else:
            done = _packed(fn, [stack.x for stack in group], one_by_one)
        results.update(zip(members, done, strict=True))
    return [
        result if wide[i] is stacks[i] else result.mT.conj()
        for i, result in sorted(results.items())
    ]


def _wide(stack):
    """The stack, or if its matrices are tall, its adjoint: both share a group."""
    m, n = stack.shape
    if m <= n:
        return stack
    return stack._replace(x=stack.x.mT.conj(), rows=stack.columns, columns=stack.rows)


def _axes(stack):
    return tuple(sorted(stack.rows + stack.columns))


def _size(axes):
    return math.prod(map(jax.lax.axis_size, axes))


def _packed(fn, arrays, one_by_one):
    """Several `[b, m, n]` in as few calls of `fn` as the bytes allow."""
    packs, room = [], 0
    for x in arrays:
        if not packs or x.nbytes > room:
            packs.append([])
            room = CPU_PACK_BYTES if one_by_one else PACK_BYTES
        packs[-1].append(x)
        room -= x.nbytes
    done = []
    for pack in packs:
        result = _batched(fn, _concatenate(pack), one_by_one)
        done += _parts(result, [len(x) for x in pack])
    return done


def _batched(fn, x, one_by_one):
    """`fn` of `[b, m, n]`, of a part after the other where `b` is large."""
    if x.size == 0:
        return x
    if len(x) == 1:
        return fn(x[0])[None]
    if one_by_one:  # But two of them side by side, which occupies more cores.
        step = lambda _, matrix: (None, fn(matrix))
        return jax.lax.scan(step, None, x, unroll=2)[1]
    batch = max(1, PACK_BYTES // x[0].nbytes)
    return fn(x) if len(x) <= batch else jax.lax.map(fn, x, batch_size=batch)


def _dealt_out(fn, group, wire_dtype):
    """`fn` of each matrix of stacks of one shape, each on one of the devices."""
    shards, copies = _axes(group[0]), group[0].copies
    S, R = _size(shards), _size(copies)
    # Stacks that are sharded alike are one. A slot holds one matrix per device.
    alike = {}
    for i, stack in enumerate(group):
        alike.setdefault((stack.rows, stack.columns), []).append(i)
    sent, shapes = [], []
    for members in alike.values():
        x = _concatenate([group[i].x for i in members])
        x = jnp.pad(x, ((0, -len(x) % (S * R)), (0, 0), (0, 0)))
        sent.append(x.reshape(S, len(x) // S, -1))
        shapes.append(x.shape[1:])
    slots = [x.shape[1] for x in sent]

    def exchange(x):  # Entry j of [S, ...] goes to device j, which has S of them then.
        if not shards:
            return x
        x, dtype = x.astype(wire_dtype(x.dtype)), x.dtype
        return jax.lax.all_to_all(x, shards, 0, 0, tiled=True).astype(dtype)

    def shared(x):  # Each of R devices applies `fn` to a part of [B, m, n].
        mine = [
            part.reshape(R, -1, *part.shape[1:])[index] for part in _parts(x, slots)
        ]
        y = fn(_concatenate(mine))
        y, dtype = y.astype(wire_dtype(y.dtype)), y.dtype
        y = jax.lax.all_gather(y, copies, to="invarying").astype(dtype)
        parts = _parts(y, [n // R for n in slots], axis=1)
        return _concatenate([part.reshape(-1, *y.shape[2:]) for part in parts])

    index = jax.lax.axis_index(copies) if copies else None
    kinds = list(zip(alike, shapes, strict=True))
    received = _parts(exchange(jnp.concatenate(sent, axis=1)), slots, axis=1)
    wholes = [
        _whole(x, shards, *split, *shape)
        for x, (split, shape) in zip(received, kinds, strict=True)
    ]
    done = (shared if copies else fn)(_concatenate(wholes))
    back = [
        _shards(x, shards, *split, *shape)
        for x, (split, shape) in zip(_parts(done, slots), kinds, strict=True)
    ]
    back = _parts(exchange(jnp.concatenate(back, axis=1)), slots, axis=1)
    results = {}
    for members, x, shape in zip(alike.values(), back, shapes, strict=True):
        own = [len(group[i].x) for i in members]
        x = x.reshape(-1, *shape)[: sum(own)]
        results.update(zip(members, _parts(x, own), strict=True))
    return [results[i] for i in range(len(group))]


def _whole(x, axes, rows, columns, m, n):
    """Matrices `[b, rows m, columns n]` from their shards `[S, b, m n]`."""
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    x = x.reshape(*sizes, -1, m, n)
    at = [axes.index(axis) for axis in rows], [axes.index(axis) for axis in columns]
    b, m_at, n_at = range(len(axes), len(axes) + 3)
    x = x.transpose(b, *at[0], m_at, *at[1], n_at)
    return x.reshape(len(x), m * _size(rows), n * _size(columns))


def _shards(x, axes, rows, columns, m, n):
    """The inverse of `_whole`."""
    size = lambda group: [jax.lax.axis_size(axis) for axis in group]
    x = x.reshape(len(x), *size(rows), m, *size(columns), n)
    order = [*rows, None, *columns]
    at = [1 + order.index(axis) for axis in axes]
    x = x.transpose(*at, 0, 1 + len(rows), 2 + len(rows) + len(columns))
    return x.reshape(_size(axes), -1, m * n)


def _concatenate(arrays):
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


def _parts(x, sizes, axis=0):
    """Consecutive parts of `x`."""
    return jnp.split(x, np.cumsum(sizes)[:-1], axis)
