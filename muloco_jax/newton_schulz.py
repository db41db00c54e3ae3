"""The nearest orthogonal matrix, approximately, by matrix products alone.

Each iteration applies an odd polynomial `a s + b s^3 + c s^5` to the singular values
`s` of its input and leaves the singular vectors alone. A few of them bring all singular
values near one. This module hides how the input is normalized, which side is iterated
on, by which products, and in what precision.

References:
    Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon>`_, 2024
    Grishina et al., `CANS <https://arxiv.org/abs/2506.10935>`_, 2025 (Schatten norm)
    Boissin et al., `Turbo-Muon <https://arxiv.org/abs/2512.04632>`_, 2025 (AOL)
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from muloco_jax.coefficients import DION, CoefficientsLike, coefficients_of

Method = Literal["auto", "standard", "gram"]
Preconditioning = Literal["frobenius", "spectral", "schatten", "aol"]
HIGHEST = jax.lax.Precision.HIGHEST
_HIGHEST = (HIGHEST, "highest", "float32", (HIGHEST, HIGHEST))


def orthogonalize(
    x: jax.Array,
    coefficients: CoefficientsLike = DION,
    *,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = HIGHEST,
    eps: float = 0.0,
    method: Method = "auto",
    preconditioning: Preconditioning = "frobenius",
) -> jax.Array:
    """Approximates `U @ V.mT` where `x = U @ diag(s) @ V.mT`.

    The result does not depend on the scale of `x`. An all-zero matrix stays zero, and a
    NaN or an infinity turns its own matrix into NaN and no other.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.random.normal(jax.random.key(0), (3, 8, 32))
    >>> s = jnp.linalg.svd(orthogonalize(x), compute_uv=False)
    >>> bool((abs(s - 1) < 0.05).all())
    True

    Args:
        x: matrices `[..., m, n]`, real or complex; leading axes are a batch.
        coefficients: `(a, b, c)` per iteration.
        dtype: of the iteration. By default bfloat16 on accelerators, and on CPU (or of
            complex matrices) the dtype of `x`, but at least float32. Products
            accumulate in float32 at least.
        precision: of the matrix products.
        eps: added to the norm. Zero keeps the result free of scale.
        method: "standard" iterates on the matrix; "gram" on its Gram matrix `[m, m]`,
            which for five rows takes fewer operations from `n = 1.5 m` on, 56 percent
            at `n = 4 m`, but breaks down in bfloat16; "auto" takes it from `n = 2 m`
            on where it is safe.
        preconditioning: what brings singular values below one at first: "frobenius",
            "spectral" (by a decomposition) or "schatten" (of order 4) divide by that
            norm; "aol" divides each row by a bound of its own, which helps where rows
            differ much in size.

    Returns:
        Matrices of the shape and dtype of `x`, with singular values near one.

    Raises:
        ValueError: if `x` has fewer than two axes, or is not of an inexact dtype; for
            unknown names; for "gram" where it breaks down.
    """
    return orthogonalizer(
        coefficients,
        dtype=dtype,
        precision=precision,
        eps=eps,
        method=method,
        preconditioning=preconditioning,
    )(x)


def orthogonalizer(
    coefficients: CoefficientsLike = DION,
    *,
    steps: int | None = None,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = HIGHEST,
    eps: float = 0.0,
    method: Method = "auto",
    preconditioning: Preconditioning = "frobenius",
) -> Callable[[jax.Array], jax.Array]:
    """`orthogonalize` but for the matrices, with all else checked before there are any.

    Raises:
        ValueError: as `orthogonalize` does, but for what is wrong with matrices.
    """
    if not isinstance(eps, int | float | np.number) or not 0 <= eps < math.inf:
        raise ValueError(
            f"eps must be in [0, inf) and static, got {eps} (under "
            f"optax.inject_hyperparams pass static_args=mj.STATIC_ARGS)"
        )
    if preconditioning not in get_args(Preconditioning):
        raise ValueError(
            f"preconditioning must be one of {', '.join(get_args(Preconditioning))}; "
            f"got {preconditioning!r}"
        )
    coefficients = coefficients_of(coefficients, steps)
    restarts = lambda m, n, dtype: _restarts(
        method, m, n, len(coefficients.rows), dtype, precision
    )
    # Without asking for the backend, which must not start before it is configured.
    given = jnp.float32 if dtype is None else compute_dtype(jnp.float32, dtype)
    restarts(1, 1, jnp.dtype(given))

    def apply(x):
        shape, kind = jnp.shape(x), jnp.result_type(x)
        if len(shape) < 2 or not jnp.issubdtype(kind, jnp.inexact):
            raise ValueError(
                f"orthogonalize needs floating matrices [..., m, n], got {kind}{shape}"
            )
        inside = compute_dtype(kind, dtype)
        m, n = shape[-2:]
        tall = m > n  # Iterate on the smaller Gram matrix.
        y = _orthogonalize(
            x.mT.conj() if tall else x,
            coefficients,
            inside,
            precision,
            float(eps),
            restarts(min(m, n), max(m, n), inside),
            preconditioning,
        )
        return y.mT.conj() if tall else y

    return apply


def compute_dtype(dtype: DTypeLike, chosen: DTypeLike | None = None) -> jnp.dtype:
    """The dtype of the iteration for matrices of a dtype."""
    wide = jnp.promote_types(dtype, jnp.float32)
    is_complex = jnp.issubdtype(wide, jnp.complexfloating)
    if chosen is None or (
        is_complex and not jnp.issubdtype(chosen, jnp.complexfloating)
    ):
        on_cpu = jax.default_backend() == "cpu"
        return wide if on_cpu or is_complex else jnp.dtype(jnp.bfloat16)
    check_floating("the dtype of the iteration", chosen)
    return jnp.dtype(chosen)


def check_floating(what: str, dtype: DTypeLike) -> None:
    """Refuses a dtype of integers, or of fewer than 16 bits."""
    if not jnp.issubdtype(dtype, jnp.inexact) or jnp.dtype(dtype).itemsize < 2:
        raise ValueError(
            f"{what} must be a floating dtype of 16 bits or more, got "
            f"{jnp.dtype(dtype).name}"
        )


def wire_dtype(dtype: DTypeLike, chosen: DTypeLike | None = None) -> jnp.dtype:
    """What matrices may travel as: bfloat16, if the iteration rounds to it anyway."""
    bfloat16 = jnp.dtype(jnp.bfloat16)  # Which has the range of float32.
    rounds = dtype == jnp.float32 and compute_dtype(dtype, chosen) == bfloat16
    return bfloat16 if rounds else jnp.dtype(dtype)


def _restarts(
    method: Method, m: int, n: int, num_rows: int, dtype: DTypeLike, precision
) -> tuple[int, ...] | None:
    """The iterations at which `y` itself is updated; None for each, in half precision.

    Between them only its Gram matrix is, which loses small singular values, by an
    amount that grows with every iteration and with the rounding.

    Raises:
        ValueError: for an unknown method, or for "gram" where it breaks down.
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be 'auto', 'standard' or 'gram', got {method!r}")
    bits, half = jnp.finfo(dtype).bits, dtype == jnp.float16
    exact = bits == 64 or (bits == 32 and precision in _HIGHEST)
    # Rows that it stands, tried on spectra of all kinds: full, power-law, of rank one.
    most = 5 if half else 10 if exact else 0
    if method == "gram" and num_rows > most:
        raise ValueError(
            f"method='gram' with {num_rows} rows in {jnp.dtype(dtype)} at precision "
            f"{precision} diverges on gradients of low rank; use dtype float32 with "
            f"precision HIGHEST and up to 10 rows, float16 with up to 5, or "
            f"method='standard'"
        )
    pays = num_rows <= most and n >= 2 * m
    if method == "standard" or (method == "auto" and not pays):
        return tuple(range(1, num_rows)) if bits >= 32 else None
    if half:
        return (2,)
    return () if num_rows <= 5 else tuple(range(2, num_rows, 2))


