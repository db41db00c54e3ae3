"""The notebooks run on a small run, and read from it what the trainer says of it."""

import json
import os
import pathlib

import nbclient
import nbformat
import pytest
from small_run import settings, write_text

from configs import default
from muloco_jax import experiment, train

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_stored_valid_and_without_outputs(name):
    notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), cell["id"]


def run_notebook(name, folder, expressions):
    """Runs a notebook in a folder; its outputs, and then what expressions are there."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    report = f"import json; print(json.dumps([{', '.join(expressions)}]))"
    notebook.cells.append(nbformat.v4.new_code_cell(report))
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return outputs[:-1], json.loads(outputs[-1].text)


@pytest.mark.slow
def test_a_run_is_read_as_its_summary_says(tmp_path, monkeypatch):
    write_text(tmp_path)
    config = default.get_config()
    others = {"steps": 6, "evaluation.every_rounds": 2}
    config.update_from_flattened_dict(settings(tmp_path, **others))
    runs = tmp_path / "runs"
    summary = train.train(config, experiment.build(config), str(runs / "small"))
    for name in ("older/summary.json", "unfinished/config.json"):
        (runs / name).parent.mkdir()
        (runs / name).write_text("{}")
    os.utime(runs / "older" / "summary.json", (0, 0))

    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    outputs, values = run_notebook(
        "read_a_run.ipynb",
        tmp_path,
        [
            "str(workdir)",
            "losses.shape",
            "tokens[-1]",
            "train_loss",
            "jump",
            "eval_losses[-1]",
            "np.isnan(eval_losses).tolist()",
            "sent[-1]",
            "cosine.tolist()",
        ],
    )
    lines = (runs / "small" / "metrics.jsonl").read_text().splitlines()
    _, second, round_1, third, fourth, round_2, fifth, _, round_3 = (
        json.loads(line) for line in lines
    )
    rises = third["loss"] - second["loss"], fifth["loss"] - fourth["loss"]
    assert values == [
        "runs/small",
        [6, 4],
        summary["tokens"],
        pytest.approx(summary["loss"], rel=1e-6),  # A mean of float32.
        pytest.approx(sum(rises) / 2, rel=1e-5),  # A difference of such.
        summary["eval_loss"],
        [True, False, False],
        summary["wire_bytes_per_worker"],
        [row["worker_cosine"] for row in (round_1, round_2, round_3)],
    ]
    # Nothing is printed to stderr, as warnings are.
    assert [out.name for out in outputs if "name" in out] == ["stdout", "stdout"]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 3
