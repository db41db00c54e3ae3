"""The host loop: dispatch a round, then record what the one before it measured.

A workdir is a run: `config.json`, `metrics.jsonl`, `checkpoints/` and, once the run has
ended, `summary.json`. Training in a workdir with checkpoints goes on from the latest.
"""

import json
import math
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from muloco_jax import budget, checkpoint, metrics, stop, writers
from muloco_jax.experiment import Experiment
from muloco_jax.settings import Config, contradictions


class RefusedError(ValueError):
    """What was asked for does not go with what is there."""


def train(
    config: Config, experiment: Experiment, workdir: str, *, profile: int = 0
) -> dict[str, Any]:
    """Trains what `experiment.build` made of `config`.

    After a SIGTERM or SIGINT it saves at the end of the round and returns.

    Args:
        config: the configuration, to be written down and compared with that of the run
            that is resumed.
        experiment: what to train.
        workdir: folder of the run, which all processes share.
        profile: a round, from 1, to write a JAX profile of, to `workdir/profile`; 0:
            none.

    Returns:
        The summary: `eval_loss` of theta in nats per token, `bits_per_byte` (where the
        bytes are known), `step`, `tokens`, `wire_bytes_per_worker`, `seconds` and more.
        Of a run that was stopped, so far.

    Raises:
        RefusedError: if `workdir` cannot be one, or holds a run that `config` or the
            data contradict; if the round to profile is not one of those to come; if a
            package of a writer is missing.
        OSError: if something could not be written.
        metrics.DivergedError: if a loss, theta or an evaluation is no longer finite.
    """
    folder = pathlib.Path(workdir)
    _make(folder)
    with checkpoint.Checkpoints(folder, config.checkpoint.keep) as checkpoints:
        about = _about(config, experiment, checkpoints, folder)
        with stop.Stop() as stopping, _Log(config, experiment, folder, about) as log:
            try:
                _loop(config, experiment, checkpoints, about, stopping, log, profile)
            except metrics.DivergedError as error:
                kept = f"the last checkpoint is of step {checkpoints.latest}"
                if checkpoints.latest is None:
                    kept = "there is no checkpoint yet"
                raise metrics.DivergedError(f"{error}; {kept}") from None
    return log.summary


def _loop(config, experiment, checkpoints, about, stopping, log, profile):
    plan, clock = experiment.plan, log.clock
    if about["step"]:
        state = checkpoints.restore(about["step"], plan.state)
    else:
        state = plan.algorithm.init(plan.init())
    first = about["step"] // plan.sync_every
    if first == plan.rounds:  # It had ended already.
        log.end(experiment.evaluate(state.params))
    if profile and not first < profile <= plan.rounds:
        raise RefusedError(
            f"profile={profile} must be one of the rounds {first + 1} to {plan.rounds}"
        )
    log.sync_seconds = _time_sync(plan, state)
    take_round = jax.jit(plan.algorithm.round, donate_argnums=0)
    every, save_every = config.evaluation.every_rounds, config.checkpoint.every_rounds
    pending: tuple | None = None
    for index in range(first, plan.rounds):
        batches = experiment.batches(index)
        began = time.monotonic()
        if index + 1 == profile:
            with jax.profiler.trace(str(log.folder / "profile")):
                state, measured = jax.block_until_ready(take_round(state, batches))
        else:
            state, measured = take_round(state, batches)
        ended = clock.watch(measured["loss"])
        last = index + 1 == plan.rounds
        due = last or (index + 1) % every == 0
        eval_loss = experiment.evaluate(state.params) if due else None
        evaluated = clock.watch(eval_loss) if due else None
        # The device is busy with this round; meanwhile, look at the one before.
        if pending:
            log.record(*pending)
        pending = index, measured, eval_loss, (began, ended, evaluated)
        stop_now = stopping.asked() and not last
        if last or stop_now or (save_every and (index + 1) % save_every == 0):
            log.record(*pending)  # Raises, so that only what is finite is saved.
            pending = None
            checkpoints.save(log.step, state, log.about(), log.summary.get("eval_loss"))
            clock.busy_until(time.monotonic())
        if stop_now:
            log.stopped = True
            return