# All but the matrices is static, so that matrices of one shape share one trace.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def _orthogonalize(x, coefficients, dtype, precision, eps, restarts, preconditioning):
    rows, safety = coefficients
    wide = jnp.promote_types(x.dtype, jnp.float32)
    accumulate = jnp.promote_types(dtype, jnp.float32)

    def product(a, b):
        c = jnp.matmul(a, b, precision=precision, preferred_element_type=accumulate)
        return c.astype(dtype)

    def times(scalar, a):  # A Python scalar alone would be rounded to bfloat16 first.
        return (scalar * a.astype(accumulate)).astype(dtype)

    if (rounded := wire_dtype(x.dtype, dtype)) != x.dtype:
        # As in the authors' code, and so that it is the same after it has travelled.
        # XLA might leave out a cast there and back.
        bits = jnp.finfo(rounded)
        x = jax.lax.reduce_precision(x, bits.nexp, bits.nmant)
    y = _normalize(x.astype(wide), safety, eps, dtype, preconditioning).astype(dtype)
    if restarts is None:  # Each operation is rounded as in the authors' code.
        for a, b, c in rows:
            gram = product(y, y.mT.conj())
            y = times(a, y) + product(times(b, gram) + times(c, product(gram, gram)), y)
    else:
        starts = (0, *restarts, len(rows))
        for start, stop in itertools.pairwise(starts):
            y = product(_polynomial(y, rows[start:stop], product, times), y)
    return y.astype(x.dtype)


