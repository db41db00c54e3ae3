"""A configuration becomes values.

Each choice by name is resolved here, in one `match`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from muloco_jax import (
    compress,
    corpus,
    data,
    fragments,
    model,
    optimizers,
    placement,
    routing,
    schedules,
    settings,
    shards,
)
from muloco_jax.algorithm import DiLoCo, DiLoCoState, diloco
from muloco_jax.settings import Config
from muloco_jax.workers import AXIS, Workers

PyTree = Any


class Plan(NamedTuple):
    """What is known of a run before its data are read and its model is allocated.

    Attributes:
        workers: the workers and their mesh.
        model: sizes of the model.
        algorithm: the functions of a round.
        init: `()` -> parameters, placed on the mesh.
        shapes: of the parameters.
        fragments: what syncs when.
        routes: what the inner optimizer does to each parameter.
        names: of the inner and the outer optimizer.
        learning_rates: of the inner optimizer, one per inner step, `[steps]`.
        sync_every: inner steps of a round, H.
        batch_sizes: sequences of an inner step over all workers, one per round.
        sequence_length: tokens that a sequence predicts, L.
        wire_bytes: bytes that one worker sends in a round, if each has a mesh slice.
        flops_per_token: of training.
    """

    workers: Workers
    model: model.ModelConfig
    algorithm: DiLoCo
    init: Callable[[], PyTree]
    shapes: PyTree
    fragments: list[fragments.Fragment]
    routes: list[optimizers.Route]
    names: tuple[str, str]
    learning_rates: np.ndarray
    sync_every: int
    batch_sizes: np.ndarray
    sequence_length: int
    wire_bytes: int
    flops_per_token: int

    @property
    def rounds(self) -> int:
        """Rounds of the run."""
        return len(self.batch_sizes)

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return sum(x.size for x in jax.tree.leaves(self.shapes))

    @property
    def examples(self) -> np.ndarray:
        """Sequences consumed before each round, and at the end, `[rounds + 1]`."""
        return np.cumsum([0, *self.batch_sizes]) * self.sync_every

    @property
    def state(self) -> DiLoCoState:
        """Shapes and shardings of the state of the algorithm."""
        shapes = jax.eval_shape(self.algorithm.init, self.shapes)
        place = lambda x, sharding: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding
        )
        return jax.tree.map(place, shapes, self.algorithm.shardings(shapes))


class Experiment(NamedTuple):
    """What the host loop needs.

    Attributes:
        plan: all but the data.
        batches: index of a round -> its batches `[K, H, B, L + 1]` on the mesh.
        evaluate: theta -> mean cross-entropy of all held-out tokens, nats per token.
        held_out_tokens: tokens that `evaluate` predicts.
        held_out_bytes: bytes of text that those are; 0 if unknown.
        fingerprint: of the data.
    """

    plan: Plan
    batches: Callable[[int], jax.Array]
    evaluate: Callable[[PyTree], jax.Array]
    held_out_tokens: int
    held_out_bytes: int
    fingerprint: str


def plan(config: Config) -> Plan:
    """Builds all parts of a run that need no data, without allocating the model.

    Before JAX has looked for devices, this makes CPU devices for each worker, which are
    used if there is no other accelerator.

    Raises:
        ValueError: for values that do not fit together, naming them and what would.
    """
    settings.check(config)
    batch_sizes = _batch_sizes(config)
    inside = {axis: config.mesh[axis] for axis in ("data", "fsdp", "tensor")}
    slices = config.mesh.workers or config.workers.num
    placement.set_cpu_devices(slices * math.prod(inside.values()))
    mesh = placement.make_mesh(config.workers.num, config.mesh.workers, inside)
    workers = Workers(config.workers.num, mesh, config.workers.sequential)
    model_config = _model_config(config, _vocabulary(config))
    specs = model.partition_specs(model_config, workers.mesh)
    schedule = learning_rate_schedule(config)
    init = jax.jit(
        lambda: model.init(model_config, jax.random.key(config.seed)),
        out_shardings=workers.shardings(specs),
    )
    shapes = jax.eval_shape(init)
    parts = fragments.whole(shapes)
    reduce = compress.reducer(compress.all_reduce_mean(workers))
    algorithm = diloco(
        model.next_token_loss(model_config),
        inner_optimizer(
            config, schedule, specs, [axis for axis, n in inside.items() if n > 1]
        ),
        outer_optimizer(config),
        workers=workers,
        sync_every=config.sync_every,
        reduce=reduce,
        fragments=parts,
        microbatch=config.data.microbatch,
        specs=specs,
    )
    steps = jnp.arange(config.steps)
    return Plan(
        workers=workers,
        model=model_config,
        algorithm=algorithm,
        init=init,
        shapes=shapes,
        fragments=parts,
        routes=_routes(config, shapes),
        names=(config.inner.name, config.outer.name),
        learning_rates=np.broadcast_to(schedule(steps), steps.shape),
        sync_every=config.sync_every,
        batch_sizes=batch_sizes,
        sequence_length=config.data.sequence_length,
        wire_bytes=reduce.wire_bytes(shapes),
        flops_per_token=model.flops_per_token(
            model_config, config.data.sequence_length
        ),
    )


def build(config: Config) -> Experiment:
    """Builds all parts of a run, without allocating the model.

    Raises:
        ValueError: as `plan` does, and for data that will not do.
        FileNotFoundError: if there are no data.
    """
    planned = plan(config)
    tokens = _tokens(config)
    return Experiment(
        plan=planned,
        batches=_placed_batches(planned, tokens.train, config.seed),
        evaluate=_evaluation(config, planned, tokens.held_out),
        held_out_tokens=len(tokens.held_out) - 1,
        held_out_bytes=tokens.held_out_bytes,
        fingerprint=tokens.fingerprint,
    )


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """Of the inner optimizer: linear warmup, then the pieces of `schedule.pieces`."""
    try:
        return schedules.learning_rate(
            config.inner.learning_rate,
            config.steps,
            config.schedule.warmup_steps,
            config.schedule.pieces,
        )
    except ValueError as error:
        raise ValueError(f"schedule: {error}") from None


def inner_optimizer(
    config: Config,
    schedule: optax.Schedule,
    specs: PyTree | None = None,
    axes: Sequence[str] = (),
) -> optax.GradientTransformation:
    """The optimizer of a worker, behind clipping of its gradient.

    Args:
        config: the configuration.
        schedule: of the learning rate.
        specs: partition specs of the parameters inside a worker.
        axes: mesh axes inside a worker, along which Muon shares its work.
    """
    inner = config.inner
    match inner.name:
        case "muon":
            optimizer = optimizers.muon(
                schedule,
                beta=inner.muon_momentum,
                nesterov=inner.muon_nesterov,
                weight_decay=inner.weight_decay,
                adam_b1=inner.adam_b1,
                adam_b2=inner.adam_b2,
                adam_eps=inner.adam_eps,
                ns_axes=axes,
                specs=specs,
            )
        case "adamw":
            optimizer = optax.adamw(
                schedule,
                inner.adam_b1,
                inner.adam_b2,
                inner.adam_eps,
                weight_decay=inner.weight_decay,
            )
        case name:
            raise ValueError(f"inner.name must be 'muon' or 'adamw', got {name!r}")
    if inner.clip_norm == 0:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(inner.clip_norm), optimizer)


def _routes(config, shapes):
    """What `inner_optimizer` does to each parameter."""
    nowhere = lambda params: jax.tree.map(lambda _: None, params)
    of_name = {"muon": routing.hidden_matrices, "adamw": nowhere}
    return optimizers.routing_table(
        shapes,
        weight_decay=config.inner.weight_decay,
        muon_weight_dimension_numbers=of_name[config.inner.name],
    )


def outer_optimizer(config: Config) -> optax.GradientTransformation:
    """The optimizer that turns delta into a step of theta."""
    outer = config.outer
    momentum = outer.momentum or None  # None keeps no buffer.
    match outer.name:
        case "nesterov":
            return optax.sgd(outer.learning_rate, momentum, nesterov=True)
        case "sgd":
            return optax.sgd(outer.learning_rate, momentum)
        case name:
            raise ValueError(f"outer.name must be 'nesterov' or 'sgd', got {name!r}")


def _batch_sizes(config):
    """Sequences of an inner step over all workers, one per round."""
    pieces = [*config.schedule.batch_sizes, (0, config.data.batch_size)]
    try:
        sizes = schedules.batch_sizes(config.steps, config.sync_every, pieces)
    except ValueError as error:
        raise ValueError(f"schedule.batch_sizes: {error}") from None
    inside = config.mesh.data * config.mesh.fsdp
    num, names = config.workers.num, "workers.num"
    if inside > 1:
        names += " * mesh.data * mesh.fsdp"
    for size in np.unique(sizes).tolist():
        key = "data.batch_size"
        if size != config.data.batch_size:
            key = "a batch of schedule.batch_sizes"
        settings.check_multiple(key, size, num * inside, names)
        if microbatch := config.data.microbatch:
            settings.check_multiple(
                "data.microbatch", microbatch, inside, "mesh.data * mesh.fsdp"
            )
            settings.check_multiple(
                f"{key} / workers.num", size // num, microbatch, "data.microbatch"
            )
    return sizes


def _vocabulary(config):
    """Number of token ids, and the id that ends a document; reads no file."""
    keys = config.data
    if keys.format in settings.SHARDS:
        return keys.vocab_size, keys.end_of_text
    return data.BYTES.vocab_size, data.BYTES.end_of_text


def _tokens(config):
    keys = config.data
    if keys.format != "shakespeare" and not keys.path:
        raise FileNotFoundError("data.path is empty; name a file, a folder or a glob")
    find = functools.partial(
        corpus.find_files,
        keys.path,
        held_out=keys.held_out,
        held_out_path=keys.held_out_path,
    )
    match keys.format:
        case "shakespeare":
            text = corpus.shakespeare()
        case "text":
            text = corpus.text_files(find("*.txt"))
        case "jsonl":
            text = corpus.json_lines(find("*.jsonl"), keys.field)
        case "nanogpt":
            return data.read_shards(find("*.bin"), shards.nanogpt, keys.vocab_size)
        case _:
            return data.read_shards(find("*.bin"), shards.llmc, keys.vocab_size)
    return data.tokenize(text, data.BYTES, keys.cache)


def _model_config(config, vocabulary):
    size, end_of_text = vocabulary
    keys = config.model.to_dict()
    multiple = keys.pop("vocab_multiple")
    try:
        return model.ModelConfig(
            vocab_size=-(-size // multiple) * multiple, end_of_text=end_of_text, **keys
        )
    except ValueError as error:  # They begin with the name of a size.
        raise ValueError(f"model.{error}") from None


def _placed_batches(plan, tokens, seed):
    """Batches by round; each process reads just the examples of its devices."""
    mesh, num, length = plan.workers.mesh, plan.workers.num, plan.sequence_length
    spec = P(AXIS, None, placement.batch_axes(mesh) or None)
    batches = {
        size: data.Batches(tokens, length, num, int(size) // num, seed)
        for size in np.unique(plan.batch_sizes)
    }
    positions = plan.examples

    def placed(index):
        of_size = batches[plan.batch_sizes[index]]
        indices = of_size.indices(int(positions[index]), plan.sync_every)
        shape = (*indices.shape, length + 1)
        read = lambda where: of_size.examples(indices[where[:3]])
        return placement.place(mesh, spec, shape, read)

    return placed


def _evaluation(config, plan, held_out):
    """Mean cross-entropy over the held-out tokens, spread over all devices."""
    workers = plan.workers
    windows, counts = data.evaluation_windows(held_out, plan.sequence_length)
    axes = (AXIS, *placement.batch_axes(workers.mesh))
    spread = math.prod(workers.mesh.shape[axis] for axis in axes)
    batch = spread * config.evaluation.batch_size
    fill = -len(windows) % batch

    def place(x):
        x = np.pad(x, ((0, fill), (0, 0))).reshape(-1, batch, x.shape[-1])
        return placement.place(workers.mesh, P(None, axes), x.shape, x.__getitem__)

    placed = place(windows), place(counts)
    losses = model.token_losses(plan.model)

    @jax.jit
    def evaluate(params, windows, counts):
        def total(batch):
            tokens, count = batch
            cross_entropy, _ = losses(params, tokens)
            return jnp.sum(cross_entropy, where=count)

        return jnp.sum(jax.lax.map(total, (windows, counts))) / jnp.sum(counts)

    return lambda params: evaluate(params, *placed)
