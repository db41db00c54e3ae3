"""What a configuration must hold, and which of it may change when a run is resumed.

Besides `experiment`, which makes values of it, nothing else looks into one.
"""

import functools
import json
import math
from typing import Any

Config = Any  # A ConfigDict of the keys in configs/default.py; it has no types.

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
    "outer.learning_rate": (0, math.inf),
    "outer.momentum": (0, 1),
    "model.vocab_multiple": (1, math.inf),
    "data.vocab_size": (0, 2**31),
    "data.end_of_text": (-1, 2**31),
    "data.sequence_length": (1, math.inf),
    "data.batch_size": (1, math.inf),
    "data.microbatch": (0, math.inf),
    "checkpoint.every_rounds": (0, math.inf),
    "checkpoint.keep": (1, math.inf),
    "evaluation.every_rounds": (1, math.inf),
    "evaluation.batch_size": (1, math.inf),
}


def check(config: Config) -> None:
    """Checks what each key says for itself, and some that go together.

    Raises:
        ValueError: naming the key, its value, and what would be right.
    """
    for key, (low, high) in _RANGES.items():
        value = functools.reduce(getattr, key.split("."), config)
        if not low <= value < high:
            below = "" if high == math.inf else f" and less than {high}"
            raise ValueError(f"{key} must be at least {low}{below}, got {value}")
    if chunk := config.model.loss_chunk:
        length = config.data.sequence_length
        check_multiple("data.sequence_length", length, chunk, "model.loss_chunk")
    check_multiple("steps", config.steps, config.sync_every, "sync_every")
    _check_data(config.data)
    keys = dict(_flat(json.loads(config.to_json())))
    for changeable in config.checkpoint.may_change:
        if not any(key.startswith(changeable) for key in keys):
            raise ValueError(
                f"checkpoint.may_change names {changeable!r}, which is no key"
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
    "mesh.",
    "model.remat",
    "model.loss_chunk",
    "data.microbatch",
    "data.path",
    "data.cache",
    "evaluation.",
    "checkpoint.",
    "logging.",
)


def contradictions(old: dict[str, Any] | None, config: Config) -> list[str]:
    """What keeps a run with settings `old` from being continued with `config`.

    Args:
        old: the settings as nested dicts from JSON; None if there are none.
        config: the new ones, whose `checkpoint.may_change` names more keys that may
            differ than those that always may.

    Returns:
        For each key, what it was and what it is.
    """
    if old is None:
        return []
    before, now = (
        dict(_flat(settings)) for settings in (old, json.loads(config.to_json()))
    )
    may_change = (*_MAY_CHANGE, *config.checkpoint.may_change)
    absent = "absent"
    return [
        f"{key} was {before.get(key, absent)!r}, is {now.get(key, absent)!r}"
        for key in sorted(before | now)
        if before.get(key, absent) != now.get(key, absent)
        and not key.startswith(may_change)
    ]


def _flat(settings, prefix=""):
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
