"""A run that is stopped, in whatever way, goes on as if it had not been."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from small_run import settings, write_text

from configs import default
from muloco_jax import checkpoint, experiment, metrics, train, workdirs

ROOT = pathlib.Path(__file__).parent.parent
SIX_ROUNDS = {
    "steps": 12,
    "evaluation.every_rounds": 2,
    "checkpoint.every_rounds": 2,
    "checkpoint.keep": 9,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    write_text(folder)
    return folder


def build(folder, **others):
    config = default.get_config()
    config.update_from_flattened_dict(settings(folder, **SIX_ROUNDS | others))
    return config, experiment.build(config)


@pytest.fixture(scope="module")
def built(folder):
    return build(folder)


@pytest.fixture(scope="module")
def whole(folder, built):
    """The workdir of an uninterrupted run, and its summary."""
    summary = train.train(*built, str(folder / "whole"))
    return folder / "whole", summary


def stopping_in(built, index, number=signal.SIGTERM):
    """The experiment, and a signal to this process when round `index` begins."""
    config, experiment_ = built

    def batches(i):
        if i == index:
            os.kill(os.getpid(), number)
        return experiment_.batches(i)

    return config, experiment_._replace(batches=batches)


def rows(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


TIMES = ("seconds", "tokens_per_second", "round_seconds", "sync_share")


def without_times(row):
    return {key: value for key, value in row.items() if key not in TIMES}


def assert_same_run(workdir, whole):
    """All but the times: theta, every row, and the summary."""
    theta, expected = map(checkpoint.load_params, (workdir, whole))
    jax.tree.map(np.testing.assert_array_equal, theta, expected)
    for ours, theirs in zip(rows(workdir), rows(whole), strict=True):
        assert without_times(ours) == without_times(theirs)
    ours, theirs = (
        json.loads((each / "summary.json").read_text()) for each in (workdir, whole)
    )
    assert without_times(ours) == without_times(theirs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_saves_at_the_end_of_the_round(folder, built, whole, number, capfd):
    """Round 3 of 6 is no round of a checkpoint."""
    workdir = folder / f"stopped{int(number)}"
    before = signal.getsignal(number)
    summary = train.train(*stopping_in(built, 2, number), str(workdir))
    assert summary["step"] == 6
    assert checkpoint.saved_steps(workdir) == [4, 6]
    assert not (workdir / "summary.json").exists()
    out, _ = capfd.readouterr()
    assert f"{number.name}: saving after this round; once more" in out
    assert out.endswith("stopped and saved after step 6; run it again to go on\n")
    assert signal.getsignal(number) == before
    train.train(*built, str(workdir))
    assert "resuming after step 6" in capfd.readouterr().out
    assert checkpoint.saved_steps(workdir) == [4, 6, 8, 12]
    assert_same_run(workdir, whole[0])


def test_times_and_the_best_are_kept_too(folder, built, whole, monkeypatch):
    # A round of milliseconds, on a busy machine, may take less than its sync by itself.
    monkeypatch.setattr(train, "_time_sync", lambda plan, state: 0.25)
    workdir = folder / "times"
    train.train(*stopping_in(built, 2), str(workdir))
    stopped = rows(workdir)[-1]["seconds"]
    train.train(*built, str(workdir))
    seconds = [row["seconds"] for row in rows(workdir) if row["event"] == "round"]
    assert seconds == sorted(seconds)
    assert seconds[2] == stopped
    for row in rows(workdir)[2::3]:
        assert row["sync_share"] == pytest.approx(0.25 / row["round_seconds"])
    evaluated = {
        row["step"]: row["eval_loss"] for row in rows(workdir) if "eval_loss" in row
    }
    best = min(evaluated, key=evaluated.get)
    theta, expected = (checkpoint.load_params(workdir, step) for step in ("best", best))
    jax.tree.map(np.testing.assert_array_equal, theta, expected)


def test_the_state_of_a_round_is_given_to_the_next(folder, built):
    """Or memory would double."""
    config, experiment_ = built
    thetas = []

    def evaluate(params):
        thetas.append(params)
        return experiment_.evaluate(params)

    train.train(config, experiment_._replace(evaluate=evaluate), str(folder / "given"))
    kept = [jax.tree.leaves(theta)[0].is_deleted() for theta in thetas]
    assert kept == [True, True, False]


def test_the_share_of_the_peak_by_hand(folder, built, monkeypatch):
    """Operations per second over four devices of 1e9 each."""
    monkeypatch.setattr(metrics, "peak_flops", lambda kind: 1e9)
    workdir = folder / "peak"
    summary = train.train(*stopping_in(built, 0), str(workdir))
    flops = built[1].plan.flops_per_token
    for row in (summary, rows(workdir)[-1]):
        expected = flops * row["tokens_per_second"] / 4e9
        assert row["flops_utilization"] == pytest.approx(expected)


def test_a_workdir_is_of_one_process_at_a_time(folder, built):
    workdir = folder / "locked"
    message = "in use by another process"
    with workdirs.claim(workdir), pytest.raises(workdirs.RefusedError, match=message):
        train.train(*built, str(workdir))
    assert not (workdir / "config.json").exists()


def test_a_signal_in_the_last_round_ends_the_run_as_usual(folder, built, whole):
    workdir = folder / "last"
    train.train(*stopping_in(built, 5), str(workdir))
    assert_same_run(workdir, whole[0])


def test_a_run_that_has_ended_is_not_trained_again(folder, built, whole):
    workdir, summary = whole
    config, experiment_ = built
    untouched = rows(workdir)
    (workdir / "summary.json").unlink()

    def batches(index):
        raise AssertionError(f"round {index} is trained again")

    assert train.train(
        config, experiment_._replace(batches=batches), str(workdir)
    ) == pytest.approx(summary)
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert rows(workdir) == untouched


def test_a_longer_run_goes_on_from_a_shorter(folder, built, capfd):
    """With a constant rate the two halves are the whole."""
    constant = {"schedule.pieces": (("constant", 0, 1.0),)}
    train.train(*build(folder, **constant), str(folder / "once"))
    train.train(*build(folder, **constant, steps=4), str(folder / "twice"))
    first = json.loads((folder / "twice" / "summary.json").read_text())
    assert first["step"] == 4
    train.train(
        *stopping_in(build(folder, **constant, steps=8), 2), str(folder / "twice")
    )
    assert not (folder / "twice" / "summary.json").exists()
    assert "resuming after step 4 (steps was 4, is 8)" in capfd.readouterr().out
    train.train(*build(folder, **constant), str(folder / "twice"))
    assert "resuming after step 6 (steps was 8, is 12)" in capfd.readouterr().out
    assert_same_run(folder / "twice", folder / "once")


def test_a_run_goes_on_on_another_mesh(folder, built, whole):
    """The numbers differ by the order of sums, in float32."""
    workdir = folder / "moved"
    train.train(*stopping_in(built, 2), str(workdir))
    others = {"mesh.workers": 2, "mesh.fsdp": 2, "workers.sequential": False}
    summary = train.train(*build(folder, **others), str(workdir))
    assert summary["eval_loss"] == pytest.approx(whole[1]["eval_loss"], rel=1e-5)
    assert json.loads((workdir / "config.json").read_text())["mesh"]["fsdp"] == 2


def test_another_configuration_is_refused_and_its_keys_are_named(folder, whole):
    workdir, _ = whole
    others = {"inner.learning_rate": 0.5, "model.num_layers": 2}
    config, experiment_ = build(folder, **others)
    message = (
        r"holds another run: inner\.learning_rate was 0\.03, is 0\.5; "
        r"model\.num_layers was 1, is 2; pass another workdir"
    )
    with pytest.raises(workdirs.RefusedError, match=message):
        train.train(config, experiment_, str(workdir))


def test_what_may_change_can_be_said(folder, built):
    """To go on with a lower learning rate, for one."""
    workdir = folder / "lowered"
    train.train(*stopping_in(built, 2), str(workdir))
    lower = {"inner.learning_rate": 0.01}
    with pytest.raises(workdirs.RefusedError, match=r"learning_rate was .*, is 0\.01;"):
        train.train(*build(folder, **lower), str(workdir))
    lower["checkpoint.may_change"] = ("inner.learning_rate",)
    train.train(*build(folder, **lower), str(workdir))
    rates = {
        row["step"]: row["learning_rate"]
        for row in rows(workdir)
        if "learning_rate" in row
    }
    assert rates[6] / rates[7] > 2.9


def test_what_changes_the_state_cannot_be_let(folder, built):
    workdir = folder / "state"
    train.train(*stopping_in(built, 1), str(workdir))
    for key, value, message in (
        (
            "workers.num",
            2,
            r"state workers/.* has shape \(4,.* and \(2,.* here; undo",
        ),
        ("inner.name", "adamw", "state workers/.* has shape .* here; undo"),
        ("inner.clip_norm", 0.0, "state workers/.* has shape .* here; undo"),
        ("outer.momentum", 0.0, "state outer_state/.* and None here; undo"),
        ("data.batch_size", 16, "taken 32 sequences in 4 steps, and with these batch"),
        ("sync_every", 3, "in 4 steps, .* and sync_every=3 it would not have"),
    ):
        others = {key: value, "checkpoint.may_change": (key,)}
        with pytest.raises(workdirs.RefusedError, match=message):
            train.train(*build(folder, **others), str(workdir))
    # What the steps so far took, and then another batch size.
    names = ("data", "schedule")
    others = {"data.batch_size": 16, "schedule.batch_sizes": ((4, 8),)}
    others["checkpoint.may_change"] = names
    summary = train.train(*build(folder, **others), str(workdir))
    assert summary["tokens"] == (4 * 8 + 8 * 16) * 16


def test_damaged_files_are_named(folder, built):
    workdir = folder / "damaged"
    train.train(*stopping_in(built, 1), str(workdir))
    good = (workdir / "metrics.jsonl").read_text()
    for bad in (good + "5\n", good + "{}\n", good + "\n", good + "no\n"):
        (workdir / "metrics.jsonl").write_text(bad)
        with pytest.raises(workdirs.RefusedError, match=r"line 7 of .* is no row"):
            train.train(*built, str(workdir))
    (workdir / "metrics.jsonl").write_text(good)
    (workdir / "checkpoints" / "4" / "about" / "metadata").write_text("{")
    with pytest.raises(workdirs.RefusedError, match="4 cannot be read; remove"):
        train.train(*built, str(workdir))
    early = folder / "damaged early"
    early.mkdir()
    (early / "config.json").write_text("[1]")
    with pytest.raises(workdirs.RefusedError, match="holds no settings; rem"):
        train.train(*built, str(early))
    (folder / "odd").mkdir()
    (folder / "odd" / "checkpoints").write_text("")
    with pytest.raises(workdirs.RefusedError, match="checkpoints is a file; remove it"):
        train.train(*built, str(folder / "odd"))


def test_an_evaluation_is_of_the_run_that_was_trained(folder, whole):
    with pytest.raises(workdirs.RefusedError, match=r"theta was .*, is 2"):
        train.evaluate(*build(folder, **{"model.rope_theta": 2.0}), str(whole[0]))


def test_a_configuration_without_a_checkpoint_binds_too(folder, built):
    """The run was killed while it compiled."""
    workdir = folder / "early"
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps(built[0].to_dict()))
    with pytest.raises(workdirs.RefusedError, match="seed was 0, is 1"):
        train.train(*build(folder, seed=1), str(workdir))


def test_other_data_are_refused_but_not_the_same_elsewhere(folder, built, tmp_path):
    workdir = folder / "data"
    train.train(*stopping_in(built, 0), str(workdir))
    write_text(tmp_path)
    text = tmp_path / "text.txt"
    train.train(
        *stopping_in(build(folder, **{"data.path": str(text)}), 1), str(workdir)
    )
    text.write_text(text.read_text().replace("question", "answer.."))
    with pytest.raises(workdirs.RefusedError, match="holds a run on other data"):
        train.train(*build(folder, **{"data.path": str(text)}), str(workdir))


def test_fewer_steps_than_were_taken_are_refused(folder, whole):
    with pytest.raises(workdirs.RefusedError, match="has taken 12 steps; steps=4 must"):
        train.train(*build(folder, steps=4), str(whole[0]))


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(folder):
    """The learning rate leaps in the third round."""
    leap = {"schedule.pieces": (("constant", 3, 1.0), ("constant", 0, 1e30))}
    workdir = folder / "leap"
    message = r"(loss|grad_norm) of worker \d became .* at step [67]; .* of step 4$"
    with pytest.raises(metrics.DivergedError, match=message):
        train.train(*build(folder, **leap), str(workdir))
    assert checkpoint.saved_steps(workdir) == [4]
    theta = checkpoint.load_params(workdir)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(theta))


def test_a_run_that_diverges_at_once_says_that_there_is_no_checkpoint(folder):
    rates = {"inner.learning_rate": 1e30, "outer.learning_rate": 1e30}
    with pytest.raises(metrics.DivergedError, match="there is no checkpoint yet"):
        train.train(*build(folder, **rates), str(folder / "at once"))


def test_theta_can_be_evaluated_again(built, whole, tmp_path):
    workdir, summary = whole
    again = train.evaluate(*built, str(workdir))
    assert again == {
        key: summary[key] for key in ("eval_loss", "bits_per_byte", "step")
    }
    with pytest.raises(FileNotFoundError, match="there are no checkpoints in workdir"):
        train.evaluate(*built, str(tmp_path))


def test_a_round_can_be_profiled(folder, built):
    workdir = folder / "profiled"
    train.train(*stopping_in(built, 2), str(workdir), profile=2)
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    for number in (3, 7):
        message = f"profile={number} must .* rounds 4 to 6"
        with pytest.raises(workdirs.RefusedError, match=message):
            train.train(*built, str(workdir), profile=number)


# --- Processes that are killed. ---

# Rounds long enough to be hit: of 30 steps. Without data parallelism there is one
# worker, whose outer step does nothing.
RUN = {
    "steps": 360,
    "sync_every": 30,
    "schedule.warmup_steps": 10,
    "evaluation.every_rounds": 3,
    "checkpoint.every_rounds": 2,
    "checkpoint.keep": 1,
}


def start(folder, config, workdir):
    """The trainer, and the file that it prints to."""
    flags = [
        f"--config.{key}={value}" for key, value in settings(folder, **RUN).items()
    ]
    out = folder / f"{workdir.name}.txt"
    with out.open("w") as stdout:
        process = subprocess.Popen(
            [
                sys.executable,
                "run.py",
                f"--config=configs/{config}.py",
                f"--workdir={workdir}",
                *flags,
            ],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=stdout,
            stderr=subprocess.STDOUT,
        )
    return process, out


def wait_for(process, condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, "it ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def half_saved(workdir):
    return list((workdir / "checkpoints").glob("*tmp*"))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["muloco", "diloco", "dp_muon"])
def test_a_process_may_be_killed_at_any_time(folder, config):
    """In compilation, in a round, while saving, and by SIGTERM; then it is the same."""
    whole, workdir = folder / f"{config}-whole", folder / f"{config}-killed"
    process, _ = start(folder, config, whole)
    assert process.wait(240) == 0

    process, out = start(folder, config, workdir)
    wait_for(process, lambda: "held out" in out.read_text())
    time.sleep(0.3)
    process.kill()
    process.wait()
    assert "round " not in out.read_text().split("held out")[1]
    assert checkpoint.saved_steps(workdir) == []

    process, out = start(folder, config, workdir)
    wait_for(process, lambda: "round  3/12" in out.read_text())
    process.kill()
    process.wait()
    assert "round 12/12" not in out.read_text()
    assert checkpoint.saved_steps(workdir)

    for _ in range(9):  # It must be hit while it saves.
        process, out = start(folder, config, workdir)
        before = checkpoint.saved_steps(workdir)
        wait_for(process, lambda: half_saved(workdir))
        process.kill()
        process.wait()
        if half_saved(workdir):
            break
    assert half_saved(workdir)
    assert checkpoint.saved_steps(workdir) >= before

    process, out = start(folder, config, workdir)
    resumed = checkpoint.saved_steps(workdir)[-1]
    wait_for(process, lambda: f"step {resumed + 30} " in out.read_text())
    process.terminate()
    assert process.wait(240) == 0
    assert "stopped and saved after step" in out.read_text().splitlines()[-1]

    process, _ = start(folder, config, workdir)
    assert process.wait(240) == 0
    assert_same_run(workdir, whole)


def test_a_second_signal_ends_at_once(folder):
    process, out = start(folder, "muloco", folder / "twice killed")
    wait_for(process, lambda: "held out" in out.read_text())
    process.send_signal(signal.SIGINT)
    wait_for(process, lambda: "once more to stop at once" in out.read_text())
    time.sleep(1)  # Those at once are taken for one.
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.wait(60) == 130
    assert time.monotonic() - began < 10
    assert checkpoint.saved_steps(folder / "twice killed") == []
