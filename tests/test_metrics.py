"""What is measured: numbers by hand."""

import math
import threading
import time

import numpy as np
import pytest

from muloco_jax import metrics


def measured(loss=((1.0, 2.0), (3.0, 6.0)), grad_norm=((1.0, 1.0), (3.0, 5.0))):
    """Two workers, two steps; two fragments whose norms make right triangles."""
    return {
        "loss": np.array(loss),
        "grad_norm": np.array(grad_norm),
        "theta_norm": np.array([24.0, 7.0]),
        "delta_k_norm": np.array([[3.0, 4.0], [5.0, 12.0]]),
        "delta_norm": np.array([3.0, 4.0]),
        "update_norm": np.array([0.0, 2.0]),
    }


@pytest.mark.parametrize(
    "device_kind, teraflops",
    [
        ("TPU v4", 275),
        ("TPU v5 lite", 197),  # v5e
        ("TPU v5", 459),  # v5p
        ("TPU v6 lite", 918),  # v6e
        ("TPU7x", 1153.5),  # Two devices are a chip.
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
    ],
)
def test_the_peak_of_a_device_is_its_vendors(device_kind, teraflops):
    assert metrics.peak_flops(device_kind) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize("device_kind", ["cpu", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"])
def test_the_peak_of_other_devices_is_unknown(device_kind):
    assert metrics.peak_flops(device_kind) is None


def test_rows_of_steps_by_hand():
    first, second = metrics.inner_rows(measured(), 10, np.array([0.5, 0.25]))
    assert first == {
        "event": "step",
        "step": 11,
        "loss": 2.0,
        "loss_min": 1.0,
        "loss_max": 3.0,
        "loss_per_worker": [1.0, 3.0],
        "grad_norm": 2.0,
        "grad_norm_max": 3.0,
        "learning_rate": 0.5,
    }
    assert (second["step"], second["loss"], second["learning_rate"]) == (12, 4.0, 0.25)


def test_the_row_of_a_round_by_hand():
    """Pooled: theta 25, delta_k 5 and 13, delta 5: 4 * 25 - 25 - 169 over 2 * 65."""
    row = metrics.round_row(measured(), {"round": 3})
    assert row == {
        "event": "round",
        "round": 3,
        "loss": 3.0,
        "delta_norm": 5.0,
        "delta_k_norm": 9.0,
        "drift": pytest.approx(0.36),
        "drift_max": 0.52,
        "worker_cosine": pytest.approx(-94 / 130),
        "update_norm": 2.0,
    }


@pytest.mark.parametrize("num", [2, 3, 7])
def test_the_cosine_of_workers_is_that_of_all_pairs(num):
    """Of vectors of one norm the plain mean, of others that weighted by their norms."""
    random = np.random.default_rng(num)
    deltas = random.standard_normal((num, 20))
    for vectors in (deltas / np.linalg.norm(deltas, axis=1, keepdims=True), deltas):
        norms = np.linalg.norm(vectors, axis=1)
        pairs = ~np.eye(num, dtype=bool)
        cosines = (vectors @ vectors.T / np.outer(norms, norms))[pairs]
        expected = np.average(cosines, weights=np.outer(norms, norms)[pairs])
        mean = np.linalg.norm(vectors.mean(0))
        assert metrics.worker_cosine(norms, mean) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("norms", [[2.0], [0.0, 0.0]])
def test_without_two_deltas_there_is_no_cosine(norms):
    assert math.isnan(metrics.worker_cosine(np.array(norms), 1.0))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_a_run_that_diverged_is_stopped_at_its_first_step_and_worker(key, bad):
    values = ((1.0, 2.0, bad), (1.0, bad, bad), (1.0, 2.0, bad))
    both = measured(np.ones((3, 3)), np.ones((3, 3))) | {key: np.array(values)}
    with pytest.raises(metrics.DivergedError, match=f"{key} of worker 1 .* step 32"):
        metrics.check_finite(both, step=30)


def test_the_first_of_several_bad_numbers_is_named():
    loss, norms = np.ones((2, 3)), np.ones((2, 3))
    loss[0, 2], norms[1, 1] = np.nan, np.inf
    with pytest.raises(metrics.DivergedError, match=r"grad_norm of worker 1 .* step 2"):
        metrics.check_finite(measured(loss, norms), step=0)


def test_an_outer_step_that_is_not_finite_stops_the_run():
    norms = {"update_norm": np.array([1.0, np.nan])}
    with pytest.raises(metrics.DivergedError, match="outer step after step 12"):
        metrics.check_finite(measured() | norms, step=10)


def test_finite_numbers_pass():
    metrics.check_finite(measured(), step=0)


def test_a_round_is_timed_from_when_the_device_was_free(monkeypatch):
    """Rounds dispatched at 1, 2, 30; results at 11, 19, 33; an evaluation until 14.

    The first took ten. The second waited for the evaluation and took five. The third
    found the device idle.
    """
    monkeypatch.setattr(metrics.time, "monotonic", lambda: 0.0)
    clock = metrics.Clock()
    assert clock.round(began=1.0, ended=11.0) == 10.0
    clock.busy_until(14.0)
    assert clock.round(began=2.0, ended=19.0) == 5.0
    assert clock.round(began=30.0, ended=33.0) == 3.0


def test_a_clock_goes_on_from_where_a_run_was_stopped(monkeypatch):
    now = iter([100.0, 100.0, 107.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    assert metrics.Clock(seconds=30.0).total() == 37.0


def test_watching_tells_when_a_result_came():
    came = threading.Event()

    class Result:
        block_until_ready = staticmethod(came.wait)

    clock = metrics.Clock()
    before = time.monotonic()
    when = clock.watch(Result)
    time.sleep(0.05)  # The host is elsewhere.
    came.set()
    assert 0.05 <= when() - before < 5
