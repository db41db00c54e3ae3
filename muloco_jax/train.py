"""The host loop: dispatch a round, then record what the one before it measured."""

import json
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from muloco_jax import metrics, writers
from muloco_jax.experiment import Config, Experiment


def train(config: Config, experiment: Experiment, workdir: str) -> dict[str, Any]:
    """Trains what `experiment.build` made of `config`.

    The folder `workdir` gets `config.json`, `metrics.jsonl` (an object for each inner
    step and for each round) and at the end `summary.json`.

    Returns:
        The summary: `eval_loss` of theta in nats per token, `bits_per_byte` (where the
        bytes are known), `step`, `tokens`, `wire_bytes_per_worker`, `seconds` and more.

    Raises:
        FileExistsError: if `workdir` is a file, or holds a run already.
        metrics.DivergedError: if a loss, theta or an evaluation is no longer finite.
    """
    folder = pathlib.Path(workdir)
    _claim(folder)
    take_round = jax.jit(experiment.algorithm.round, donate_argnums=0)
    state = experiment.algorithm.init(experiment.init())
    clock = metrics.Clock()
    with _Log(config, experiment, folder, clock) as log:
        pending: tuple | None = None
        for index in range(experiment.rounds):
            batches = experiment.batches(index * experiment.examples_per_round)
            began = time.monotonic()
            state, measured = take_round(state, batches)
            ended = clock.watch(measured["loss"])
            last = index + 1 == experiment.rounds
            due = last or (index + 1) % config.evaluation.every_rounds == 0
            eval_loss = experiment.evaluate(state.params) if due else None
            evaluated = clock.watch(eval_loss) if due else None
            # The device is busy with this round; meanwhile, look at the one before.
            if pending:
                log.record(*pending)
            pending = index, measured, eval_loss, (began, ended, evaluated)
        if pending:
            log.record(*pending)
    return log.summary


class _Log:
    """Where a run is written down: the workdir and the terminal, by process 0 alone."""

    def __init__(self, config, experiment, folder, clock):
        self.summary: dict[str, Any] = {}
        self._config, self._experiment = config, experiment
        self._folder, self._clock = folder, clock
        self._writes = jax.process_index() == 0
        if self._writes:
            _write_json(folder / "config.json", config.to_dict())
            for line in _introduction(config, experiment, folder):
                print(line, flush=True)
            self._rows = writers.JsonLines(folder / "metrics.jsonl", step=0)
            self._progress = writers.Progress(experiment.rounds)

    def __enter__(self):
        if self._writes:
            self._progress.start()
        return self

    def __exit__(self, kind, *exception):
        if not self._writes:
            return
        self._rows.close()
        self._progress.stop()
        if kind is None:
            _write_json(self._folder / "summary.json", self.summary)
            bits = ""
            if "bits_per_byte" in self.summary:
                bits = f"({self.summary['bits_per_byte']:.4f} bits per byte) "
            print(
                f"eval_loss {self.summary['eval_loss']:.4f} nats per token {bits}after "
                f"{self.summary['seconds']:.0f} s"
            )

    def record(self, index: int, measured: Any, eval_loss: Any, times: tuple) -> None:
        """Waits for what round `index` measured, checks it, and writes it down."""
        measured = _on_host(measured)
        began, ended, evaluated = times
        seconds = self._clock.round(began, ended())
        if evaluated:
            eval_loss = float(_on_host(eval_loss))
            self._clock.evaluation(evaluated())
        experiment, sync_every = self._experiment, self._config.sync_every
        step = index * sync_every
        metrics.check_finite(measured, step, eval_loss)
        progress = {
            "round": index + 1,
            "step": step + sync_every,
            "tokens": (index + 1) * experiment.tokens_per_round,
            "wire_bytes_per_worker": (index + 1) * experiment.wire_bytes,
            "seconds": self._clock.total(),
            "tokens_per_second": experiment.tokens_per_round / seconds,
        }
        if eval_loss is not None:
            nats = eval_loss * experiment.held_out_tokens
            progress["eval_loss"] = eval_loss
            if bytes_of_text := experiment.held_out_bytes:  # Unknown of token shards.
                progress["bits_per_byte"] = nats / math.log(2) / bytes_of_text
        row = metrics.round_row(measured, progress)
        typical = self._clock.typical()
        self.summary = {
            **progress,
            "loss": row["loss"],
            "num_params": experiment.num_params,
            "tokens_per_second": experiment.tokens_per_round / typical,
        }
        if self._writes:
            rates = experiment.learning_rates[step : step + sync_every]
            self._rows.write([*metrics.inner_rows(measured, step, rates), row])
            self._progress.update(row, typical * (experiment.rounds - index - 1))


def _on_host(tree):
    """Host copies of arrays, also of those spread over several processes."""
    if jax.process_count() > 1:
        return multihost_utils.process_allgather(tree, tiled=True)
    return jax.device_get(tree)


def _write_json(file, value):
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    file.write_text(text, encoding="utf-8")


def _claim(folder):
    """Makes the folder of a run, which must not hold another.

    Process 0 does it, and all learn whether it could, so that none waits for the others
    in vain.
    """
    problem = ""
    if jax.process_index() == 0:
        if folder.exists() and not folder.is_dir():
            problem = f"workdir {folder} is a file; pass a folder"
        elif (folder / "config.json").exists():
            problem = f"workdir {folder} holds a run already; pass another"
        else:
            folder.mkdir(parents=True, exist_ok=True)
    refused = np.array(bool(problem))
    if jax.process_count() > 1:
        refused = multihost_utils.broadcast_one_to_all(refused)
    if refused:
        raise FileExistsError(problem or f"process 0 refused workdir {folder}")


def _introduction(config, experiment, folder):
    """What a run is about to do, in a few lines."""
    workers = experiment.workers
    tokens = experiment.tokens_per_round // workers.num
    mesh = ", ".join(f"{axis}: {size}" for axis, size in workers.mesh.shape.items())
    return [
        f"workdir {folder}",
        f"model {experiment.num_params:,} parameters; {config.inner.name} inside, "
        f"{config.outer.name} outside",
        f"workers {workers.num} on {jax.default_backend()} mesh {{{mesh}}}",
        f"round {config.sync_every} steps, {tokens:,} tokens and "
        f"{experiment.wire_bytes:,} bytes sent per worker; {experiment.rounds} rounds, "
        f"{experiment.rounds * experiment.tokens_per_round:,} tokens in all",
        f"held out {experiment.held_out_tokens:,} tokens",
    ]
