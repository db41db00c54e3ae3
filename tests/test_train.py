"""The trainer and its command line, on a small model."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import portpicker
import pytest
from small_run import settings, write_text

from configs import default
from muloco_jax import checkpoint, experiment, metrics, train, workdirs

ROOT = pathlib.Path(__file__).parent.parent
SIX_STEPS = {"steps": 6, "evaluation.every_rounds": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    write_text(folder)
    return folder


def run_in_process(folder, workdir, **others):
    config = default.get_config()
    config.update_from_flattened_dict(settings(folder, **SIX_STEPS | others))
    return config, train.train(config, experiment.build(config), str(workdir))


def command(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "run.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=240):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def flags(values):
    return [f"--config.{key}={value}" for key, value in values.items()]


def rows(workdir, event):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [row for line in lines if (row := json.loads(line))["event"] == event]


@pytest.fixture(scope="module")
def ran(folder):
    workdir = folder / "run"
    config, summary = run_in_process(folder, workdir)
    return config, summary, workdir


def test_a_run_leaves_its_configuration_metrics_and_summary(ran):
    config, summary, workdir = ran
    kept = json.loads((workdir / "config.json").read_text())
    assert kept == json.loads(config.to_json())  # Tuples are lists there.
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert [row["step"] for row in rows(workdir, "step")] == [1, 2, 3, 4, 5, 6]
    rounds = rows(workdir, "round")
    assert [row["step"] for row in rounds] == [2, 4, 6]
    # One warmup step of six, and then the cosine over the five that remain.
    cosine = [0.1 + 0.45 * (1 + np.cos(np.pi * t / 5)) for t in range(5)]
    rates = [row["learning_rate"] / 0.03 for row in rows(workdir, "step")]
    assert rates == pytest.approx([1.0, *cosine], rel=1e-6)
    assert ["eval_loss" in row for row in rounds] == [False, True, True]
    assert summary["eval_loss"] == rounds[-1]["eval_loss"]
    assert summary["tokens"] == 6 * 8 * 16
    assert summary["step"] == 6
    assert summary["wire_bytes_per_worker"] == 3 * (
        2 * 3 * 4 * summary["num_params"] // 4
    )


def test_the_trainer_does_what_the_algorithm_does(ran):
    """The same rounds by the library alone give the same losses and the same theta."""
    config, summary, workdir = ran
    built = experiment.build(config)
    algorithm = built.plan.algorithm
    state, losses = algorithm.init(built.plan.init()), []
    step_round = jax.jit(algorithm.round)
    for r in range(3):
        state, measured = step_round(state, built.batches(r))
        losses.append(np.asarray(measured["loss"]))
    expected = np.concatenate(losses, axis=1).T.tolist()
    assert [row["loss_per_worker"] for row in rows(workdir, "step")] == expected
    assert float(built.evaluate(state.params)) == summary["eval_loss"]
    # Of 1680 bytes and an end of text at each end, the last 5 percent are 83 and one.
    bits = summary["eval_loss"] * 84 / np.log(2) / 83
    assert summary["bits_per_byte"] == pytest.approx(bits)


def test_a_run_on_shards_knows_no_bytes(folder):
    (np.arange(400) % 7).astype("<u2").tofile(folder / "tokens.bin")
    data = {"format": "nanogpt", "path": str(folder / "tokens.bin"), "cache": ""}
    data["vocab_size"] = 7
    keys = {f"data.{key}": value for key, value in data.items()} | {"steps": 2}
    _, summary = run_in_process(folder, folder / "shards", **keys)
    assert np.isfinite(summary["eval_loss"])
    assert "bits_per_byte" not in summary


def test_a_workdir_that_cannot_be_one_is_refused(folder):
    for workdir, message in (
        (folder / "text.txt", "text.txt is a file; pass a folder"),
        (folder / "text.txt" / "run", "run cannot be written: Not a directory"),
    ):
        with pytest.raises(workdirs.RefusedError, match=message):
            run_in_process(folder, workdir)


def test_a_missing_package_is_an_error_of_one_sentence(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(workdirs.RefusedError, match=r"wandb is missing: pip install"):
        run_in_process(folder, folder / "missing", **{"logging.wandb": "project"})


def test_a_theta_that_is_not_finite_stops_even_the_last_round(folder):
    """No loss is bad then: only the outer step is."""
    rates = {"outer.learning_rate": 1e38, "steps": 2}
    with pytest.raises(metrics.DivergedError, match="outer step after step 2"):
        run_in_process(folder, folder / "theta", **rates)
    assert not (folder / "theta" / "summary.json").exists()


def test_an_evaluation_that_is_not_finite_stops_the_run(ran, folder):
    config, _, _ = ran
    built = experiment.build(config)
    broken = built._replace(evaluate=lambda params: jnp.float32(jnp.nan))
    with pytest.raises(metrics.DivergedError, match="eval_loss became nan"):
        train.train(config, broken, str(folder / "evaluation"))
    assert not (folder / "evaluation" / "summary.json").exists()


def test_a_run_that_diverges_stops_and_leaves_no_summary(folder):
    rates = {"inner.learning_rate": 1e30, "outer.learning_rate": 1e30}
    with pytest.raises(metrics.DivergedError, match=r"of worker \d became .* at step"):
        run_in_process(folder, folder / "diverged", **rates)
    assert not (folder / "diverged" / "summary.json").exists()
    assert (folder / "diverged" / "metrics.jsonl").exists()


def two_processes(workdir, *arguments):
    """Two processes of one run, with two devices each."""
    port = portpicker.pick_unused_port()
    return [
        command(
            *arguments,
            "--distributed",
            f"--coordinator=127.0.0.1:{port}",
            "--num_processes=2",
            f"--process_id={i}",
            f"--workdir={workdir}",
            JAX_NUM_CPU_DEVICES="2",
        )
        for i in range(2)
    ]


@pytest.mark.slow
def test_two_processes_train_as_one_does(folder):
    """Each owns half of the devices; the numbers differ by the order of sums.

    One of them is told to stop while it compiles. The other hears of it with the
    results of the first round, while the second runs: both save after that.
    """
    arguments = flags(
        settings(folder, **SIX_STEPS, **{"mesh.data": 2, "workers.num": 2})
    )
    alone, both = folder / "alone", folder / "both"
    code, out, err = finish(command(*arguments, f"--workdir={alone}"))
    assert (code, err) == (0, ""), err
    lines = out.splitlines()
    assert sum(line.startswith("round ") for line in lines) == 3
    assert lines[-1].startswith("eval_loss ")

    processes = two_processes(both, *arguments)
    for line in processes[0].stdout:
        if line.startswith("held out"):
            break
    time.sleep(1)
    processes[1].terminate()
    results = [finish(process) for process in processes]
    assert [code for code, _, _ in results] == [0, 0], results
    assert results[0][1].endswith(
        "stopped and saved after step 4; run it again to go on\n"
    )
    assert checkpoint.saved_steps(both) == [4]

    results = [finish(process) for process in two_processes(both, *arguments)]
    assert [code for code, _, _ in results] == [0, 0], results
    assert "resuming after step 4" in results[0][1]
    # Only process 0 speaks, besides the transport, whose lines run into each other.
    own = ("workdir", "model", "memory", "round", "held out", "eval_loss")
    assert [line for line in results[1][1].splitlines() if line.startswith(own)] == []
    one, two = (
        json.loads((workdir / "summary.json").read_text()) for workdir in (alone, both)
    )
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    for a, b in zip(rows(alone, "step"), rows(both, "step"), strict=True):
        assert b["loss_per_worker"] == pytest.approx(a["loss_per_worker"], rel=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--config.stepz=3"], "unknown key 'stepz'; did you mean 'steps'?"),
        (["--config.modle.width=3"], "unknown key 'modle'; did you mean 'model'?"),
        (["--config.inner.lr=3"], "no key 'lr'; configs/default.py lists all"),
        (["--config=no/such.py"], "there is no config file no/such.py"),
        (["--config.steps=many"], "--config.steps=many: invalid literal for int"),
        (["--workdr=x"], "Unknown command line flag 'workdr'. Did you mean: workdir"),
        (["tiny"], "unexpected argument 'tiny'"),
        (["--process_id=1"], "--process_id without --distributed has no effect"),
        (["--config.steps=70"], "steps=70 is not a multiple of sync_every=30"),
        (["--dry_run", "--eval_only"], "--dry_run and --eval_only exclude one another"),
        (["--eval_only"], "--eval_only needs the --workdir of a run"),
        (["--dry_run", "--profile=2"], "--profile=2 needs a run that trains"),
        (["--profile=-1"], "--profile=-1: .*-1 .* non-negative integer"),
        (["--eval_only", "--workdir=runs/none"], "no checkpoints in workdir runs/none"),
        (["--config.workers.num=0"], "workers.num must be at least 1, got 0"),
        (["--config.workers.num=3"], "batch_size=16 is not a multiple .* 15 or 18"),
        (["--config.mesh.workers=3"], "4 workers do not divide evenly .* 1, 2, 4"),
        (["--config.model.num_layers=0"], "model.num_layers must be positive, got 0"),
        (["--config.inner.name=moun"], "inner.name must be .* got 'moun'"),
        (["--workdir=README.md"], "workdir README.md is a file; pass a folder"),
        (
            ["--workdir=README.md/run"],
            "README.md/run cannot be written: Not a directory",
        ),
        (["--config.data.path=x"], "or set data.format to text or jsonl or nanogpt"),
    ],
)
def test_a_bad_command_line_is_answered_in_one_line(arguments, message):
    code, out, err = finish(command(*arguments))
    assert (code, out) == (1, "")
    assert err.startswith("run.py: ")
    assert len(err.splitlines()) == 1
    assert re.search(message, err), err


@pytest.mark.parametrize(
    "text, message",
    [
        ("c = default.get_config(); c.stepz = 3", "unknown key 'stepz'; did you mean"),
        ("c = default.get_config(); c.steps = '4'", "TypeError: .*'steps'"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("c = {'steps': 4}", "no ConfigDict in config file .*own.py"),
        ("from ml_collections import ConfigDict; c = ConfigDict({})", "no key 'seed'"),
        ("not a program", "SyntaxError: invalid syntax"),
    ],
)
def test_a_bad_config_file_is_answered_in_one_line(tmp_path, text, message):
    (tmp_path / "own.py").write_text(
        f"from configs import default\ndef get_config():\n    {text}\n    return c\n"
    )
    code, out, err = finish(command(f"--config={tmp_path / 'own.py'}"))
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert re.search(message, err), err


def test_help_says_how_to_run():
    code, out, err = finish(command("--help"))
    assert (code, err) == (0, "")
    assert "python run.py" in out


def test_a_dry_run_says_what_it_would_take_and_makes_nothing(tmp_path):
    """Of the paper's largest model, with neither its data nor its memory."""
    arguments = ("--config=configs/paper.py:15b,muloco,k16", "--dry_run")
    code, out, err = finish(command(*arguments, f"--workdir={tmp_path / 'run'}"))
    assert (code, err) == (0, "")
    assert "15,229,089,792 parameters" in out
    assert "36,330 one after another, in 1,211 rounds of 30" in out
    assert "per step 8,388,608, of each worker 524,288" in out
    # 2 * 15 / 16 of four bytes a parameter; theta is those four bytes.
    assert f"({2 * 15 * 4 * 15_229_089_792 // 16:,} bytes)" in out
    assert "theta 56.7 GiB, theta_k 56.7 GiB, inner state 61.1 GiB" in out
    assert re.search(
        r"^blocks/mlp/up/kernel +\(54, 4608, 12672\) +muon +1\.658", out, re.M
    )
    assert not (tmp_path / "run").exists()


def test_a_run_is_taken_up_and_evaluated_by_its_workdir_alone(folder, ran):
    """Without a --config the settings are those that the run was begun with."""
    _, summary, workdir = ran
    argument = f"--workdir={workdir}"
    code, out, err = finish(command(argument, "--eval_only"))
    assert (code, err) == (0, "")
    assert out == f"eval_loss {summary['eval_loss']:.4f} nats per token (" + (
        f"{summary['bits_per_byte']:.4f} bits per byte) after step 6\n"
    )
    code, out, err = finish(command(argument))
    assert (code, err) == (0, "")
    assert "resuming after step 6" in out
    code, out, err = finish(command(argument, "--config.inner.learning_rate=0.5"))
    assert code == 1
    assert re.fullmatch(
        r"run.py: .* inner\.learning_rate was 0\.03, is 0\.5; .*\n", err
    ), err
