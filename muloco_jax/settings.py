"""What a configuration must hold, and which of it may change when a run is resumed.

`experiment` makes values of it; `train` reads how often to save and to evaluate.
"""

import functools
import json
import math
from typing import Any

from flax import traverse_util

from muloco_jax import schedules

Config = Any  # A ConfigDict of the keys in configs/default.py; it has no types.

# Key -> what its value must be at least, of the type that it must have, and what it
# must be less than.
_RANGES = {
    "seed": (0, 2**31),
    "steps": (1, 2**31),
    "sync_every": (1, 2**31),
    "workers.num": (1, 2**31),
    "mesh.workers": (0, 2**20),
    "mesh.data": (1, 2**20),
    "mesh.fsdp": (1, 2**20),
    "mesh.tensor": (1, 2**20),
    "inner.learning_rate": (0.0, math.inf),
    "inner.weight_decay": (0.0, math.inf),
    "inner.muon_momentum": (0.0, 1),
    "inner.adam_b1": (0.0, 1),
    "inner.adam_b2": (0.0, 1),
    "inner.adam_eps": (0.0, math.inf),
    "inner.clip_norm": (0.0, math.inf),
    "schedule.warmup_steps": (0, 2**31),
    "outer.learning_rate": (0.0, math.inf),
    "outer.momentum": (0.0, 1),
    "model.vocab_multiple": (1, 2**31),
    "data.vocab_size": (0, 2**24),
    "data.end_of_text": (-1, 2**24),
    "data.sequence_length": (1, 2**31),
    "data.batch_size": (1, 2**31),
    "data.microbatch": (0, 2**31),
    "checkpoint.every_rounds": (0, 2**31),
    "checkpoint.keep": (1, 2**31),
    "evaluation.every_rounds": (1, 2**31),
    "evaluation.batch_size": (1, 2**31),
}


def check(config: Config) -> None:
    """Checks what each key says for itself, and some that go together.

    Raises:
        ValueError: naming the key, its value, and what would be right.
    """
    for key, (low, high) in _RANGES.items():
        value = functools.reduce(getattr, key.split("."), config)
        if not schedules.is_a(value, type(low)):
            raise ValueError(
                f"{key} must be of type {type(low).__name__}, got {value!r}"
            )
        if not low <= value < high:
            limit = "finite" if high == math.inf else f"less than {high}"
            below = "" if value < low else f" and {limit}"
            raise ValueError(f"{key} must be at least {low:g}{below}, got {value}")
    if chunk := config.model.loss_chunk:
        length = config.data.sequence_length
        check_multiple("data.sequence_length", length, chunk, "model.loss_chunk")
    check_multiple("steps", config.steps, config.sync_every, "sync_every")
    _check_data(config.data)
    keys = flat(config)
    for named in config.checkpoint.may_change:
        if not any(_covers(named, key) for key in keys):
            raise ValueError(
                f"checkpoint.may_change names {named!r}, which is no key and no section"
            )


def check_multiple(key: str, value: int, divisor: int, divisor_key: str) -> None:
    """Checks that one number is a multiple of another.

    Raises:
        ValueError: naming both and the nearest that would do.
    """
    if rest := value % divisor:
        near = [n for n in (value - rest, value - rest + divisor) if n]
        raise ValueError(
            f"{key}={value} is not a multiple of {divisor_key}={divisor}; the nearest "
            f"that is: {' or '.join(map(str, near))}"
        )


# Keys of `data` that some formats have no use for -> those that do, and the value that
# stands in configs/default.py and says nothing.
TEXTS, SHARDS = ("shakespeare", "text", "jsonl"), ("nanogpt", "llmc")
_FILES = ("text", "jsonl", *SHARDS)
_USES = {
    "path": (_FILES, ""),
    "held_out": (_FILES, 0.05),
    "held_out_path": (_FILES, ""),
    "field": (("jsonl",), "text"),
    "vocab_size": (SHARDS, 0),
    "end_of_text": (SHARDS, -1),
    "cache": (TEXTS, ""),
}


def _check_data(keys):
    if keys.format not in (names := (*TEXTS, *SHARDS)):
        raise ValueError(f"data.format must be one of {names}, got {keys.format!r}")
    for key, (formats, unset) in _USES.items():
        value = keys[key]
        if value != unset and keys.format not in formats:
            raise ValueError(
                f"data.{key}={value} is given, but data.format is {keys.format!r}, "
                f"which has no use for it; leave it at {unset!r}, or set data.format "
                f"to {' or '.join(formats)}"
            )
    if not 0 < keys.held_out < 1:
        raise ValueError(f"data.held_out must be between 0 and 1, got {keys.held_out}")
    if keys.format in SHARDS and keys.vocab_size <= max(0, keys.end_of_text):
        raise ValueError(
            f"data.vocab_size={keys.vocab_size} must be above 0 and above "
            f"data.end_of_text={keys.end_of_text}; give that of the tokenizer which "
            f"wrote the files, as they do not say it"
        )


# Keys that a resumed run may change: how long and where it runs, what is measured and
# kept, how the same numbers are computed, and where the data are (not what they are).
_MAY_CHANGE = (
    "steps",
    "workers.sequential",
    "mesh",
    "model.remat",
    "model.loss_chunk",
    "data.microbatch",
    "data.path",
    "data.held_out_path",
    "data.cache",
    "evaluation",
    "checkpoint",
    "logging",
)


def flat(config: Config) -> dict[str, Any]:
    """All keys as `section.key`, with values as JSON has them."""
    return traverse_util.flatten_dict(json.loads(config.to_json()), sep=".")


def changes(
    old: dict[str, Any], config: Config
) -> tuple[dict[str, str], dict[str, str]]:
    """What differs between the settings of a run so far and those to continue with.

    Args:
        old: of the run so far, as nested dicts from JSON.
        config: the new ones, whose `checkpoint.may_change` names more keys or sections
            that may differ than those that always may.

    Returns:
        For each key what it was and is, as text: those that may differ, and those that
        may not.
    """
    before, now = traverse_util.flatten_dict(old, sep="."), flat(config)
    free = (*_MAY_CHANGE, *config.checkpoint.may_change)
    allowed, refused = {}, {}
    for key in sorted(before | now):
        was, is_now = before.get(key, "absent"), now.get(key, "absent")
        if was != is_now:
            which = allowed if any(_covers(name, key) for name in free) else refused
            which[key] = f"{key} was {was!r}, is {is_now!r}"
    return allowed, refused


def _covers(name, key):
    """Whether `name` is `key`, or the section that it is in."""
    return isinstance(name, str) and (key == name or key.startswith(f"{name}."))
