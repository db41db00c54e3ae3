"""Coefficients of the Newton-Schulz iteration, and what makes a valid list of them.

References:
    Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon>`_, 2024
    Ahn et al., `Dion <https://arxiv.org/abs/2504.05295>`_, 2025
    Amsel et al., `The Polar Express <https://arxiv.org/abs/2505.16932>`_, 2025
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


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

# The list of the MuLoCo paper, by Jiacheng You; its code takes it from Dion (Ahn et
# al., 2025).
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

# Polar Express with a safety of 1e-2 in all rows but the last, as Emerging-Optimizers
# has it, and so many rows that singular values above 1e-3 of the norm come within a
# percent of one.
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
