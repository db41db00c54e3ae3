"""A configuration becomes values: the only module that reads one.

Each choice by name is resolved here, in one `match`. Everything that can be checked
before training is checked here.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from muloco_jax import compress, corpus, data, model, optimizers, placement, shards
from muloco_jax.algorithm import DiLoCo, diloco
from muloco_jax.workers import AXIS, Workers

PyTree = Any
Config = Any  # A ConfigDict of the keys in configs/default.py; it has no types.


class Experiment(NamedTuple):
    """What the host loop needs.

    Attributes:
        workers: the workers and their mesh.
        algorithm: the functions of a round.
        init: `()` -> parameters, placed on the mesh.
        batches: position in examples -> batches `[K, H, B, L + 1]` on the mesh.
        evaluate: theta -> mean cross-entropy of all held-out tokens, nats per token.
        learning_rates: of the inner optimizer, one per inner step, `[steps]`.
        rounds: rounds of the run.
        examples_per_round: sequences that all workers take in a round.
        tokens_per_round: tokens that all workers predict in a round.
        num_params: parameters of the model.
        wire_bytes: bytes that one worker sends in a round, if each has a mesh slice.
        held_out_tokens: tokens that `evaluate` predicts.
        held_out_bytes: bytes of text that those are; 0 if unknown.
    """

    workers: Workers
    algorithm: DiLoCo
    init: Callable[[], PyTree]
    batches: Callable[[int], jax.Array]
    evaluate: Callable[[PyTree], jax.Array]
    learning_rates: np.ndarray
    rounds: int
    examples_per_round: int
    tokens_per_round: int
    num_params: int
    wire_bytes: int
    held_out_tokens: int
    held_out_bytes: int


def build(config: Config) -> Experiment:
    """Builds all parts of a run, without allocating the model.

    Before JAX has looked for devices, this makes CPU devices for each worker, which are
    used if there is no other accelerator.

    Raises:
        ValueError: for values that do not fit together, naming them and what would.
        FileNotFoundError: if there is no text.
    """
    _check_numbers(config)
    inside = {axis: config.mesh[axis] for axis in ("data", "fsdp", "tensor")}
    slices = config.mesh.workers or config.workers.num
    placement.set_cpu_devices(slices * math.prod(inside.values()))
    mesh = placement.make_mesh(config.workers.num, config.mesh.workers, inside)
    workers = Workers(config.workers.num, mesh, config.workers.sequential)
    vocabulary = _vocabulary(config)
    tokens = _tokens(config)
    batches = data.Batches(
        tokens.train,
        config.data.sequence_length,
        workers.num,
        config.data.batch_size // workers.num,
        config.seed,
    )
    model_config = _model_config(config, vocabulary)
    specs = model.partition_specs(model_config, workers.mesh)
    schedule = learning_rate_schedule(config)
    reduce = compress.reducer(compress.all_reduce_mean(workers))
    algorithm = diloco(
        model.next_token_loss(model_config),
        inner_optimizer(config, schedule),
        outer_optimizer(config),
        workers=workers,
        sync_every=config.sync_every,
        reduce=reduce,
        specs=specs,
    )
    init = jax.jit(
        lambda: model.init(model_config, jax.random.key(config.seed)),
        out_shardings=workers.shardings(specs),
    )
    shapes = jax.eval_shape(init)
    examples = config.sync_every * config.data.batch_size
    steps = jnp.arange(config.steps)
    return Experiment(
        workers=workers,
        algorithm=algorithm,
        init=init,
        batches=_placed_batches(
            batches, workers, config.sync_every, config.data.sequence_length
        ),
        evaluate=_evaluation(config, model_config, workers, tokens.held_out),
        learning_rates=np.broadcast_to(schedule(steps), steps.shape),
        rounds=config.steps // config.sync_every,
        examples_per_round=examples,
        tokens_per_round=examples * config.data.sequence_length,
        num_params=sum(x.size for x in jax.tree.leaves(shapes)),
        wire_bytes=reduce.wire_bytes(shapes),
        held_out_tokens=len(tokens.held_out) - 1,
        held_out_bytes=tokens.held_out_bytes,
    )


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """Of the inner optimizer: linear warmup, then constant or a cosine.

    With W warmup steps of T, it is `(t + 1) / W` of the peak at step t < W, and then,
    for the cosine, falls to `final_fraction` at T (MuLoCo, appendix).
    """
    peak, warmup = config.inner.learning_rate, config.schedule.warmup_steps
    rising = lambda count: peak * (count + 1) / max(warmup, 1)
    match config.schedule.name:
        case "constant":
            after = optax.constant_schedule(peak)
        case "cosine":
            after = optax.cosine_decay_schedule(
                peak, config.steps - warmup, config.schedule.final_fraction
            )
        case name:
            raise ValueError(
                f"schedule.name must be 'cosine' or 'constant', got {name!r}"
            )
    return optax.join_schedules([rising, after], [warmup])


def inner_optimizer(
    config: Config, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """The optimizer of a worker, behind clipping of its gradient."""
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


# Key -> what its value must be at least, and what it must be less than.
_RANGES = {
    "seed": (0, 2**31),
    "steps": (1, math.inf),
    "sync_every": (1, math.inf),
    "workers.num": (1, math.inf),
    "mesh.workers": (0, math.inf),
    "mesh.data": (1, math.inf),
    "mesh.fsdp": (1, math.inf),
    "mesh.tensor": (1, math.inf),
    "inner.learning_rate": (0, math.inf),
    "inner.weight_decay": (0, math.inf),
    "inner.muon_momentum": (0, 1),
    "inner.adam_b1": (0, 1),
    "inner.adam_b2": (0, 1),
    "inner.adam_eps": (0, math.inf),
    "inner.clip_norm": (0, math.inf),
    "schedule.warmup_steps": (0, math.inf),
    "schedule.final_fraction": (0, math.inf),
    "outer.learning_rate": (0, math.inf),
    "outer.momentum": (0, 1),
    "model.vocab_multiple": (1, math.inf),
    "data.vocab_size": (0, 2**31),
    "data.end_of_text": (-1, 2**31),
    "data.sequence_length": (1, math.inf),
    "data.batch_size": (1, math.inf),
    "evaluation.every_rounds": (1, math.inf),
    "evaluation.batch_size": (1, math.inf),
}


def _check_numbers(config):
    for key, (low, high) in _RANGES.items():
        value = functools.reduce(getattr, key.split("."), config)
        if not low <= value < high:
            below = "" if high == math.inf else f" and less than {high}"
            raise ValueError(f"{key} must be at least {low}{below}, got {value}")
    if (warmup := config.schedule.warmup_steps) >= config.steps:
        raise ValueError(
            f"schedule.warmup_steps={warmup} must be less than steps={config.steps}"
        )
    batch, num = config.data.batch_size, config.workers.num
    inside = config.mesh.data * config.mesh.fsdp
    if chunk := config.model.loss_chunk:
        length = config.data.sequence_length
        _check_multiple("data.sequence_length", length, chunk, "model.loss_chunk")
    _check_multiple("steps", config.steps, config.sync_every, "sync_every")
    _check_multiple(
        "data.batch_size",
        batch,
        num * inside,
        "workers.num * mesh.data * mesh.fsdp" if inside > 1 else "workers.num",
    )


def _check_multiple(key, value, divisor, divisor_key):
    if rest := value % divisor:
        near = [n for n in (value - rest, value - rest + divisor) if n]
        raise ValueError(
            f"{key}={value} is not a multiple of {divisor_key}={divisor}; the nearest "
            f"that is: {' or '.join(map(str, near))}"
        )


# Keys of `data` that some formats have no use for -> those that do, and the value that
# stands in configs/default.py and says nothing.
_FILES, _SHARDS = {"text", "jsonl", "nanogpt", "llmc"}, {"nanogpt", "llmc"}
_USES = {
    "path": (_FILES, ""),
    "held_out": (_FILES, 0.05),
    "held_out_path": (_FILES, ""),
    "field": ({"jsonl"}, "text"),
    "vocab_size": (_SHARDS, 0),
    "end_of_text": (_SHARDS, -1),
    "cache": ({"shakespeare", "text", "jsonl"}, ""),
}


def _check_uses(keys):
    for key, (formats, unset) in _USES.items():
        value = keys[key]
        if value != unset and keys.format not in formats:
            raise ValueError(
                f"data.{key}={value} is given, but data.format is {keys.format!r}, "
                f"which has no use for it; leave it at {unset!r}, or set data.format "
                f"to {' or '.join(sorted(formats))}"
            )


def _unknown_format(name):
    return ValueError(
        f"data.format must be 'shakespeare', 'text', 'jsonl', 'nanogpt' or 'llmc', got "
        f"{name!r}"
    )


def _vocabulary(config):
    """Number of token ids, and the id that ends a document; reads no file."""
    keys = config.data
    match keys.format:
        case "shakespeare" | "text" | "jsonl":
            vocabulary = data.BYTES.vocab_size, data.BYTES.end_of_text
        case "nanogpt" | "llmc":
            vocabulary = keys.vocab_size, keys.end_of_text
        case name:
            raise _unknown_format(name)
    _check_uses(keys)
    if vocabulary[0] <= max(0, vocabulary[1]):
        raise ValueError(
            f"data.vocab_size={keys.vocab_size} must be above 0 and above "
            f"data.end_of_text={keys.end_of_text}; give that of the tokenizer which "
            f"wrote the files, as they do not say it"
        )
    return vocabulary


def _tokens(config):
    keys = config.data
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
        case "llmc":
            return data.read_shards(find("*.bin"), shards.llmc, keys.vocab_size)
        case name:
            raise _unknown_format(name)
    return data.tokenize(text, data.BYTES, keys.cache)


def _model_config(config, vocabulary):
    vocab_size, end_of_text = vocabulary
    multiple = config.model.vocab_multiple
    try:
        return model.ModelConfig(
            vocab_size=-(-vocab_size // multiple) * multiple,
            end_of_text=end_of_text,
            num_layers=config.model.num_layers,
            width=config.model.width,
            head_dim=config.model.head_dim,
            num_kv_heads=config.model.num_kv_heads,
            mlp_ratio=config.model.mlp_ratio,
            rope_theta=config.model.rope_theta,
            dtype=config.model.dtype,
            remat=config.model.remat,
            loss_chunk=config.model.loss_chunk,
            z_loss=config.model.z_loss,
        )
    except ValueError as error:  # They begin with the name of a size.
        raise ValueError(f"model.{error}") from None


def _placed_batches(batches, workers, steps, sequence_length):
    """Batches by position; each process reads just the examples of its devices."""
    spec = P(AXIS, None, placement.batch_axes(workers.mesh) or None)

    def placed(position):
        indices = batches.indices(position, steps)
        shape = (*indices.shape, sequence_length + 1)
        read = lambda where: batches.examples(indices[where[:3]])
        return placement.place(workers.mesh, spec, shape, read)

    return placed


def _evaluation(config, model_config, workers, held_out):
    """Mean cross-entropy over the held-out tokens, spread over all devices."""
    windows, counts = data.evaluation_windows(held_out, config.data.sequence_length)
    axes = (AXIS, *placement.batch_axes(workers.mesh))
    spread = math.prod(workers.mesh.shape[axis] for axis in axes)
    batch = spread * config.evaluation.batch_size
    fill = -len(windows) % batch

    def place(x):
        x = np.pad(x, ((0, fill), (0, 0))).reshape(-1, batch, x.shape[-1])
        return placement.place(workers.mesh, P(None, axes), x.shape, x.__getitem__)

    placed = place(windows), place(counts)
    losses = model.token_losses(model_config)

    @jax.jit
    def evaluate(params, windows, counts):
        def total(batch):
            tokens, count = batch
            cross_entropy, _ = losses(params, tokens)
            return jnp.sum(cross_entropy, where=count)

        return jnp.sum(jax.lax.map(total, (windows, counts))) / jnp.sum(counts)

    return lambda params: evaluate(params, *placed)
