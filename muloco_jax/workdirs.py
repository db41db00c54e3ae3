"""Folders of runs: claimed by one run, and resumed only by what goes on with it.

On several processes all of them refuse if one does, so that none waits in vain.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from muloco_jax import settings


class RefusedError(ValueError):
    """What was asked for does not go with what is there."""


def write_json(file: pathlib.Path, value: Any) -> None:
    """Writes elsewhere, then moves: the file is whole, also if this is killed."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)


def together(step: Callable, *arguments: Any) -> Any:
    """Takes a step that may refuse; if it does so on one process, it does on all.

    So none waits for the others in vain.
    """
    result, problem = None, ""
    try:
        result = step(*arguments)
    except (RefusedError, OSError) as error:
        problem = str(error)
    if jax.process_count() > 1:
        refused = multihost_utils.process_allgather(np.array(bool(problem)))
        if refused.any():
            problem = problem or f"process {np.argmax(refused)} refused; it says why"
    if problem:
        raise RefusedError(problem)
    return result


def check_equal(config: settings.Config, fingerprint: str) -> None:
    """Checks that all processes were told the same, but for where their data are."""
    told = settings.flat(config)
    elsewhere = ("data.path", "data.held_out_path", "data.cache")
    told = {key: value for key, value in told.items() if key not in elsewhere}
    text = json.dumps([told, fingerprint])
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest).reshape(-1, len(digest))
    if len(other := np.flatnonzero((digests != digests[0]).any(axis=1))):
        raise RefusedError(
            f"process {other[0]} has other settings or data than process 0; start all "
            f"with the same"
        )


def claim(folder: pathlib.Path) -> contextlib.AbstractContextManager:
    """Makes the folder of a run, and locks it while the result is open."""
    if jax.process_index():
        return contextlib.nullcontext()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except FileExistsError:
        raise RefusedError(f"workdir {folder} is a file; pass a folder") from None
    except OSError as error:
        raise RefusedError(
            f"workdir {folder} cannot be written: {error.strerror}"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RefusedError(
            f"workdir {folder} is in use by another process; wait for it, or pass "
            f"another workdir"
        ) from None
    except OSError:  # Some file systems have no locks.
        pass
    return lock


def find(folder: pathlib.Path, inner: str) -> None:
    """Checks that the folder is there, and may have a folder `inner` in it."""
    if not folder.is_dir():
        raise RefusedError(
            f"workdir {folder} of process 0 is not there on process "
            f"{jax.process_index()}; all processes must share it"
        )
    if (saved := folder / inner).exists() and not saved.is_dir():
        raise RefusedError(f"{saved} is a file; remove it, or pass another workdir")


def about(
    config: settings.Config, experiment: Any, checkpoints: Any, folder: pathlib.Path
) -> dict[str, Any]:
    """What is known of the run in `folder` so far, which must be this one."""
    file, latest = folder / "config.json", checkpoints.latest
    known: dict[str, Any] = {"step": 0, "seconds": 0.0, "summary": {}, "examples": 0}
    known["config"] = json.loads(config.to_json())
    if latest is not None:
        known |= checkpoints.about(latest)
    elif file.exists():  # It ended before its first checkpoint.
        try:
            known["config"] = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise RefusedError(
                f"{file} holds no settings; remove it, or pass another workdir"
            ) from None
    allowed, refused = settings.changes(known["config"], config)
    if refused:
        raise RefusedError(
            f"workdir {folder} holds another run: {'; '.join(refused.values())}; pass "
            f"another workdir, or name what may change in checkpoint.may_change"
        )
    ours = experiment.fingerprint
    same_data = known.get("fingerprint", ours) == ours
    named = {name.split(".")[0] for name in config.checkpoint.may_change}
    if not same_data and "data" not in named:
        raise RefusedError(
            f"workdir {folder} holds a run on other data; pass another workdir, the "
            f"data that it was begun with, or 'data' in checkpoint.may_change"
        )
    if known["step"] > config.steps:
        raise RefusedError(
            f"workdir {folder} holds a run that has taken {known['step']} steps; "
            f"steps={config.steps} must not be less"
        )
    first, cut = divmod(known["step"], config.sync_every)
    if cut or known["examples"] != experiment.plan.examples[first]:
        raise RefusedError(
            f"workdir {folder} holds a run that has taken {known['examples']} "
            f"sequences in {known['step']} steps, and with these batch sizes and "
            f"sync_every={config.sync_every} it would not have; let "
            f"schedule.batch_sizes begin with what those steps took"
        )
    return known | {"changes": list(allowed.values())}


def check_profile(profile: int, about: dict[str, Any], plan: Any) -> None:
    """Checks that a round to profile is still to come."""
    first = about["step"] // plan.sync_every
    if profile and not first < profile <= plan.rounds:
        coming = (
            f"rounds {first + 1} to {plan.rounds}" if first < plan.rounds else "none"
        )
        raise RefusedError(
            f"profile={profile} must be one of the rounds to come, which are {coming}"
        )