def _polynomial(y, rows, product, times):
    """The polynomial of `y y*` by which some iterations multiply `y`.

    Each multiplies it by `p = a + b r + c r^2`, where `r = y y*`. All of these commute,
    so that the next `r` is `p r p`, and `y` itself is needed at the end alone.
    """
    r = product(y, y.mT.conj())
    one = jnp.broadcast_to(jnp.eye(r.shape[-1], dtype=r.dtype), r.shape)
    total = None
    for i, (a, b, c) in enumerate(rows):
        p = times(a, one) + times(b, r) + times(c, product(r, r))
        total = p if total is None else product(p, total)
        if i + 1 < len(rows):
            r = product(p, product(r, p))
    return total


def _normalize(x, safety, eps, dtype, preconditioning):
    """Brings singular values to one at most, free of under- and overflow."""
    # First by a power of two that brings extreme matrices to where their squares
    # neither over- nor underflow. It is exact, and so is its inverse.
    range_ = jnp.finfo(x.dtype).maxexp // 3
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    factor = jnp.where(largest > 2.0**range_, 4.0**-range_, 1)
    factor = jnp.where(largest < 2.0**-range_, 4.0**range_, factor)
    factor = factor.astype(largest.dtype)
    scaled, eps = factor * x, factor * eps
    norm = jnp.linalg.norm(scaled, axis=(-2, -1), keepdims=True)
    if preconditioning != "frobenius":
        norm *= _relative_norm(scaled / jnp.where(norm == 0, 1, norm), preconditioning)
    norm = safety * norm + eps
    # Rounded like all else, as in the reference.
    norm = norm.astype(jnp.finfo(dtype).dtype).astype(norm.dtype)
    return scaled / jnp.where(norm == 0, 1, norm)


def _relative_norm(x, preconditioning):
    """Of matrices whose Frobenius norm is one: that of each, or of each of its rows."""
    if preconditioning == "spectral":
        return jnp.linalg.norm(x, 2, axis=(-2, -1), keepdims=True)
    gram = jnp.matmul(x, x.mT.conj(), precision=HIGHEST)
    if preconditioning == "schatten":
        return jnp.sqrt(jnp.linalg.norm(gram, axis=(-2, -1), keepdims=True))
    return jnp.sqrt(jnp.abs(gram).sum(-1, keepdims=True))
