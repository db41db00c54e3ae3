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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from muloco_jax import compress
from muloco_jax import fragments as fragments_lib
from muloco_jax.fragments import Segment
from muloco_jax.workers import AXIS, Workers, optimizer_specs, stacked, wide

PyTree = Any
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


# Which parts are global (None) and which are stacked over workers (0).
AXES = DiLoCoState(params=None, outer_state=None, workers=0, step=None)  # type: ignore[arg-type]


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
            `delta_k_norm` `[K, fragments]`, `delta_norm` and `update_norm`
            `[fragments]`.
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
    fragments: list[fragments_lib.Fragment] | None = None,
    delay: int = 0,
    keep_local: float = 0.0,
    specs: PyTree | None = None,
) -> DiLoCo:
    """Builds the algorithm from its parts.

    Args:
        loss: `(params, batch)` -> scalar, or `(scalar, dict of scalars)`, of a worker.
        inner: inner optimizer: `muon(...)` for MuLoCo, `optax.adamw(...)` for DiLoCo.
            Clipping goes in front of it, and so is per worker. If it takes extra
            arguments, it gets `value` and `grad`.
        outer: outer optimizer, fed with `delta`.
        workers: how many workers, and where.
        sync_every: inner steps per round, H.
        reduce: how deltas are averaged; by default exactly.
        fragments: what syncs when, see `muloco_jax.fragments`; by default everything at
            the end of the round.
        delay: inner steps between sending a fragment and receiving it (tau of Streaming
            DiLoCo).
        keep_local: share of theta_k that a worker keeps on receiving theta (alpha of
            Streaming DiLoCo), in [0, 1]. At 0 all workers restart from theta.
        specs: partition specs of the parameters over the mesh axes inside a worker, a
            tree like them; by default they are replicated there.

    Raises:
        ValueError: if the parts do not fit together. Batches of a wrong shape, and
            specs unlike the parameters, raise when they are first seen.
    """
    if not 0 <= keep_local <= 1:
        raise ValueError(f"keep_local must be in [0, 1], got {keep_local}")
    workers.check_specs(specs)
    num = 1 if fragments is None else len(fragments)
    schedule = fragments_lib.schedule(sync_every, num, delay)
    reduce = reduce or compress.reducer(compress.all_reduce_mean(workers))
    inner = optax.with_extra_args_support(inner)

    def fragments_of(params):
        return fragments_lib.whole(params) if fragments is None else fragments

    def specs_of(params):
        if specs is None:
            return jax.tree.map(lambda _: P(), params)
        expected, found = map(jax.tree.structure, (params, specs))
        if expected != found:
            raise ValueError(
                f"specs must be a tree like the parameters, {expected}; got {found}"
            )
        return specs

    def part_specs(params, part):  # Layers are never sharded, so taking some is fine.
        take = lambda which, spec: None if which is False else spec
        return jax.tree.map(take, part, specs_of(params))

    def shardings(state):
        theta, own = state.params, state.workers
        outer_specs, reduce_specs = [], []
        for part, outer_state in zip(
            fragments_of(theta), state.outer_state, strict=True
        ):
            spec = part_specs(theta, part)
            of_part = fragments_lib.take(theta, part)
            outer_specs.append(optimizer_specs(outer, outer_state, of_part, spec))
            reduce_specs.append(reduce.specs(spec))
        spec = specs_of(theta)
        opt_specs = optimizer_specs(inner, own.opt_state, theta, spec, P(AXIS))
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
        stack = lambda x: jnp.broadcast_to(x, (workers.num, *x.shape))
        outer_state, reduce_state = [], []
        for part in fragments_of(params):
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
            (value, extra), grads = jax.value_and_grad(_with_extra(loss), has_aux=True)(
                params, batch
            )
            measured = {"loss": value, "grad_norm": optax.tree.norm(grads), **extra}
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

    def deltas(state, part):
        """`delta_k` of all workers, leaves `[K, ...]`, formed in float32 or wider."""

        def one(theta, theta_k):
            subtract = lambda t, t_k: wide(t) - wide(t_k)
            return jax.tree.map(subtract, theta, fragments_lib.take(theta_k, part))

        theta = fragments_lib.take(state.params, part)
        return workers.map(one, (None, 0))(theta, state.workers.params)

    def send(state, i):
        part = fragments_of(state.params)[i]
        spec = part_specs(state.params, part)
        memory_spec = reduce.specs(spec)
        join = workers.join(
            reduce.update,
            in_specs=(stacked(spec), memory_spec),
            out_specs=(spec, memory_spec),
        )
        memories = list(state.workers.reduce_state)
        delta, memories[i] = join(deltas(state, part), memories[i])
        own = state.workers._replace(reduce_state=tuple(memories))
        return constrain(state._replace(workers=own)), delta

    def receive(state, delta, i):
        part = fragments_of(state.params)[i]
        theta = fragments_lib.take(state.params, part)
        outer_state = list(state.outer_state)
        updates, outer_state[i] = outer.update(
            delta, outer_state[i], jax.tree.map(wide, theta)
        )
        theta = optax.apply_updates(theta, updates)

        def merge(theta, theta_k):
            mine = fragments_lib.take(theta_k, part)
            mix = lambda t, t_k: (
                (1 - keep_local) * wide(t) + keep_local * wide(t_k)
            ).astype(t.dtype)
            merged = jax.tree.map(mix, theta, mine) if keep_local else theta
            return fragments_lib.put(theta_k, merged, part)

        params = workers.map(merge, (None, 0))(theta, state.workers.params)
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
        parts = fragments_of(state.params)
        norm_per_worker = workers.map(optax.tree.norm, (0,))
        in_flight, stretches, taken = {}, [], 0
        norms = {"delta_k_norm": [], "delta_norm": [], "update_norm": []}
        for segment in schedule:
            cut = slice(taken, taken := taken + segment.steps)
            mine = jax.tree.map(lambda x, cut=cut: x[:, cut], batches)
            state, measured = inner_steps(state, mine)
            stretches.append(measured)
            if (i := segment.send) is not None:
                norms["delta_k_norm"].append(norm_per_worker(deltas(state, parts[i])))
                state, in_flight[i] = send(state, i)
                norms["delta_norm"].append(optax.tree.norm(in_flight[i]))
            if (i := segment.receive) is not None:
                old = state.params
                state = receive(state, in_flight.pop(i), i)
                moved = lambda new, old: wide(new) - wide(old)
                update = jax.tree.map(moved, state.params, old)
                norms["update_norm"].append(optax.tree.norm(update))
        metrics = jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), *stretches)
        metrics |= {name: jnp.stack(values, axis=-1) for name, values in norms.items()}
        return state, metrics

    return DiLoCo(init, inner_steps, send, receive, round_, schedule, shardings)


def _with_extra(loss):
    """`loss`, which may return a scalar alone, as one that returns `(scalar, dict)`."""

    def wrapped(params, batch):
        result = loss(params, batch)
        return result if isinstance(result, tuple) else (result, {})

    return wrapped


def _check_batches(batches, num):
    """The number of steps in batches `[K, n, ...]`."""
    shapes = {jnp.shape(x)[:2] for x in jax.tree.leaves(batches)}
    if len(shapes) != 1 or len(shape := shapes.pop()) < 2 or shape[0] != num:
        found = [jnp.shape(x) for x in jax.tree.leaves(batches)]
        raise ValueError(
            f"batches must be [K, steps, ...] with K = {num}; got shapes {found}"
        )
    return shape[1]