def evaluate(experiment: Experiment, workdir: str) -> dict[str, Any]:
    """Evaluates theta of the latest checkpoint in `workdir`.

    Returns:
        `eval_loss`, `bits_per_byte` if the bytes are known, and `step`.

    Raises:
        FileNotFoundError: if there is no checkpoint.
    """
    params = checkpoint.load_params(workdir, like=experiment.plan.state.params)
    measured = _evaluation(experiment, experiment.evaluate(params))
    return {"step": checkpoint.saved_steps(workdir)[-1], **measured}


def evaluation_text(measured: dict[str, Any]) -> str:
    """One line about an evaluation."""
    text = f"eval_loss {measured['eval_loss']:.4f} nats per token"
    if "bits_per_byte" in measured:
        text += f" ({measured['bits_per_byte']:.4f} bits per byte)"
    return f"{text} after step {measured['step']}"


class _Log:
    """Where a run is written down: the workdir and the terminal, by process 0 alone."""

    def __init__(self, config, experiment, folder, about):
        self.folder, self.clock = folder, metrics.Clock(about["seconds"])
        self.step, self.summary = about["step"], about["summary"]
        self.sync_seconds, self.stopped = 0.0, False
        self._config, self._experiment = config.to_dict(), experiment
        self._rates: list[float] = []
        self._writers = []
        if jax.process_index():
            return
        _write_json(folder / "config.json", self._config)
        print(f"workdir {folder}")
        print(*budget.describe(experiment.plan), sep="\n")
        print(f"held out {experiment.held_out_tokens:,} tokens", flush=True)
        if self.step:
            print(f"resuming after step {self.step}", flush=True)
        try:
            self._writers = writers.open_writers(
                folder,
                tensorboard=config.logging.tensorboard,
                wandb=config.logging.wandb,
                config=self._config,
                step=self.step,
            )
        except ValueError as error:
            raise RefusedError(str(error)) from error
        self._progress = writers.Progress(experiment.plan.rounds)

    def __enter__(self):
        if self._writers:
            self._progress.start()
        return self

    def __exit__(self, kind, *exception):
        if not self._writers:
            return
        for writer in self._writers:
            writer.close()
        self._progress.stop()
        if kind is not None:
            return
        if self.stopped:
            print(f"stopped and saved after step {self.step}; run it again to go on")
            return
        _write_json(self.folder / "summary.json", self.summary)
        print(evaluation_text(self.summary), f"and {self.summary['seconds']:.0f} s")

    def about(self) -> dict[str, Any]:
        """What a checkpoint holds besides the state."""
        plan = self._experiment.plan
        return {
            "step": self.step,
            "examples": int(plan.examples[self.step // plan.sync_every]),
            "seconds": self.clock.total(),
            "fingerprint": self._experiment.fingerprint,
            "config": self._config,
            "summary": self.summary,
        }

    def end(self, eval_loss: jax.Array) -> None:
        """Completes the summary of a run that had been stopped at its very end."""
        self.summary |= _evaluation(self._experiment, eval_loss)

    def record(self, index: int, measured: Any, eval_loss: Any, times: tuple) -> None:
        """Waits for what round `index` measured, checks it, and writes it down."""
        measured = _on_host(measured)
        began, ended, evaluated = times
        seconds = self.clock.round(began, ended())
        evaluation = {}
        if evaluated:
            evaluation = _evaluation(self._experiment, eval_loss)
            self.clock.busy_until(evaluated())
        plan, before = self._experiment.plan, index * self._experiment.plan.sync_every
        metrics.check_finite(measured, before, evaluation.get("eval_loss"))
        self.step = before + plan.sync_every
        tokens = np.diff(plan.examples) * plan.sequence_length
        self._rates.append(tokens[index] / seconds)
        progress = {
            "round": index + 1,
            "step": self.step,
            "tokens": int(tokens[: index + 1].sum()),
            "wire_bytes_per_worker": (index + 1) * plan.wire_bytes,
            "seconds": self.clock.total(),
            **self._speed(self._rates[-1]),
            "round_seconds": seconds,
            "sync_share": self.sync_seconds / seconds,
            **evaluation,
        }
        row = metrics.round_row(measured, progress)
        # Of the first round, which is compiled, the rate counts only if it is alone.
        typical = float(np.median(self._rates[1:] or self._rates))
        self.summary = {
            **progress,
            **self._speed(typical),
            "loss": row["loss"],
            "num_params": plan.num_params,
        }
        rates = plan.learning_rates[before : self.step]
        rows = [*metrics.inner_rows(measured, before, rates), row]
        for writer in self._writers:
            writer.write(rows)
        if self._writers:
            self._progress.update(row, tokens[index + 1 :].sum() / typical)

    def _speed(self, tokens_per_second):
        """Tokens per second, and model FLOPs utilization where the peak is known."""
        plan = self._experiment.plan
        speed = {"tokens_per_second": tokens_per_second}
        devices = plan.workers.mesh.devices.flat
        if peak := metrics.peak_flops(devices[0].device_kind):
            flops = plan.flops_per_token * tokens_per_second
            speed["flops_utilization"] = flops / (peak * devices.base.size)
        return speed


def _evaluation(experiment, eval_loss):
    """Held-out loss, and per byte where their number is known."""
    eval_loss = float(_on_host(eval_loss))
    measured = {"eval_loss": eval_loss}
    if experiment.held_out_bytes:
        bits = eval_loss * experiment.held_out_tokens / math.log(2)
        measured["bits_per_byte"] = bits / experiment.held_out_bytes
    return measured


def _time_sync(plan, state):
    """Seconds that the communication of a round takes by itself."""

    @jax.jit
    def sends(state):
        sent = [segment.send for segment in plan.algorithm.schedule]
        return [plan.algorithm.send(state, i)[1] for i in sent if i is not None]

    jax.block_until_ready(sends(state))  # Compiles.
    began = time.monotonic()
    jax.block_until_ready(sends(state))
    return time.monotonic() - began


def _on_host(tree):
    """Host copies of arrays, also of those spread over several processes."""
    if jax.process_count() > 1:
        return multihost_utils.process_allgather(tree, tiled=True)
    return jax.device_get(tree)


def _write_json(file, value):
    """Writes elsewhere, then moves: the file is whole, also if this is killed."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)


def _make(folder):
    """Makes the folder of a run.

    Process 0 does it, and all learn whether it could, so that none waits for the others
    in vain.
    """
    problem = ""
    if jax.process_index() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            problem = f"workdir {folder} is a file; pass a folder"
        except OSError as error:
            problem = f"workdir {folder} cannot be made: {error.strerror}"
    refused = np.array(bool(problem))
    if jax.process_count() > 1:
        refused = multihost_utils.broadcast_one_to_all(refused)
        shared = multihost_utils.process_allgather(np.array(folder.is_dir()))
        if not refused and not shared.all():
            problem = (
                f"workdir {folder} of process 0 is not there on process "
                f"{np.argmin(shared)}; all processes must share it"
            )
            refused = True
    if refused:
        raise RefusedError(problem or f"process 0 refused workdir {folder}")


def _about(config, experiment, checkpoints, folder):
    """What is known of the run in `folder` so far, which must be this one."""
    file, latest = folder / "config.json", checkpoints.latest
    about = {"step": 0, "seconds": 0.0, "summary": {}}
    if latest is not None:
        about = checkpoints.about(latest)
    elif file.exists():  # It ended before its first checkpoint.
        about["config"] = json.loads(file.read_text(encoding="utf-8"))
    if differing := contradictions(about.get("config"), config):
        raise RefusedError(
            f"workdir {folder} holds another run: {'; '.join(differing)}; pass another "
            f"workdir, or name what may change in checkpoint.may_change"
        )
    if about.get("fingerprint", experiment.fingerprint) != experiment.fingerprint:
        raise RefusedError(
            f"workdir {folder} holds a run on other data; pass another workdir, or the "
            f"data that it was begun with"
        )
    if about["step"] > config.steps:
        raise RefusedError(
            f"workdir {folder} holds a run that has taken {about['step']} steps; "
            f"steps={config.steps} must not be less"
        )
    return about
