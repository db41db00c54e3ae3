"""The nearest orthogonal matrix, approximately, by matrix products alone.

Each iteration applies an odd polynomial `a s + b s^3 + c s^5` to the singular values
`s` of its input and leaves the singular vectors alone. A few of them bring all singular
values near one. This module hides how the input is normalized, which side is iterated
on, and in what precision.

References:
    Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon>`_, 2024
    Amsel et al., `The Polar Express <https://arxiv.org/abs/2505.16932>`_, 2025
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Coefficients(NamedTuple):
    """One row `(a, b, c)` per iteration, and the normalizer they were tuned for.

    Rows are tuned as a sequence: early ones lift small singular values, late ones
    settle them. They are never cut, repeated or reordered.

    Attributes:
        rows: `(a, b, c)` per iteration.
        safety: the input is divided by `safety` times its Frobenius norm.
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


def coefficients_of(
    coefficients: Coefficients | Sequence[Sequence[float]],
) -> Coefficients:
    """Checks a list of rows, and gives bare rows the plain Frobenius normalizer.

    Raises:
        ValueError: if it is not a non-empty sequence of rows of three numbers.
    """
    if isinstance(coefficients, Coefficients):
        return coefficients
    try:
        rows = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    except (TypeError, ValueError):
        rows = ()
    if not rows:
        raise ValueError(
            f"coefficients must be JORDAN, DION, POLAR_EXPRESS or a list of rows "
            f"(a, b, c), one per iteration; got {coefficients!r}"
        )
    return Coefficients(rows)


def orthogonalize(
    x: jax.Array,
    coefficients: Coefficients | Sequence[Sequence[float]] = DION,
    *,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = jax.lax.Precision.HIGHEST,
    eps: float = 0.0,
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
        x: matrices `[..., m, n]`; leading axes are a batch.
        coefficients: `(a, b, c)` per iteration.
        dtype: of the iteration. By default bfloat16 on accelerators, and on CPU the
            dtype of `x`, but at least float32. Products accumulate in float32 at least.
        precision: of the matrix products.
        eps: added to the Frobenius norm. Zero keeps the result free of scale.

    Returns:
        Matrices of the shape and dtype of `x`, with singular values near one.

    Raises:
        ValueError: if `x` has fewer than two axes, or is not of a floating dtype.
    """
    rows, safety = coefficients_of(coefficients)
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"orthogonalize needs floating matrices [..., m, n], got {x.dtype}{x.shape}"
        )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if dtype is None:
        dtype = wide if jax.default_backend() == "cpu" else jnp.bfloat16
    dtype = jnp.dtype(dtype)
    accumulate = jnp.promote_types(dtype, jnp.float32)

    def product(a, b):
        c = jnp.matmul(a, b, precision=precision, preferred_element_type=accumulate)
        return c.astype(dtype)

    def times(scalar, a):  # A Python scalar alone would be rounded to bfloat16 first.
        return (scalar * a.astype(accumulate)).astype(dtype)

    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x  # Iterate on the smaller Gram matrix.
    y = _normalize(y.astype(wide), safety, eps, dtype).astype(dtype)
    for a, b, c in rows:
        gram = product(y, y.mT)
        y = times(a, y) + product(times(b, gram) + times(c, product(gram, gram)), y)
    return (y.mT if tall else y).astype(x.dtype)


def _normalize(x, safety, eps, dtype):
    """Divides each matrix by `safety` times its norm, free of under- and overflow."""
    # First by a power of two near the largest entry, which is exact; in two halves,
    # since that power may itself be out of range.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    _, exponent = jnp.frexp(largest)
    shrink = lambda a: jnp.ldexp(
        jnp.ldexp(a, -(exponent // 2)), exponent // 2 - exponent
    )
    scaled, eps = shrink(x), shrink(jnp.full_like(largest, eps))
    norm = safety * jnp.linalg.norm(scaled, axis=(-2, -1), keepdims=True) + eps
    norm = norm.astype(dtype).astype(
        x.dtype
    )  # Rounded like all else, as in the reference.
    return scaled / jnp.where(largest == 0, 1, norm)
