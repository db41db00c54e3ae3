"""The nearest orthogonal matrix, approximately, by matrix products alone.

Each iteration applies an odd polynomial `a s + b s^3 + c s^5` to the singular values
`s` of its input and leaves the singular vectors alone. A few of them bring all singular
values near one. This module hides how the input is normalized, which side is iterated
on, by which products, and in what precision.

References:
    Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon>`_, 2024
    Amsel et al., `The Polar Express <https://arxiv.org/abs/2505.16932>`_, 2025
    Grishina et al., `CANS <https://arxiv.org/abs/2506.10935>`_, 2025 (Schatten norm)
    Boissin et al., `Turbo-Muon <https://arxiv.org/abs/2512.04632>`_, 2025 (AOL)
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Method = Literal["auto", "standard", "gram"]
Preconditioning = Literal["frobenius", "spectral", "schatten", "aol"]
HIGHEST = jax.lax.Precision.HIGHEST
_HIGHEST = (HIGHEST, "highest", "float32", (HIGHEST, HIGHEST))


class Coefficients(NamedTuple):
    """One row `(a, b, c)` per iteration, and the normalizer they were tuned for.

    Rows are tuned as a sequence: early ones lift small singular values, late ones
    settle them. They are never cut or reordered, and repeated only if all are equal.

    Attributes:
        rows: `(a, b, c)` per iteration.
        safety: the input is divided by `safety` times its norm.
    """

    rows: tuple[tuple[float, float, float], ...]
    safety: float = 1.0


# The original list (Jordan et al., 2024), also Moonlight's.
JORDAN = Coefficients(((3.4445, -4.7750, 2.0315),) * 5)

# The list of the MuLoCo paper, which its code takes from Dion (Ahn et al., 2025).
DION = Coefficients(
    (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )
)

# Polar Express (Amsel et al., 2025) with safety 2e-2 and cushion 2, which is folded
# into all rows but the last.
POLAR_EXPRESS = Coefficients(
    (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    safety=1.02,
)

# Polar Express with a safety of 1e-2 in all rows but the last, and so many of them that
# singular values above 1e-3 of the norm come within a percent of one.
POLAR_EXPRESS_8 = Coefficients(
    (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    )
)

_NAMES = {
    "jordan": JORDAN,
    "standard": JORDAN,  # As optax calls it.
    "dion": DION,
    "polar_express": POLAR_EXPRESS,
    "polar_express_8": POLAR_EXPRESS_8,
}

CoefficientsLike = Coefficients | str | Sequence[Sequence[float]] | Sequence[float]


def coefficients_of(
    coefficients: CoefficientsLike, steps: int | None = None
) -> Coefficients:
    """Checks a list of rows, and gives bare rows the plain normalizer.

    >>> coefficients_of((2.0, -1.5, 0.5), steps=2).rows
    ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5))

    Args:
        coefficients: a list, its name, rows, or one row to repeat `steps` times.
        steps: None, or the number of iterations, which a list already says.

    Raises:
        ValueError: if it is none of these, or a list has another number of rows.
    """
    whole = isinstance(steps, int | np.integer) and not isinstance(steps, bool)
    if steps is not None and not (whole and steps >= 1):
        raise ValueError(
            f"ns_steps must be a static int >= 1, got {steps!r} (under "
            f"optax.inject_hyperparams pass static_args=mj.STATIC_ARGS)"
        )
    if isinstance(coefficients, str):
        if coefficients not in _NAMES:
            raise ValueError(
                f"unknown ns_coeffs {coefficients!r}; use one of {', '.join(_NAMES)}, "
                f"or a list of rows (a, b, c)"
            )
        coefficients = _NAMES[coefficients]
    if not isinstance(coefficients, Coefficients):
        coefficients = Coefficients(_rows(coefficients, steps))
    rows = coefficients.rows
    if steps is None or steps == len(rows):
        return coefficients
    if len(set(rows)) > 1:
        raise ValueError(
            f"ns_steps is {steps}, but ns_coeffs has {len(rows)} rows; rows are tuned "
            f"as a sequence and cannot be cut or repeated: leave ns_steps out, or pass "
            f"a list of {steps} rows"
        )
    return coefficients._replace(rows=rows[:1] * int(steps))


def _rows(coefficients, steps):
    try:
        rows = tuple(coefficients)
        if steps is not None and len(rows) == 3 and not any(map(_is_sequence, rows)):
            rows = (rows,)
        rows = tuple((float(a), float(b), float(c)) for a, b, c in rows)
    except (TypeError, ValueError):
        rows = ()
    if not rows or not all(map(math.isfinite, sum(rows, ()))):
        raise ValueError(
            f"ns_coeffs must be JORDAN, DION, POLAR_EXPRESS, POLAR_EXPRESS_8, a list "
            f"of rows (a, b, c), one per iteration, or one row with ns_steps; got "
            f"{coefficients!r}"
        )
    return rows


def _is_sequence(x):
    return hasattr(x, "__len__") and jnp.ndim(x) > 0


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
    amount that grows with every iteration and with the rounding. Tried on spectra of
    all kinds (full, power-law, of rank one).

    Raises:
        ValueError: for an unknown method, or for "gram" where it breaks down.
    """
    bits, half = jnp.finfo(dtype).bits, dtype == jnp.float16
    exact = bits == 64 or (bits == 32 and precision in _HIGHEST)
    safe = (half and num_rows <= 5) or (exact and num_rows <= 10)
    if method == "standard" or (method == "auto" and not (safe and n >= 2 * m)):
        return tuple(range(1, num_rows)) if bits >= 32 else None
    if method not in ("auto", "gram"):
        raise ValueError(f"method must be 'auto', 'standard' or 'gram', got {method!r}")
    if not safe:
        raise ValueError(
            f"method='gram' with {num_rows} rows in {jnp.dtype(dtype)} at precision "
            f"{precision} diverges on gradients of low rank; use dtype float32 with "
            f"precision HIGHEST and up to 10 rows, float16 with up to 5, or "
            f"method='standard'"
        )
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
