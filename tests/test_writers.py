"""Where rows are written: files that strict parsers read, and what a resumed run keeps.

Weights & Biases is a fake that remembers its calls; the real package is large.
"""

import json
import math
import os
import runpy
import struct
import sys
import tracemalloc
import types

import pytest
from tensorboardX.proto import event_pb2

from muloco_jax import writers

ROWS = [
    {"event": "step", "step": 1, "loss": 2.5, "loss_per_worker": [2.0, 3.0]},
    {"event": "step", "step": 2, "loss": 1.5, "loss_per_worker": [1.0, math.nan]},
    {"event": "round", "step": 2, "loss": 2.0, "tokens": 64, "worker_cosine": math.nan},
]
# What of these is a number, by name and step.
SCALARS = {
    ("step/loss", 1): 2.5,
    ("step/loss_per_worker/0", 1): 2.0,
    ("step/loss_per_worker/1", 1): 3.0,
    ("step/loss", 2): 1.5,
    ("step/loss_per_worker/0", 2): 1.0,
    ("round/loss", 2): 2.0,
    ("round/tokens", 2): 64,
}


def write(writer, rows):
    writer.write(rows)
    writer.close()


def lines(steps):
    return "".join(f'{{"step": {step}}}\n' for step in steps)


def test_a_file_of_rows_is_strict_json(tmp_path):
    file = writers.JsonLines(tmp_path / "rows.jsonl", step=0)
    file.write([{"a": math.nan, "b": [1.5, math.nan]}, {"a": 1}])
    text = (tmp_path / "rows.jsonl").read_text()  # Before it is closed.
    file.close()
    refuse = lambda constant: pytest.fail(f"{constant} is no JSON")
    rows = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert rows == [{"a": None, "b": [1.5, None]}, {"a": 1}]


@pytest.mark.parametrize("cut", ["", '{"step": 3, "lo', '{"step": 2'])
@pytest.mark.parametrize(
    "step, kept", [(0, []), (1, [1, 1]), (2, [1, 1, 2]), (3, [1, 1, 2, 3])]
)
def test_a_resumed_file_holds_the_whole_rows_to_its_step(tmp_path, step, kept, cut):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines([1, 1, 2, 3]) + cut)
    write(writers.JsonLines(path, step), [{"step": step + 1}])
    assert path.read_text() == lines([*kept, step + 1])
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_without_rows_to_drop_is_not_touched(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines([1, 2]))
    before = path.stat()
    writers.JsonLines(path, step=2).close()
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert list(tmp_path.iterdir()) == [path]


