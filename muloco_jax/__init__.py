"""MuLoCo and DiLoCo in JAX: K workers train apart and synchronize every H steps."""

from muloco_jax import compress, fragments
from muloco_jax.algorithm import DiLoCo, DiLoCoState, WorkerState, diloco
from muloco_jax.compress import Reducer, all_reduce_mean, reducer
from muloco_jax.fragments import Segment
from muloco_jax.newton_schulz import DION, JORDAN, POLAR_EXPRESS, orthogonalize
from muloco_jax.optimizers import (
    hidden_matrices,
    match_rms_adamw,
    muon,
    routing_table,
    scale_by_muon,
    spectral,
    width,
)
from muloco_jax.workers import Workers

__all__ = [
    "DION",
    "JORDAN",
    "POLAR_EXPRESS",
    "DiLoCo",
    "DiLoCoState",
    "Reducer",
    "Segment",
    "WorkerState",
    "Workers",
    "all_reduce_mean",
    "compress",
    "diloco",
    "fragments",
    "hidden_matrices",
    "match_rms_adamw",
    "muon",
    "orthogonalize",
    "reducer",
    "routing_table",
    "scale_by_muon",
    "spectral",
    "width",
]
