"""Orthogonalized momentum, as an optax transformation.

This module hides the forms of momentum, the factors of a matrix's shape, and how the
matrices of a tree, however sharded, come to be orthogonalized once.

References:
    Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon>`_, 2024
    Liu et al., `Muon is Scalable for LLM Training <https://arxiv.org/abs/2502.16982>`_,
    2025 (Moonlight)
    Bernstein et al., `Old Optimizer, New Norm <https://arxiv.org/abs/2409.20325>`_,
    2024
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import DTypeLike

from muloco_jax import coefficients, newton_schulz, routing, sharded, tree, workers

PyTree = Any
Factor = Callable[[int, int], float]
Momentum = Literal["heavy_ball", "ema", "debiased"]
_NUMBER = int | float | np.number | np.ndarray | jax.Array


def spectral(fan_in: int, fan_out: int) -> float:
    """`sqrt(fan_out / fan_in)`: updates of unit RMS-to-RMS operator norm (the paper's).

    >>> spectral(64, 256)
    2.0
    """
    return math.sqrt(fan_out / fan_in)


def width(fan_in: int, fan_out: int) -> float:
    """`sqrt(max(1, fan_out / fan_in))` (Jordan et al., 2024).

    >>> width(64, 256), width(256, 64)
    (2.0, 1.0)
    """
    return math.sqrt(max(1.0, fan_out / fan_in))


def match_rms_adamw(fan_in: int, fan_out: int) -> float:
    """`0.2 sqrt(max(fan_in, fan_out))`: updates of RMS 0.2, like AdamW's.

    Moonlight, equation 4.

    >>> match_rms_adamw(25, 100)
    2.0
    """
    return 0.2 * math.sqrt(max(fan_in, fan_out))


def adamw_rms(fan_in: int, fan_out: int) -> float:
    """0.2 for all shapes: with `update_norm`, updates of exactly that RMS.

    Moonlight, section 2.2 ("Update Norm").
    """
    del fan_in, fan_out
    return 0.2


class MuonState(NamedTuple):
    """What Muon remembers.

    Attributes:
        count: updates so far, int32 [].
        mu: momentum, a tree like the parameters, of fixed dtype.
    """

    count: jax.Array
    mu: PyTree


def scale_by_muon(
    beta: optax.ScalarOrSchedule = 0.9,
    nesterov: bool = False,
    ns_coeffs: coefficients.CoefficientsLike = coefficients.DION,
    scale: Factor = spectral,
    *,
    ns_steps: int | None = None,
    eps: float = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_dimension_numbers: routing.Numbers = routing.hidden_matrices,
    momentum: Momentum = "heavy_ball",
    adaptive: bool = False,
    update_norm: bool = False,
    preconditioning: newton_schulz.Preconditioning = "frobenius",
    ns_dtype: DTypeLike | None = None,
    ns_precision: jax.lax.PrecisionLike = newton_schulz.HIGHEST,
    ns_method: newton_schulz.Method = "auto",
    ns_axes: str | Sequence[str] = (),
    specs: PyTree | None = None,
) -> optax.GradientTransformation:
    """Orthogonalized momentum, for trees whose leaves are all matrices.

    `scale(fan_in, fan_out) * orthogonalize(momentum)`. To leave out what is no matrix,
    use `muon`, or `optax.masked` or `optax.partition` around this. The arguments are
    those of `muon`, but that `muon_weight_dimension_numbers` is called
    `weight_dimension_numbers`, as in optax.

    Raises:
        ValueError: at construction for bad values; at `init` and `update` for a leaf
            that is no matrix, and for a mesh that lacks an axis.
    """
    if not callable(beta):
        check_range("beta", beta, 1)
        if hint := _rounded(beta):
            raise ValueError(f"beta has been rounded{hint}")
    check_flags(nesterov=nesterov, adaptive=adaptive, update_norm=update_norm)
    if adaptive and update_norm:
        raise ValueError(
            "adaptive and update_norm both say how large updates are: leave one out"
        )
    if momentum not in get_args(Momentum):
        raise ValueError(
            f"momentum must be one of {get_args(Momentum)}, got {momentum!r}"
        )
    if mu_dtype is not None:
        newton_schulz.check_floating("mu_dtype", mu_dtype)
    if not callable(scale):
        raise ValueError(
            f"scale must be a function of (fan_in, fan_out), as mj.spectral is; got "
            f"{scale!r}"
        )
    axes = (ns_axes,) if isinstance(ns_axes, str) else tuple(ns_axes or ())
    if len(set(axes)) < len(axes) or not all(isinstance(axis, str) for axis in axes):
        raise ValueError(f"ns_axes must be different names of mesh axes, got {axes}")
    if workers.AXIS in axes:
        raise ValueError(
            f"ns_axes must be axes inside a worker, got {axes}: along "
            f"{workers.AXIS!r} matrices are those of different workers"
        )
    orthogonalize = newton_schulz.orthogonalizer(
        ns_coeffs,
        steps=ns_steps,
        dtype=ns_dtype,
        precision=ns_precision,
        eps=eps,
        method=ns_method,
        preconditioning=preconditioning,
    )

    def direction(x):  # [..., m, n], before the factor.
        ortho = orthogonalize(x)
        total = lambda y: jnp.sum(y, (-2, -1), keepdims=True)
        if update_norm:
            square = total(jnp.abs(ortho) ** 2) / max(1, math.prod(x.shape[-2:]))
            ortho = ortho / jnp.sqrt(jnp.where(square == 0, 1, square))
        return total(x.conj() * ortho) * ortho if adaptive else ortho

    def init(params):
        _check_matrices(routing.route(weight_dimension_numbers, params))
        return MuonState(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(lambda x: _zeros(x, mu_dtype), params),
        )

    def update(updates, state, params=None):
        del params
        hint = ": if the parameters or their routing have changed, call init again"
        tree.check_like(updates, state.mu, "momenta", hint)
        leaves = routing.route(weight_dimension_numbers, updates)
        _check_matrices(leaves)
        decay = beta(state.count) if callable(beta) else beta
        mu, ahead = _momenta(momentum, nesterov, decay, state.count, updates, state.mu)
        directions = sharded.apply(
            direction,
            lambda fan_in, fan_out: factor(scale, fan_in, fan_out),
            jax.tree.leaves(ahead),
            leaves,
            specs=sharded.placements(specs, updates),
            axes=axes,
            wire_dtype=lambda dtype: newton_schulz.wire_dtype(dtype, ns_dtype),
        )
        directions = [
            x.astype(leaf.x.dtype) for x, leaf in zip(directions, leaves, strict=True)
        ]
        mu = jax.tree.map(lambda new, old: new.astype(old.dtype), mu, state.mu)
        return (
            jax.tree.structure(updates).unflatten(directions),
            MuonState(jnp.asarray(optax.safe_increment(state.count)), mu),
        )

    return optax.GradientTransformation(init, update)


def factor(scale: Factor, fan_in: int, fan_out: int) -> float:
    """The factor of a matrix; 1 for an empty one.

    Raises:
        ValueError: if it is known and not a finite number.
    """
    value = scale(fan_in, fan_out) if fan_in and fan_out else 1.0
    known = not isinstance(value, Tracer)
    if not isinstance(value, _NUMBER) or (known and not np.isfinite(value)):
        raise ValueError(
            f"scale({fan_in}, {fan_out}) must be a finite number, got {value}"
        )
    return value


def check_flags(**flags: Any) -> None:
    """Refuses what is no boolean, as the text "False", which would count as true."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(
                f"{name} must be True or False, got {value!r} (under "
                f"optax.inject_hyperparams pass static_args=mj.STATIC_ARGS)"
            )


