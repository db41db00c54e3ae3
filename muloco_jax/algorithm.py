"""MuLoCo and DiLoCo: K workers take H inner steps each, then an outer step joins them.

Notation, used for names throughout the library:

    K, H       number of workers; inner steps (optimizer updates) per round
    theta      global parameters: one copy, equal on all workers
    theta_k    parameters of worker k; stacked `[K, ...]`
    delta_k    pseudogradient of worker k, `theta - theta_k`: a descent direction
    delta      mean of `delta_k` over workers, in float32 or wider

A round is two nested optimizers:

    theta_k <- theta;  H times: theta_k <- inner(theta_k, gradient on worker k's batch)
    theta   <- outer(theta, mean_k(theta - theta_k))

With Muon inside it is MuLoCo, with AdamW inside DiLoCo, with one worker SNOO, and with
one worker and `optax.sgd(1.0)` outside just the inner optimizer. The outer optimizer is
any optax transformation; Nesterov's, of the papers, is
`b <- mu b + delta; theta <- theta - lr (delta + mu b)`, which is
`optax.sgd(lr, momentum=mu, nesterov=True)` fed with `delta`. The states of the inner
optimizer belong to their worker, and are neither averaged nor reset.

This module knows no model, no data and no configuration. It hides how the state is laid
out over the mesh.

References:
    Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023
    Douillard et al., `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025
    Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025, algorithm 1
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from muloco_jax import compress
from muloco_jax import fragments as fragments_lib
from muloco_jax.fragments import Segment
from muloco_jax.workers import AXIS, Workers, optimizer_specs, stacked, wide

PyTree = Any
SYNC_METRICS = ("theta_norm", "delta_k_norm", "delta_norm", "update_norm")
Loss = Callable[[PyTree, Any], jax.Array | tuple[jax.Array, dict[str, jax.Array]]]


class WorkerState(NamedTuple):
    """What one worker owns. Only its delta ever leaves it.

    Attributes:
        params: theta_k.
        opt_state: state of the inner optimizer.
        reduce_state: error feedback, one state per fragment.
    """

    params: PyTree
    opt_state: optax.OptState
    reduce_state: tuple[Any, ...]


class DiLoCoState(NamedTuple):
    """All of a run that must be saved, besides the position in the data.

    Attributes:
        params: theta.
        outer_state: state of the outer optimizer, one per fragment.
        workers: what the workers own, leaves `[K, ...]`.
        step: inner steps taken by each worker, int32 [].
    """

    params: PyTree
    outer_state: tuple[optax.OptState, ...]
    workers: WorkerState
    step: jax.Array


class DiLoCo(NamedTuple):
    """The algorithm as pure functions; jit them, and donate the state.

    Attributes:
        init: `params` -> `DiLoCoState`, placed on the mesh.
        inner: `(state, batches)` -> `(state, metrics)`: one inner step per batch,
            without communication between workers. Batches are `[K, n, ...]`; metrics
            are `loss`, `grad_norm` and what the loss adds, each `[K, n]`.
        send: `(state, i)` -> `(state, delta)` of fragment i: the only communication.
        receive: `(state, delta, i)` -> `state`: the outer step of fragment i.
        round: `(state, batches)` -> `(state, metrics)`: all segments of the schedule on
            batches `[K, H, ...]`. Besides the metrics of `inner`: the global norms
            `delta_k_norm` `[K, fragments]`, `delta_norm`, `update_norm` and, before the
            outer step, `theta_norm` `[fragments]`.
        schedule: the segments of a round.
        shardings: state, or its shapes -> where each of its leaves lives.
    """

    init: Callable[[PyTree], DiLoCoState]
    inner: Callable[[DiLoCoState, PyTree], tuple[DiLoCoState, dict[str, jax.Array]]]
    send: Callable[[DiLoCoState, int], tuple[DiLoCoState, PyTree]]
    receive: Callable[[DiLoCoState, PyTree, int], DiLoCoState]
    round: Callable[[DiLoCoState, PyTree], tuple[DiLoCoState, dict[str, jax.Array]]]
    schedule: list[Segment]
    shardings: Callable[[DiLoCoState], DiLoCoState]


def diloco(
    loss: Loss,
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    *,
    workers: Workers,
    sync_every: int,
    reduce: compress.Reducer | None = None,
    fragments: Sequence[fragments_lib.Fragment] | None = None,
    delay: int = 0,
    keep_local: float = 0.0,
    microbatch: int = 0,
    specs: PyTree | None = None,
) -> DiLoCo:
    """Builds the algorithm from its parts.

    Args:
        loss: `(params, batch)` -> scalar, or `(scalar, dict of arrays)`, of a worker.
        inner: inner optimizer: `muon(...)` for MuLoCo, `optax.adamw(...)` for DiLoCo.
            Clipping goes in front of it, and so is per worker. If it takes extra
            arguments, it gets `value` and `grad`.
        outer: outer optimizer, fed with `delta`.
        workers: how many workers, and where.
        sync_every: inner steps per round, H.
        reduce: how deltas are averaged; by default exactly.
        fragments: what syncs when, see `muloco_jax.fragments`; by default everything at
            the end of the round. Each parameter is in exactly one.
        delay: inner steps between sending a fragment and receiving it (tau of Streaming
            DiLoCo).
        keep_local: share of theta_k that a worker keeps on receiving theta (alpha of
            Streaming DiLoCo), in [0, 1]. At 0 all workers restart from theta.
        microbatch: examples of a worker's batch per evaluation of the loss; 0: all. The
            gradients of the parts are averaged, in float32 or wider, before the inner
            optimizer sees them; so are their losses and what else the loss reports,
            counts and flags as float32. It divides the batch, so each part counts
            alike: the loss must be a mean over examples of equal weight.
        specs: partition specs of the parameters over the mesh axes inside a worker, a
            tree like them; by default they are replicated there.

    Raises:
        ValueError: if the parts do not fit together. Batches of a wrong shape, and
            specs unlike the parameters, raise when they are first seen.
    """
    if not 0 <= keep_local <= 1:
        raise ValueError(f"keep_local must be in [0, 1], got {keep_local}")
    if isinstance(microbatch, bool) or not isinstance(microbatch, int | np.integer):
        raise ValueError(f"microbatch must be an int, got {microbatch!r}")
    if microbatch < 0:
        raise ValueError(f"microbatch must not be negative, got {microbatch}")
    parts = [True] if fragments is None else fragments
    parts = [jax.tree.map(_static, part) for part in parts]
    schedule = fragments_lib.schedule(sync_every, len(parts), delay)
    reduce = reduce or compress.reducer(compress.all_reduce_mean(workers))
    inner = optax.with_extra_args_support(inner)
    differentiate = _accumulated(
        jax.value_and_grad(_with_extra(loss), has_aux=True), microbatch
    )

    def specs_of(params):
        if specs is None:
            return jax.tree.map(lambda _: P(), params)
        return specs

    def part_specs(params, part):  # Layers are never sharded, so taking some is fine.
        take = lambda which, spec: None if which is False else spec
        return jax.tree.map(take, part, specs_of(params))

    def shardings(state):
        theta, own = state.params, state.workers
        outer_specs, reduce_specs = [], []
        for part, outer_state in zip(parts, state.outer_state, strict=True):
            spec = part_specs(theta, part)
            take = functools.partial(fragments_lib.take, fragment=part)
            of_part = jax.eval_shape(take, theta)  # Shapes have no layers to pick.
            outer_specs.append(optimizer_specs(outer_state, of_part, spec))
            reduce_specs.append(reduce.specs(spec))
        spec = specs_of(theta)
        opt_specs = optimizer_specs(own.opt_state, theta, spec, P(AXIS))
        return workers.shardings(
            DiLoCoState(
                params=spec,
                outer_state=tuple(outer_specs),
                workers=WorkerState(stacked(spec), opt_specs, tuple(reduce_specs)),
                step=P(),  # type: ignore[arg-type]
            )
        )

    def constrain(state):
        return jax.lax.with_sharding_constraint(state, shardings(state))

    @jax.jit
    def init(params):
        _check_params(params)
        fragments_lib.check(parts, params)
        workers.check_specs(specs_of(params), params)
        stack = lambda x: jnp.broadcast_to(x, (workers.num, *x.shape))
        outer_state, reduce_state = [], []
        for part in parts:
            theta = jax.tree.map(wide, fragments_lib.take(params, part))
            outer_state.append(outer.init(theta))
            spec = part_specs(params, part)
            join = workers.join(reduce.init, (stacked(spec),), reduce.specs(spec))
            reduce_state.append(join(jax.tree.map(stack, theta)))
        own = WorkerState(
            params=jax.tree.map(stack, params),
            opt_state=jax.tree.map(stack, inner.init(params)),
            reduce_state=tuple(reduce_state),
        )
        step = jnp.zeros([], jnp.int32)
        return constrain(DiLoCoState(params, tuple(outer_state), own, step))

    def inner_steps(state, batches):
        steps = _check_batches(batches, workers.num)

        def step(carry, batch):
            params, opt_state = carry
            (value, extra), grads = differentiate(params, batch)
            measured = {"loss": value, "grad_norm": _norm(grads)}
            if taken := extra.keys() & {*measured, *SYNC_METRICS}:
                raise ValueError(
                    f"the loss reports {sorted(taken)}, which the algorithm measures "
                    f"itself; rename it"
                )
            measured |= extra
            updates, opt_state = inner.update(
                grads, opt_state, params, value=value, grad=grads
            )
            return (optax.apply_updates(params, updates), opt_state), measured

        def run(params, opt_state, batches):
            return jax.lax.scan(step, (params, opt_state), batches)

        own = state.workers
        with jax.named_scope("inner"):
            (params, opt_state), measured = workers.map(run, (0, 0, 0))(
                own.params, own.opt_state, batches
            )
        own = own._replace(params=params, opt_state=opt_state)
        return constrain(state._replace(workers=own, step=state.step + steps)), measured

    def send_and_measure(state, i):
        part = parts[i]
        theta = fragments_lib.take(state.params, part)
        take = lambda tree: fragments_lib.take(tree, part)
        subtract = lambda t, t_k: wide(t)[None] - wide(t_k)
        deltas = jax.tree.map(subtract, theta, jax.vmap(take)(state.workers.params))
        spec = part_specs(state.params, part)
        memory_spec = reduce.specs(spec)
        join = workers.join(
            reduce.update,
            in_specs=(stacked(spec), memory_spec),
            out_specs=(spec, memory_spec),
        )
        memories = list(state.workers.reduce_state)
        delta, memories[i] = join(deltas, memories[i])
        norms = {
            "theta_norm": _norm(theta),
            "delta_k_norm": jax.vmap(_norm)(deltas),
            "delta_norm": _norm(delta),
        }
        own = state.workers._replace(reduce_state=tuple(memories))
        return constrain(state._replace(workers=own)), delta, norms

    def send(state, i):
        return send_and_measure(state, i)[:2]

    def receive(state, delta, i):
        part = parts[i]
        theta = fragments_lib.take(state.params, part)
        outer_state = list(state.outer_state)
        updates, outer_state[i] = outer.update(
            delta, outer_state[i], jax.tree.map(wide, theta)
        )
        theta = optax.apply_updates(theta, updates)

        def merge(theta_k):
            mine = fragments_lib.take(theta_k, part)
            mix = lambda t, t_k: (
                (1 - keep_local) * wide(t) + keep_local * wide(t_k)
            ).astype(t.dtype)
            merged = jax.tree.map(mix, theta, mine) if keep_local else theta
            return fragments_lib.put(theta_k, merged, part)

        params = jax.vmap(merge)(state.workers.params)
        state = state._replace(
            params=fragments_lib.put(state.params, theta, part),
            outer_state=tuple(outer_state),
            workers=state.workers._replace(params=params),
        )
        return constrain(state)

    def round_(state, batches):
        steps = _check_batches(batches, workers.num)
        if steps != sync_every:
            raise ValueError(
                f"a round takes batches [K, H, ...] = [{workers.num}, {sync_every}, "
                f"...], got {steps} steps"
            )
        in_flight, stretches, syncs, taken = {}, [], [], 0
        for segment in schedule:
            cut = slice(taken, taken := taken + segment.steps)
            mine = jax.tree.map(lambda x, cut=cut: x[:, cut], batches)
            state, measured = inner_steps(state, mine)
            stretches.append(measured)
            if (i := segment.send) is not None:
                state, *in_flight[i] = send_and_measure(state, i)
            if (i := segment.receive) is not None:
                old, (delta, norms) = state.params, in_flight.pop(i)
                state = receive(state, delta, i)
                moved = lambda new, old: wide(new) - wide(old)
                update = jax.tree.map(moved, state.params, old)
                syncs.append(norms | {"update_norm": _norm(update)})
        metrics = jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), *stretches)
        metrics |= jax.tree.map(lambda *xs: jnp.stack(xs, axis=-1), *syncs)
        return state, metrics

    return DiLoCo(init, inner_steps, send, receive, round_, schedule, shardings)


def _norm(tree):
    """Global norm in float32 or wider: float16 would overflow at 256."""
    return optax.tree.norm(jax.tree.map(wide, tree))


def _check_params(params):
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)} has dtype {x.dtype}, which "
                f"cannot be trained; close over it in the loss instead"
            )


def _static(which):
    """Indices as a numpy array, so that a fragment is known while tracing."""
    return which if isinstance(which, bool) else np.asarray(which)


def _with_extra(loss):
    """`loss`, which may return a scalar alone, as one that returns `(scalar, dict)`."""

    def wrapped(params, batch):
        result = loss(params, batch)
        if not isinstance(result, tuple):
            return result, {}
        if len(result) != 2 or not isinstance(result[1], dict):
            raise ValueError(
                f"the loss must return a scalar or (scalar, dict), got {result}"
            )
        return result

    return wrapped


def _accumulated(differentiate, size):
    """`differentiate`, on parts of `size` examples of the batch, averaged."""

    def leaf(x):
        count, rest = divmod(x.shape[0] if x.ndim else 0, size)
        if rest or not count:
            raise ValueError(
                f"microbatch={size} must divide the examples of a worker's batch, "
                f"which has a leaf of shape {x.shape}"
            )
        # Part i takes every count-th example, so that a batch that is spread over
        # devices has each part spread over all of them.
        return jnp.moveaxis(x.reshape(size, count, *x.shape[1:]), 1, 0)

    def averaged(params, batch):
        parts = jax.tree.map(leaf, batch)
        count = len(jax.tree.leaves(parts)[0])
        if count == 1:
            return differentiate(params, batch)
        shapes = jax.eval_shape(differentiate, params, batch)
        of_part = jax.eval_shape(
            differentiate, params, jax.tree.map(lambda x: x[0], parts)
        )
        if jax.tree.map(jnp.shape, of_part) != jax.tree.map(jnp.shape, shapes):
            raise ValueError(
                "with a microbatch the loss must report means over examples, but it "
                "reports an array whose shape depends on the batch"
            )
        dtype = lambda x: jnp.promote_types(x.dtype, jnp.float32)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype(x)), shapes)

        def add(total, part):
            found = differentiate(params, part)
            return jax.tree.map(lambda t, x: t + x / count, total, found), None

        total, _ = jax.lax.scan(add, zeros, parts)
        inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        narrow = lambda t, x: t.astype(x.dtype) if inexact(x) else t
        return jax.tree.map(narrow, total, shapes)

    return averaged if size else differentiate


def _check_batches(batches, num):
    """The number of steps in batches `[K, n, ...]`."""
    shapes = {jnp.shape(x)[:2] for x in jax.tree.leaves(batches)}
    if len(shapes) != 1 or len(shape := shapes.pop()) < 2 or shape[0] != num:
        found = [jnp.shape(x) for x in jax.tree.leaves(batches)]
        raise ValueError(
            f"batches must be [K, steps, ...] with K = {num}; got shapes {found}"
        )
    return shape[1]
