"""MuLoCo and DiLoCo in JAX: K workers train apart and synchronize every H steps."""

from muloco_jax import compress, fragments
from muloco_jax.algorithm import DiLoCo, DiLoCoState, WorkerState, diloco
from muloco_jax.coefficients import DION, JORDAN, POLAR_EXPRESS, POLAR_EXPRESS_8
from muloco_jax.compress import Reducer, all_reduce_mean, reducer
from muloco_jax.fragments import Segment
from muloco_jax.layouts import SplitDimensionNumbers
from muloco_jax.momentum import (
    adamw_rms,
    match_rms_adamw,
    scale_by_muon,
    spectral,
    width,
)
from muloco_jax.newton_schulz import orthogonalize
from muloco_jax.optimizers import STATIC_ARGS, Route, muon, routing_table
from muloco_jax.presets import (
    JORDAN_2024,
    MOONLIGHT,
    MOONLIGHT_UPDATE_NORM,
    OPTAX,
    PAPER,
)
from muloco_jax.routing import by_ndim, hidden_matrices, rules
from muloco_jax.workers import Workers

__all__ = [
    "DION",
    "JORDAN",
    "JORDAN_2024",
    "MOONLIGHT",
    "MOONLIGHT_UPDATE_NORM",
    "OPTAX",
    "PAPER",
    "POLAR_EXPRESS",
    "POLAR_EXPRESS_8",
    "STATIC_ARGS",
    "DiLoCo",
    "DiLoCoState",
    "Reducer",
    "Route",
    "Segment",
    "SplitDimensionNumbers",
    "WorkerState",
    "Workers",
    "adamw_rms",
    "all_reduce_mean",
    "by_ndim",
    "compress",
    "diloco",
    "fragments",
    "hidden_matrices",
    "match_rms_adamw",
    "muon",
    "orthogonalize",
    "reducer",
    "routing_table",
    "rules",
    "scale_by_muon",
    "spectral",
    "width",
]