def check_range(name: str, value: Any, below: float = math.inf) -> None:
    """Refuses a number outside [0, below); what is traced cannot be looked at."""
    if isinstance(value, Tracer):
        return
    if not isinstance(value, _NUMBER):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not 0 <= value < below:
        raise ValueError(
            f"{name} must be in [0, {below}), got {value}{_rounded(value)}"
        )


def _rounded(value):
    """What to do about a number that a cast to few bits may have spoiled."""
    dtype = getattr(value, "dtype", jnp.float32)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits >= 32:
        return ""
    return (
        f" in {dtype}: under optax.inject_hyperparams pass "
        f"static_args=mj.STATIC_ARGS or hyperparam_dtype=jnp.float32"
    )


def _momenta(form, nesterov, beta, count, updates, mu):
    """The new momentum, and the one to orthogonalize, in float32 at least."""
    wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
    fresh = 1 if form == "heavy_ball" else 1 - beta
    step = lambda m, g, new, old: new * fresh * wide(g) + old * beta * wide(m)
    mu = jax.tree.map(lambda m, g: step(m, g, 1, 1), mu, updates)
    # Of a mean over t steps with weights that sum to 1 - beta^t.
    weight = lambda t: 1 if form != "debiased" else 1 / (1 - beta**t)
    if not nesterov:
        return mu, jax.tree.map(lambda m: weight(count + 1) * m, mu)
    new, old = weight(count + 1), weight(count + 2)
    return mu, jax.tree.map(lambda m, g: step(m, g, new, old), mu, updates)


def _check_matrices(leaves):
    for leaf in leaves:
        if leaf.layout is None:
            raise ValueError(
                f"{leaf.path} with shape {leaf.x.shape} is no hidden matrix, so Muon "
                f"cannot take it; use muon(...), which gives it to Adam, or mask it out"
            )


def _zeros(x, dtype):
    """Zeros sharded like a parameter, in `jit` too, where constants are on no mesh."""
    zeros = jnp.zeros_like(x, dtype=dtype)
    if not isinstance(x, jax.Array):
        return zeros
    return jnp.where(jnp.zeros_like(x, bool), x.astype(zeros.dtype), zeros)