def test_an_interruption_while_rows_are_dropped_loses_none(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines([1, 2, 3]))

    def replace(source, target):
        assert os.stat(source).st_size == len(lines([1, 2]))
        raise KeyboardInterrupt

    monkeypatch.setattr(writers.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        writers.JsonLines(path, step=2)
    assert path.read_text() == lines([1, 2, 3])
    assert list(tmp_path.iterdir()) == [path]


def test_rows_are_dropped_in_little_memory(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(range(1, 20_001)))
    tracemalloc.start()
    writers.JsonLines(path, step=10_000).close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.read_text() == lines(range(1, 10_001))
    assert peak < path.stat().st_size / 2


def shown(folder):
    """What TensorBoard shows of a folder: `(name, step) -> value`.

    A record is its length, a checksum, an event and a checksum. The start of a session
    hides what was written for its step and later.
    """
    values = {}
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[12 + length + 4 :]
            if event.HasField("session_log"):
                values = {key: x for key, x in values.items() if key[1] < event.step}
            for value in event.summary.value:
                values[value.tag, event.step] = value.simple_value
    return values


def test_tensorboard_gets_every_number_at_its_step(tmp_path):
    write(writers.TensorBoard(tmp_path, step=0), ROWS)
    assert shown(tmp_path) == SCALARS


def test_tensorboard_forgets_what_a_resumed_run_writes_again(tmp_path):
    """Both within the second that names the files."""
    write(writers.TensorBoard(tmp_path, step=0), ROWS)
    write(writers.TensorBoard(tmp_path, step=1), [ROWS[1] | {"loss": 1.25}])
    expected = {key: x for key, x in SCALARS.items() if not key[0].startswith("round")}
    assert shown(tmp_path) == expected | {("step/loss", 2): 1.25}
    assert len(list(tmp_path.iterdir())) == 2


class FakeRun:
    def __init__(self, **arguments):
        self.arguments, self.logged, self.metrics, self.finished = arguments, [], {}, 0
        self.id = arguments["id"] or f"id of {arguments['name']}"

    def define_metric(self, name, step_metric):
        self.metrics[name] = step_metric

    def log(self, data):
        self.logged.append(data)

    def finish(self):
        self.finished += 1


@pytest.fixture
def runs(monkeypatch):
    """The runs that a fake of the package wandb has started."""
    runs = []

    def init(**arguments):
        runs.append(FakeRun(**arguments))
        return runs[-1]

    fake = types.SimpleNamespace(init=init, Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return runs


def test_wandb_gets_the_configuration_and_every_number_beside_its_step(tmp_path, runs):
    config = {"steps": 4, "inner": {"name": "muon"}}
    write(writers.Wandb("plays", tmp_path, config, step=0), ROWS)
    (run,) = runs
    assert run.arguments == {
        "project": "plays",
        "name": tmp_path.name,
        "dir": str(tmp_path),
        "config": config,
        "id": None,
        "resume": "allow",
    }
    assert run.metrics == {"*": "step"}
    assert [data["step"] for data in run.logged] == [1, 2, 2]
    logged = {
        (name, data["step"]): value
        for data in run.logged
        for name, value in data.items()
    }
    assert {key: x for key, x in logged.items() if key[0] != "step"} == SCALARS
    assert run.finished == 1


def test_a_resumed_run_continues_its_run_of_wandb_and_a_new_one_does_not(
    tmp_path, runs
):
    (tmp_path / "wandb_id").write_text("older")
    for step in (2, 0, 1):
        write(writers.Wandb("plays", tmp_path, {}, step), [])
    assert [run.arguments["id"] for run in runs] == ["older", None, runs[1].id]


def test_a_refusal_by_wandb_is_told_and_leaves_no_file_open(
    tmp_path, runs, monkeypatch
):
    def refuse(**arguments):
        raise RuntimeError("no API key")

    closed = []
    for kind in (writers.JsonLines, writers.TensorBoard):
        close = lambda self, close=kind.close: (close(self), closed.append(type(self)))
        monkeypatch.setattr(kind, "close", close)
    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ValueError, match="wandb project 'plays': no API key"):
        writers.open_writers(
            tmp_path, tensorboard=True, wandb="plays", config={}, step=0
        )
    assert closed == [writers.TensorBoard, writers.JsonLines]


@pytest.mark.parametrize(
    "tensorboard, wandb, kinds",
    [
        (False, "", [writers.JsonLines]),
        (True, "", [writers.JsonLines, writers.TensorBoard]),
        (False, "plays", [writers.JsonLines, writers.Wandb]),
        (True, "plays", [writers.JsonLines, writers.TensorBoard, writers.Wandb]),
    ],
)
def test_writers_are_those_asked_for(tmp_path, runs, tensorboard, wandb, kinds):
    opened = writers.open_writers(
        tmp_path, tensorboard=tensorboard, wandb=wandb, config={}, step=0
    )
    for writer in opened:
        write(writer, ROWS)
    assert [type(writer) for writer in opened] == kinds
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(ROWS)
    assert shown(tmp_path) == (SCALARS if tensorboard else {})
    assert [run.arguments["project"] for run in runs] == ([wandb] if wandb else [])


@pytest.mark.parametrize(
    "package, extra, asked",
    [
        ("tensorboardX", "tensorboard", {"tensorboard": True, "wandb": ""}),
        ("wandb", "wandb", {"tensorboard": False, "wandb": "plays"}),
    ],
)
def test_a_package_is_missed_only_where_it_is_asked_for(
    tmp_path, monkeypatch, package, extra, asked
):
    monkeypatch.setitem(sys.modules, package, None)  # As if it were not installed.
    open_writers = runpy.run_path(writers.__file__)["open_writers"]
    nothing = {"tensorboard": False, "wandb": ""}
    for writer in open_writers(tmp_path, **nothing, config={}, step=0):
        writer.close()
    message = rf'{package} is missing: pip install "muloco_jax\[{extra}\]"'
    with pytest.raises(ValueError, match=message):
        open_writers(tmp_path, **asked, config={}, step=0)


def test_a_progress_line_says_when_theta_was_evaluated():
    row = {"round": 5, "step": 50, "loss": 2.0, "tokens_per_second": 100.0}
    line = writers.progress_text(row | {"eval_loss": 1.5}, 10, 3661)
    assert (
        line
        == "round  5/10  step 50  loss 2.000  eval 1.500  0.1k tokens/s  61:01 left"
    )
