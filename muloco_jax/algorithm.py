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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from muloco_jax import compress
from muloco_jax import fragments as fragments_lib
from muloco_jax.fragments import Segment
from muloco_jax.workers import AXIS, Workers, wide

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
        loss: `(params, batch)` -> scalar, or `(scalar, dict of scalars)`, of one
        worker.
        inner: inner optimizer: `muon(...)` for MuLoCo, `optax.adamw(...)` for DiLoCo.
            Clipping goes in front of it, and so is per worker.
        outer: outer optimizer, fed with `delta`.
        workers: how many workers, and where.
        sync_every: inner steps per round, H.
        reduce: how deltas are averaged; by default exactly.
        fragments: what syncs when, see `muloco_jax.fragments`; by default everything at
            the end of the round.
        delay: inner steps between sending a fragment and receiving it (tau of Streaming
            DiLoCo).
        keep_local: share of theta_k that a worker keeps when it receives theta (alpha
        of
            Streaming DiLoCo), in [0, 1]. At 0 all workers restart from theta.
        specs: partition specs of the parameters over the mesh axes inside a worker, a
            tree like them; by default they are replicated there.

    Raises:
        ValueError: if the parts do not fit together; batches of a wrong shape raise
        when
            they are traced.
    """
    if not 0 <= keep_local <= 1:
        raise ValueError(f"keep_local must be in [0, 1], got {keep_local}")
    inside = set(workers.mesh.axis_names) - {AXIS}
    for spec in jax.tree.leaves(specs):
        if unknown := {axis for entry in spec for axis in _axes(entry)} - inside:
            raise ValueError(
                f"specs may name the mesh axes inside a worker, {sorted(inside)}; "
                f"{spec} names {sorted(unknown)}"
            )
    num = 1 if fragments is None else len(fragments)
    schedule = fragments_lib.schedule(sync_every, num, delay)
    reduce = reduce or compress.reducer(compress.all_reduce_mean(workers))
    layout = _Layout(workers, inner, outer, reduce, specs)

    def fragments_of(params):
        return fragments_lib.whole(params) if fragments is None else fragments

    def constrain(state):
        return jax.lax.with_sharding_constraint(state, shardings(state))

    def shardings(state):
        return layout.shardings(state, fragments_of(state.params))

    @jax.jit
    def init(params):
        parts = fragments_of(params)
        stack = lambda x: jnp.broadcast_to(x, (workers.num, *jnp.shape(x)))
        reduce_state = []
        for part in parts:
            deltas = jax.tree.map(
                stack, jax.tree.map(wide, fragments_lib.take(params, part))
            )
            part_specs = layout.part_specs(params, part)
            join = workers.join(
                reduce.init, (_stacked(part_specs),), reduce.specs(part_specs)
            )
            reduce_state.append(join(deltas))
        theta = jax.tree.map(jnp.asarray, params)
        outer_params = [
            jax.tree.map(wide, fragments_lib.take(theta, part)) for part in parts
        ]
        return constrain(
            DiLoCoState(
                params=theta,
                outer_state=tuple(map(outer.init, outer_params)),
                workers=WorkerState(
                    params=jax.tree.map(stack, theta),
                    opt_state=jax.tree.map(stack, inner.init(theta)),
                    reduce_state=tuple(reduce_state),
                ),
                step=jnp.zeros([], jnp.int32),
            )
        )

    def inner_steps(state, batches):
        steps = _check_batches(batches, workers.num)

        def step(carry, batch):
            params, opt_state = carry
            (value, extra), grads = jax.value_and_grad(_with_extra(loss), has_aux=True)(
                params, batch
            )
            measured = {"loss": value, "grad_norm": optax.tree.norm(grads), **extra}
            updates, opt_state = inner.update(grads, opt_state, params)
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
        part_specs = layout.part_specs(state.params, part)
        memory_specs = reduce.specs(part_specs)
        join = workers.join(
            reduce.update,
            in_specs=(_stacked(part_specs), memory_specs),
            out_specs=(part_specs, memory_specs),
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
                update = jax.tree.map(jnp.subtract, state.params, old)
                norms["update_norm"].append(optax.tree.norm(update))
        metrics = jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), *stretches)
        metrics |= {name: jnp.stack(values, axis=-1) for name, values in norms.items()}
        return state, metrics

    return DiLoCo(init, inner_steps, send, receive, round_, schedule, shardings)


class _Layout(NamedTuple):
    """Where the leaves of the state live: `AXES` joined with the parameters' specs."""

    workers: Workers
    inner: optax.GradientTransformation
    outer: optax.GradientTransformation
    reduce: compress.Reducer
    specs: PyTree | None

    def param_specs(self, params):
        if self.specs is None:
            return jax.tree.map(lambda _: P(), params)
        expected, found = map(jax.tree.structure, (params, self.specs))
        if expected != found:
            raise ValueError(
                f"specs must be a tree like the parameters, {expected}; got {found}"
            )
        return self.specs

    def part_specs(self, params, part):
        """Specs of a fragment; layers are never sharded, so taking some is harmless."""
        take = lambda which, spec: None if which is False else spec
        return jax.tree.map(take, part, self.param_specs(params))

    def shardings(self, state, parts):
        specs = self.param_specs(state.params)
        outer_specs, reduce_specs = [], []
        for part, outer_state in zip(parts, state.outer_state, strict=True):
            part_specs = self.part_specs(state.params, part)
            theta = fragments_lib.take(state.params, part)
            outer_specs.append(
                _state_specs(self.outer, outer_state, theta, part_specs, P())
            )
            reduce_specs.append(self.reduce.specs(part_specs))
        own = state.workers
        inner_specs = _state_specs(
            self.inner, own.opt_state, state.params, specs, P(AXIS)
        )
        tree = DiLoCoState(
            params=specs,
            outer_state=tuple(outer_specs),
            workers=WorkerState(_stacked(specs), inner_specs, tuple(reduce_specs)),
            step=P(),  # type: ignore[arg-type]
        )
        place = lambda spec: NamedSharding(self.workers.mesh, spec)
        return jax.tree.map(place, tree, is_leaf=_is_spec)


def _axes(entry):
    """The mesh axes in an entry of a partition spec."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _is_spec(x):
    return isinstance(x, P)


def _stacked(specs):
    """Specs of leaves `[K, ...]` from those of leaves `[...]`."""
    return jax.tree.map(lambda s: P(AXIS, *s), specs, is_leaf=_is_spec)


def _state_specs(optimizer, state, params, specs, prefix):
    """Specs of an optimizer's state: leaves like a parameter inherit its spec.

    In front of the axes of a parameter, leaves have those of `prefix`: the workers'
    axis if they are stacked, else none.
    """

    def inherit(leaf, spec, param):
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        like_param = leaf.shape[len(prefix) :] == param.shape
        return P(*prefix, *spec) if like_param else prefix

    return optax.tree.map_params(
        optimizer,
        inherit,
        state,
        specs,
        params,
        transform_non_params=lambda _: prefix,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


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
