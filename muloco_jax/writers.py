"""Where rows are written: files, services and the terminal.

A row is a plain dict with the kind of its `event` and the inner `step` that it is of,
from 1. A run that resumes after inner step `step` opens its writers with that, and they
forget the rows after it, which it will write again.
"""

import contextlib
import importlib
import json
import math
import os
import pathlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

import rich.progress


class Writer(Protocol):
    """Takes rows, in order of their steps."""

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Writes rows."""
        ...

    def close(self) -> None:
        """Ends writing."""
        ...


def open_writers(
    folder: pathlib.Path,
    *,
    tensorboard: bool,
    wandb: str,
    config: dict[str, Any],
    step: int,
) -> list[Writer]:
    """The writers of a run: `metrics.jsonl` in its folder, and what is asked for.

    Args:
        folder: of the run; it exists.
        tensorboard: whether the folder gets event files of TensorBoard.
        wandb: project of Weights & Biases; "": none.
        config: of the run, for Weights & Biases.
        step: inner steps after which the run resumes; 0: it starts.

    Raises:
        ValueError: if a package is missing, or Weights & Biases refuses the run.
    """
    with contextlib.ExitStack() as opened:
        keep = lambda writer: opened.enter_context(contextlib.closing(writer))
        writers: list[Writer] = [keep(JsonLines(folder / "metrics.jsonl", step))]
        if tensorboard:
            writers.append(keep(TensorBoard(folder, step)))
        if wandb:
            writers.append(keep(Wandb(wandb, folder, config, step)))
        opened.pop_all()  # None has failed, so none is closed.
    return writers


class JsonLines:
    """Appends rows to a file, one JSON object a line.

    Args:
        path: of the file. Rows after `step` are dropped from it, and a last line that
            an interruption cut off.
        step: inner steps after which the run resumes; 0 empties the file.
    """

    def __init__(self, path: pathlib.Path, step: int):
        if path.exists():
            _drop_after(path, step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Writes rows, and makes them visible to readers. NaN becomes null."""
        for row in rows:
            strict = {key: _null_if_nan(value) for key, value in row.items()}
            self._file.write(json.dumps(strict, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Ends writing."""
        self._file.close()


def _null_if_nan(value):
    if isinstance(value, list):
        return [_null_if_nan(x) for x in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _drop_after(path, step):
    """Replaces a file of rows, if it holds others, by one of the whole rows to `step`.

    That happens at once, so that an interruption here loses nothing.
    """
    beside = path.with_name(path.name + ".partial")
    try:
        dropped = False
        with path.open("rb") as old, beside.open("wb") as new:
            for number, line in enumerate(old, 1):
                if line.endswith(b"\n") and _step_of(line, path, number) <= step:
                    new.write(line)
                else:
                    dropped = True
        if dropped:
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _step_of(line, path, number):
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"line {number} of {path} is no row of a run; remove that line, or the file"
        ) from None


class TensorBoard:
    """Writes the numbers of rows as scalars `event/column` to event files.

    Numbers of a list become `event/column/k`; NaN and None are skipped.

    Args:
        folder: that gets the files.
        step: inner steps after which the run resumes; what the files there hold after
            that, TensorBoard no longer shows.
    """

    def __init__(self, folder: pathlib.Path, step: int):
        tensorboard = _import("tensorboardX", "tensorboard")
        self._writer = tensorboard.SummaryWriter(
            str(folder),
            purge_step=step + 1,
            # A file is named by the second: one resumed in it must not overwrite it.
            filename_suffix=f".{step}",
        )

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Writes rows, which TensorBoard sees after at most two minutes."""
        for row in rows:
            for name, value in _scalars(row).items():
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Writes out all rows."""
        self._writer.close()


class Wandb:
    """Logs the numbers of rows to a run of Weights & Biases, named as `TensorBoard`.

    Their x axis is the column `step`. A run that resumes continues the run whose id the
    folder holds; what that has logged after `step` cannot be taken back, and stays.

    Args:
        project: that the run belongs to.
        folder: of the run, which names it, and holds its id and its own files.
        config: that the run shows.
        step: inner steps after which the run resumes; 0 starts a new one.

    Raises:
        ValueError: if Weights & Biases refuses the run, as without an API key.
    """

    def __init__(
        self, project: str, folder: pathlib.Path, config: dict[str, Any], step: int
    ):
        wandb = _import("wandb", "wandb")
        folder = folder.resolve()
        known = folder / "wandb_id"
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                dir=str(folder),
                config=config,
                id=known.read_text() if step and known.exists() else None,
                resume="allow",
            )
        except wandb.Error as error:
            raise ValueError(f"wandb project {project!r}: {error}") from error
        known.write_text(self._run.id)
        # Several rows share a step, which the steps that wandb counts cannot.
        self._run.define_metric("*", step_metric="step")

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Logs rows."""
        for row in rows:
            self._run.log({"step": row["step"], **_scalars(row)})

    def close(self) -> None:
        """Waits until all is sent, and ends the run."""
        self._run.finish()


def _import(package: str, extra: str) -> ModuleType:
    """Imports a package that only one of the writers needs."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f'the package {package} is missing: pip install "muloco_jax[{extra}]"'
        ) from error


def _scalars(row):
    """The numbers of a row by `event/column`, or `event/column/k` in a list."""
    named = {}
    for column, value in row.items():
        name = f"{row['event']}/{column}"
        if isinstance(value, list):
            named |= {f"{name}/{k}": x for k, x in enumerate(value)}
        elif column != "step":
            named[name] = value
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, int | float) and not math.isnan(value)
    }


def progress_text(row: Mapping[str, Any], rounds: int, seconds_left: float) -> str:
    """One line about a round.

    >>> row = {"round": 2, "step": 60, "loss": 2.5, "tokens_per_second": 12300.0}
    >>> progress_text(row, rounds=20, seconds_left=75.0)
    'round  2/20  step 60  loss 2.500  12.3k tokens/s  1:15 left'
    """
    minutes, seconds = divmod(round(seconds_left), 60)
    parts = [
        f"round {row['round']:{len(str(rounds))}d}/{rounds}",
        f"step {row['step']}",
        f"loss {row['loss']:.3f}",
        f"eval {row['eval_loss']:.3f}" if "eval_loss" in row else "",
        f"{row['tokens_per_second'] / 1000:.1f}k tokens/s",
        f"{minutes}:{seconds:02d} left",
    ]
    return "  ".join(filter(None, parts))


class Progress:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, rounds: int):
        self._rounds = rounds
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TextColumn("{task.description}"),
        )
        self._task = self._bar.add_task("compiling the first round", total=rounds)
        self._on_terminal = self._bar.console.is_terminal

    def start(self) -> None:
        """Shows the bar."""
        if self._on_terminal:
            self._bar.start()

    def stop(self) -> None:
        """Leaves the bar as it stands."""
        if self._on_terminal:
            self._bar.stop()

    def update(self, row: Mapping[str, Any], seconds_left: float) -> None:
        """Shows that the round of `row` has ended."""
        line = progress_text(row, self._rounds, seconds_left)
        if self._on_terminal:
            self._bar.update(self._task, completed=row["round"], description=line)
        else:
            print(line, flush=True)
