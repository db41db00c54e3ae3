"""What is measured of a round.

The algorithm measures on the device, and without extra communication, one number per
worker and step, or per fragment. Here those become rows: plain dicts, which `writers`
write down.
"""

import concurrent.futures
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class DivergedError(RuntimeError):
    """A loss, a gradient, the outer step or an evaluation is no longer finite."""


def worker_cosine(delta_k_norm: np.ndarray, delta_norm: float) -> float:
    """Mean cosine between the deltas of two workers, over all pairs.

    Pairs count in proportion to the product of their norms, so that the mean needs
    nothing but norms: the sum over pairs of `<delta_j, delta_k>` is
    `K^2 |delta|^2 - sum_k |delta_k|^2`, with `delta` the mean over workers. For workers
    of equal norm it is the plain mean over pairs. A lossy mean adds its own error.

    >>> worker_cosine(np.array([3.0, 4.0]), delta_norm=2.5)  # A right angle.
    0.0

    Args:
        delta_k_norm: norm of each worker's delta, `[K]`.
        delta_norm: norm of their mean.

    Returns:
        A number in [-1, 1], up to rounding; NaN without two deltas that are not zero.
    """
    norms = np.asarray(delta_k_norm, np.float64)
    squares = np.sum(norms**2)
    pairs = np.sum(norms) ** 2 - squares
    if len(norms) < 2 or pairs == 0:
        return math.nan
    return float(((len(norms) * delta_norm) ** 2 - squares) / pairs)


# Device kinds are those that jax.experimental.pallas.tpu and the CUDA driver report.
# TPU: https://docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x. A chip is one
# device, but one of TPU7x, of 2307e12, is two. NVIDIA: the data sheets of A100, H100,
# H200 and HGX B200, without sparsity, which would double it.
_PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 operations per second that a device is sold for.

    >>> peak_flops("TPU v5 lite")
    197000000000000.0

    Args:
        device_kind: of a `jax.Device`.

    Returns:
        None for a device that is not in the table, as a share of a GPU is not.
    """
    return _PEAK_FLOPS.get(device_kind)


def check_finite(
    measured: Mapping[str, np.ndarray], step: int, eval_loss: float | None = None
) -> None:
    """Stops a run that has diverged.

    Args:
        measured: what `DiLoCo.round` returned, on the host.
        step: inner steps before that round.
        eval_loss: of theta after that round, if it was evaluated.

    Raises:
        DivergedError: naming the first step and worker with a number not finite, or
            the outer step, or the evaluation.
    """
    loss, grad_norm = measured["loss"], measured["grad_norm"]
    if len(bad := np.argwhere(~np.isfinite(loss + grad_norm).T)):
        inner, worker = bad[0]
        key, values = ("grad_norm", grad_norm)
        if not np.isfinite(loss[worker, inner]):
            key, values = ("loss", loss)
        raise DivergedError(
            f"{key} of worker {worker} became {values[worker, inner]} at step "
            f"{step + inner + 1}; lower the inner or the outer learning rate"
        )
    if not np.isfinite(measured["update_norm"]).all():
        raise DivergedError(
            f"the outer step after step {step + loss.shape[1]} is not finite; lower "
            f"the outer learning rate"
        )
    if eval_loss is not None and not math.isfinite(eval_loss):
        raise DivergedError(
            f"eval_loss became {eval_loss} after step {step + loss.shape[1]}; lower "
            f"the outer learning rate"
        )


def inner_rows(
    measured: Mapping[str, np.ndarray], step: int, learning_rates: np.ndarray
) -> list[dict[str, Any]]:
    """One row per inner step of a round.

    Args:
        measured: what `DiLoCo.round` returned, on the host.
        step: inner steps before the round.
        learning_rates: of the inner optimizer at each of its steps, `[H]`.
    """
    rows = []
    for i, learning_rate in enumerate(learning_rates):
        loss, grad_norm = measured["loss"][:, i], measured["grad_norm"][:, i]
        rows.append(
            {
                "event": "step",
                "step": step + i + 1,
                "loss": float(loss.mean()),
                "loss_min": float(loss.min()),
                "loss_max": float(loss.max()),
                "loss_per_worker": loss.tolist(),
                "grad_norm": float(grad_norm.mean()),
                "grad_norm_max": float(grad_norm.max()),
                "learning_rate": float(learning_rate),
            }
        )
    return rows


def round_row(
    measured: Mapping[str, np.ndarray], progress: Mapping[str, Any]
) -> dict[str, Any]:
    """The row of a round: how far the run is, and what the sync did.

    Fragments are pooled, as parts of one long vector.

    Args:
        measured: what `DiLoCo.round` returned, on the host.
        progress: further columns, which come first.
    """
    pool = lambda norms: np.sqrt(np.sum(np.square(norms, dtype=np.float64), axis=-1))
    delta_norm = float(pool(measured["delta_norm"]))
    delta_k_norm = pool(measured["delta_k_norm"])
    drift = delta_k_norm / pool(measured["theta_norm"])
    return {
        "event": "round",
        **progress,
        "loss": float(measured["loss"].mean()),
        "delta_norm": delta_norm,
        "delta_k_norm": float(delta_k_norm.mean()),
        "drift": float(drift.mean()),
        "drift_max": float(drift.max()),
        "worker_cosine": worker_cosine(delta_k_norm, delta_norm),
        "update_norm": float(pool(measured["update_norm"])),
    }


class Clock:
    """Times what a device does, which a host that dispatches ahead does not see."""

    def __init__(self, seconds: float = 0.0):
        """Starts at `seconds`, which a run has taken before it was resumed."""
        self._start = time.monotonic() - seconds
        self._free = time.monotonic()
        self._watcher = concurrent.futures.ThreadPoolExecutor(max_workers=1)

    def total(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def watch(self, result: Any) -> Callable[[], float]:
        """Watches an array just dispatched; the result waits for when it came."""

        def wait():
            result.block_until_ready()
            return time.monotonic()

        return self._watcher.submit(wait).result

    def round(self, began: float, ended: float) -> float:
        """The seconds of a round, dispatched at `began`, whose result came at `ended`.

        It had to wait for the round before, or for what was done after that.
        """
        seconds = ended - max(began, self._free)
        self._free = ended
        return seconds

    def busy_until(self, ended: float) -> None:
        """Something else, like an evaluation, kept the device from the next round."""
        self._free = ended
