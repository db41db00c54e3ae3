"""The host loop: dispatch a round, then record what the one before it measured.

A workdir is a run: `config.json`, `metrics.jsonl`, `checkpoints/` and, once the run has
ended, `summary.json`. Training in a workdir with checkpoints goes on from the latest.
"""

import contextlib
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from muloco_jax import (
    budget,
    checkpoint,
    metrics,
    placement,
    stop,
    workdirs,
    writers,
)
from muloco_jax.experiment import Experiment
from muloco_jax.settings import Config


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
        workdirs.RefusedError: if `workdir` cannot be one, or holds a run that `config`
            or the data contradict; if the round to profile is not one of those to come;
            if a package of a writer is missing.
        OSError: if something could not be written.
        metrics.DivergedError: if a loss, theta or an evaluation is no longer finite.
    """
    folder = pathlib.Path(workdir)
    with contextlib.ExitStack() as opened:
        if jax.process_count() > 1:
            workdirs.check_equal(config, experiment.fingerprint)
        opened.enter_context(workdirs.together(workdirs.claim, folder))
        workdirs.together(workdirs.find, folder, checkpoint.FOLDER)
        checkpoints = opened.enter_context(
            checkpoint.Checkpoints(folder, config.checkpoint.keep)
        )
        run = config, experiment
        about = workdirs.together(workdirs.about, *run, checkpoints, folder)
        workdirs.together(workdirs.check_profile, profile, about, experiment.plan)
        stopping = opened.enter_context(stop.Stop())
        log = opened.enter_context(workdirs.together(_Log, *run, folder, about))
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
        try:
            state = checkpoints.restore(about["step"], plan.state)
        except ValueError as error:
            raise workdirs.RefusedError(
                f"{error}; undo what checkpoint.may_change let"
            ) from None
    else:
        state = plan.algorithm.init(plan.init())
    first = about["step"] // plan.sync_every
    if first == plan.rounds:  # It had ended already.
        log.end(experiment.evaluate(state.params))
        return
    log.sync_seconds = _time_sync(plan, state)
    take_round = jax.jit(plan.algorithm.round, donate_argnums=0)
    gather, alone = _gather(plan.workers.mesh), jax.process_count() == 1
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
        stops = _spread(plan.workers.mesh, stopping.asked)
        measured, eval_loss, stops = gather((measured, eval_loss, stops))
        # The device is busy with this round; meanwhile, look at the one before.
        stop_now = alone and stopping.asked
        if pending:
            stop_now |= log.record(*pending)
        pending = index, measured, eval_loss, stops, (began, ended, evaluated)
        if last or stop_now or (save_every and (index + 1) % save_every == 0):
            log.record(*pending)  # Raises, so that only what is finite is saved.
            pending = None
            checkpoints.save(log.step, state, log.about(), log.summary.get("eval_loss"))
            clock.busy_until(time.monotonic())
        if stop_now and not last:
            log.stopped = True
            break
    checkpoints.wait()  # Before it is reported, and while a signal does not kill this.


def evaluate(config: Config, experiment: Experiment, workdir: str) -> dict[str, Any]:
    """Evaluates theta of the latest checkpoint in `workdir`.

    Returns:
        `eval_loss`, `bits_per_byte` if the bytes are known, and `step`.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        workdirs.RefusedError: if `config` or the data contradict the run.
    """
    if not checkpoint.saved_steps(workdir):
        raise FileNotFoundError(f"there are no checkpoints in workdir {workdir}")
    with checkpoint.Checkpoints(workdir) as checkpoints:
        folder = pathlib.Path(workdir)
        step = workdirs.about(config, experiment, checkpoints, folder)["step"]
    params = checkpoint.load_params(workdir, step, like=experiment.plan.state.params)
    return {"step": step, **_evaluation(experiment, experiment.evaluate(params))}


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
        try:
            self._writers = writers.open_writers(
                folder,
                tensorboard=config.logging.tensorboard,
                wandb=config.logging.wandb,
                config=self._config,
                step=self.step,
            )
        except ValueError as error:
            raise workdirs.RefusedError(str(error)) from error
        workdirs.write_json(folder / "config.json", self._config)
        (folder / "summary.json").unlink(missing_ok=True)  # Of a shorter run.
        self._progress = writers.Progress(experiment.plan.rounds)
        print(f"workdir {folder}")
        print(*budget.describe(experiment.plan), sep="\n")
        print(f"held out {experiment.held_out_tokens:,} tokens", flush=True)
        if self.step:
            changes = "; ".join(about["changes"])
            print(f"resuming after step {self.step}", changes and f"({changes})")

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
        workdirs.write_json(self.folder / "summary.json", self.summary)
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

    def record(self, index, measured, eval_loss, stops, times) -> bool:
        """Waits for what round `index` measured, checks it, and writes it down.

        Returns whether some process had been asked to stop when that round began.
        """
        measured, stops = jax.device_get((measured, stops))
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
        return bool(np.any(stops))

    def _speed(self, tokens_per_second):
        """Tokens per second, and model FLOPs utilization where the peak is known."""
        plan = self._experiment.plan
        speed = {"tokens_per_second": tokens_per_second}
        mesh = plan.workers.mesh
        if peak := metrics.peak_flops(mesh.devices.flat[0].device_kind):
            flops = plan.flops_per_token * tokens_per_second
            speed["flops_utilization"] = flops / (peak * mesh.size)
        return speed


def _evaluation(experiment, eval_loss):
    """Held-out loss, and per byte where their number is known."""
    eval_loss = float(eval_loss)
    measured = {"eval_loss": eval_loss}
    if experiment.held_out_bytes:
        bits = eval_loss * experiment.held_out_tokens / math.log(2)
        measured["bits_per_byte"] = bits / experiment.held_out_bytes
    return measured


def _time_sync(plan, state):
    """Seconds that the deltas of a round and their average take, the least of three."""

    @jax.jit
    def sends(state):
        sent = [segment.send for segment in plan.algorithm.schedule]
        return [plan.algorithm.send(state, i)[1] for i in sent if i is not None]

    jax.block_until_ready(sends(state))  # Compiles.
    times = []
    for _ in range(3):
        began = time.monotonic()
        jax.block_until_ready(sends(state))
        times.append(time.monotonic() - began)
    return min(times)


def _gather(mesh):
    """Brings arrays to all processes, right behind the round that makes them."""
    if jax.process_count() == 1:
        return lambda tree: tree
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))


def _spread(mesh, asked):
    """What this process was asked, as its part of an array over all devices."""
    part = lambda where: np.full(1, asked)
    return placement.place(mesh, P(mesh.axis_names), (mesh.size,), part)
