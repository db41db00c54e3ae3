"""Orthogonalization: golden numbers, and what holds for every matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import wave
from problem import assert_near

import muloco_jax as mj

LISTS = {
    "jordan": mj.JORDAN,
    "dion": mj.DION,
    "polar_express": mj.POLAR_EXPRESS,
    "polar_express_8": mj.POLAR_EXPRESS_8,
}
# The extreme singular values that a list reaches from a Gaussian matrix of 1:4, and
# from one whose singular values fall from 1 to 1e-3 evenly in their logarithm.
BOUNDS = {
    "jordan": {"gauss": (0.68, 1.14), "spectrum": (0.10, 1.21)},
    "dion": {"gauss": (0.96, 1.04), "spectrum": (0.10, 1.15)},
    "polar_express": {"gauss": (0.85, 1.15), "spectrum": (0.20, 1.15)},
    "polar_express_8": {"gauss": (0.99, 1.01), "spectrum": (0.90, 1.01)},
}


def singular_values(x):
    return np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)


def gaussian(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize(
    "shape, expected",
    [
        (
            (16, 16),
            [
                *(1.012, 1.0033, 0.9891, 0.9787, 0.5029, 0.487, 0.4159, 0.37),
                *(0.3421, 0.2577, 0.2398, 0.1977, 0.1524, 0.1084, 0.0768, 0.0328),
            ],
        ),
        ((8, 24), [1.0235, 1.0182, 1.0112, 1.0016, 0.624, 0.5645, 0.3398, 0.3194]),
    ],
)
def test_bfloat16_rounds_where_the_authors_code_does(shape, expected):
    """All but four singular values of these inputs of rank four are rounding noise.

    The iteration blows it up. They come out equal only if every single operation rounds
    as in the authors' code: the input too, and each operation by itself. Under `jit`
    XLA keeps more bits between operations, which is more accurate, but not equal.
    """
    with jax.disable_jit():
        y = mj.orthogonalize(
            jnp.bfloat16(wave(shape, 1.0)), mj.DION, dtype=jnp.bfloat16
        )
    np.testing.assert_allclose(singular_values(y), expected, rtol=0, atol=2e-3)


def spectrum(m, n):
    """Singular values from 1 to 1e-3."""
    left, _ = np.linalg.qr(gaussian(m, m))
    right, _ = np.linalg.qr(gaussian(n, m, seed=1))
    return jnp.asarray((left * np.logspace(0, -3, m)) @ right.T, jnp.float32)


def low_rank(m, n, rank):
    return gaussian(m, rank) @ gaussian(rank, n, seed=1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["gauss", "spectrum"])
@pytest.mark.parametrize("name", LISTS)
def test_singular_values_come_near_one(name, kind, dtype):
    x = gaussian(64, 256) if kind == "gauss" else spectrum(64, 256)
    found = singular_values(mj.orthogonalize(x, LISTS[name], dtype=dtype))
    low, high = BOUNDS[name][kind]
    slack = 0.05 if dtype == jnp.bfloat16 else 0  # Which has 8 bits.
    assert low - slack < found.min()
    assert found.max() < high + slack


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("kind", ["gauss", "spectrum", "rank 1", "rank 8", "ones"])
def test_the_gram_iteration_is_the_standard_one(name, kind):
    """In exact arithmetic; in float32 up to what the iteration makes of rounding."""
    x = {
        "gauss": gaussian(48, 192),
        "spectrum": spectrum(48, 192),
        "rank 1": low_rank(48, 192, 1),
        "rank 8": low_rank(48, 192, 8),
        "ones": jnp.ones((48, 192), jnp.float32),
    }[kind]
    both = lambda x: [
        mj.orthogonalize(x, LISTS[name], method=method)
        for method in ("standard", "gram")
    ]
    standard, gram = both(x)
    # Directions that the input has not start at 1e-7 and are blown up 500-fold or, by
    # eight rows, 5000-fold; what has started above 1e-3 agrees to the last bits.
    atol = 5e-3 if name == "polar_express_8" else 3e-4
    assert_near(gram, standard, atol=atol)
    # The cancellation in 1e-3 of the norm squared leaves float64 1e-10.
    assert_near(*both(jnp.asarray(x, jnp.float64)), atol=1e-8)


def test_the_gram_iteration_in_float16_is_as_good_as_in_float32():
    x = gaussian(64, 256)
    half = mj.orthogonalize(x, method="gram", dtype=jnp.float16)
    assert 0.96 < singular_values(half).min() <= singular_values(half).max() < 1.04
    half = mj.orthogonalize(low_rank(64, 256, 8), method="gram", dtype=jnp.float16)
    assert singular_values(half).max() < 1.04


def num_products(**keywords):
    text = jax.jit(lambda x: mj.orthogonalize(x, **keywords)).lower(
        jax.ShapeDtypeStruct((16, 64), jnp.float32)
    )
    sizes = [line for line in text.as_text().splitlines() if "dot_general" in line]
    return sum("x64xf" in line or "x64xbf" in line for line in sizes)


@pytest.mark.parametrize(
    "keywords, gram",
    [
        ({}, True),
        ({"dtype": jnp.bfloat16}, False),
        ({"dtype": jnp.float16}, True),
        ({"precision": jax.lax.Precision.DEFAULT}, False),
        ({"precision": "highest"}, True),
        ({"coefficients": mj.POLAR_EXPRESS_8}, True),
        ({"coefficients": [(2.0, -1.5, 0.5)] * 11}, False),
        ({"coefficients": mj.POLAR_EXPRESS_8, "dtype": jnp.float16}, False),
        ({"method": "standard"}, False),
    ],
)
def test_wide_matrices_are_done_by_their_gram_matrix_where_that_is_safe(keywords, gram):
    """So fewer products are of `[m, n]`: two an iteration in the standard one."""
    rows = keywords.get("coefficients", mj.DION)
    rows = len(rows.rows if isinstance(rows, tuple) else rows)
    standard = 2 * rows
    assert (num_products(**keywords) < standard) == gram


@pytest.mark.parametrize(
    "keywords",
    [
        {"dtype": jnp.bfloat16},
        {"dtype": jnp.float16, "coefficients": mj.POLAR_EXPRESS_8},
        {"precision": jax.lax.Precision.DEFAULT},
        {"coefficients": [(2.0, -1.5, 0.5)] * 11},
    ],
)
def test_the_gram_iteration_is_refused_where_it_breaks_down(keywords):
    with pytest.raises(ValueError, match="gradients of low rank; use dtype float32"):
        mj.orthogonalize(gaussian(4, 16), method="gram", **keywords)


@pytest.mark.parametrize(
    "keywords, match",
    [
        ({"method": "newton"}, "method must be 'auto', 'standard' or 'gram'"),
        ({"preconditioning": "aols"}, "must be one of frobenius, spectral, schatten"),
        ({"dtype": jnp.int32}, "floating dtype of 16 bits or more"),
        ({"dtype": jnp.float8_e4m3fn}, "floating dtype of 16 bits or more"),
        ({"eps": -1.0}, r"eps must be in \[0, inf\)"),
        ({"eps": "small"}, r"eps must be in \[0, inf\)"),
        ({"eps": float("nan")}, r"eps must be in \[0, inf\)"),
    ],
)
def test_names_and_numbers_that_there_are_not_are_refused(keywords, match):
    with pytest.raises(ValueError, match=match):
        mj.orthogonalize(gaussian(2, 2), **keywords)


PRECONDITIONINGS = ["frobenius", "spectral", "schatten", "aol"]


@pytest.mark.parametrize(
    "preconditioning, cosine",
    [("frobenius", 0.823), ("spectral", 0.900), ("schatten", 0.873), ("aol", 0.998)],
)
def test_preconditioning_helps_where_rows_differ_in_size(preconditioning, cosine):
    """The cosine between the result and the polar factor, for row sizes 1 to 1e-4."""
    x = gaussian(256, 1024) * np.logspace(0, -4, 256)[:, None]
    y = np.asarray(mj.orthogonalize(x, preconditioning=preconditioning), np.float64)
    u, _, vh = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    found = (y * (u @ vh)).sum() / np.linalg.norm(y) / np.linalg.norm(u @ vh)
    assert found == pytest.approx(cosine, abs=5e-3)


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
def test_preconditioning_brings_singular_values_to_one_at_most(preconditioning):
    """With the identity for a list, what is left is the first step."""
    x = gaussian(3, 8, 24, dtype=jnp.float64)
    y = mj.orthogonalize(x, [(1.0, 0.0, 0.0)], preconditioning=preconditioning)
    assert singular_values(y).max() <= 1 + 1e-12
    if preconditioning == "spectral":
        assert_near(singular_values(y).max(-1), np.ones(3))
    if preconditioning == "schatten":
        assert_near((singular_values(y) ** 4).sum(-1), np.ones(3))
    if preconditioning == "frobenius":
        assert_near((singular_values(y) ** 2).sum(-1), np.ones(3))


def test_a_row_repeats_as_often_as_one_says():
    row = (2.0, -1.5, 0.5)
    x = gaussian(4, 6, dtype=jnp.float64)
    many = mj.muon(1.0, ns_coeffs=row, ns_steps=12, scale=lambda *_: 1.0)
    updates, _ = many.update({"w": x}, many.init({"w": x}))
    assert_near(-updates["w"], mj.orthogonalize(x, [row] * 12))
    jordan = mj.muon(1.0, ns_coeffs="jordan", ns_steps=7, scale=lambda *_: 1.0)
    updates, _ = jordan.update({"w": x}, jordan.init({"w": x}))
    assert_near(-updates["w"], mj.orthogonalize(x, mj.JORDAN.rows[:1] * 7))


def test_rotations_of_the_input_are_rotations_of_the_result():
    x = gaussian(8, 24)
    left, _ = np.linalg.qr(gaussian(8, 8, seed=1))
    right, _ = np.linalg.qr(gaussian(24, 24, seed=2))
    # Of entries of about 0.2 in float32, whose rounding the iteration multiplies.
    assert_near(
        mj.orthogonalize(left @ x @ right),
        left @ np.asarray(mj.orthogonalize(x)) @ right,
        atol=2e-5,
    )


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
@pytest.mark.parametrize("shape", [(6, 24), (24, 6)])
def test_complex_matrices_are_orthogonalized_too(shape, preconditioning):
    """A complex matrix is real in a basis of its own: A + iB as [[A, -B], [B, A]]."""
    a, b = gaussian(2, *shape, dtype=jnp.float64)
    y = mj.orthogonalize(
        a + 1j * b, mj.POLAR_EXPRESS_8, preconditioning=preconditioning
    )
    assert y.dtype == jnp.complex128
    u, _, vh = np.linalg.svd(np.asarray(a + 1j * b), full_matrices=False)
    assert_near(y, u @ vh, atol=2e-2)  # As near as the list comes.
    if preconditioning == "frobenius":
        block = mj.orthogonalize(
            jnp.block([[a, -b], [b, a]]),
            mj.POLAR_EXPRESS_8._replace(safety=2**-0.5),  # Each value is there twice.
        )
        assert_near(block[: shape[0], : shape[1]], y.real, atol=1e-10)


@pytest.mark.parametrize(
    "name, expected",
    [
        (
            "jordan",
            [1.110357, 0.698917, 1.122332, 0.71212, 1.079592, 0.722876, 0.696436],
        ),
        ("dion", [1.075139, 1.018025, 0.985689, 1.01905, 0.996224, 1.018629, 0.978346]),
        (
            "polar_express",
            [0.979348, 0.996775, 1.108276, 1.016459, 1.129064, 0.946788, 0.903537],
        ),
        (
            "polar_express_8",
            [1.000000, 1.000000, 1.000000, 1.000000, 1.000000, 1.000000, 1.000000],
        ),
    ],
)
def test_every_digit_of_the_lists_is_that_of_their_sources(name, expected):
    """What singular values become, computed from the printed lists without the library.

    A matrix of norm one has a given value s and sqrt(1 - s^2).
    """
    s = np.array([0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0])
    x = jnp.stack([jnp.diag(jnp.array([a, np.sqrt(1 - a * a)])) for a in s])
    assert_near(mj.orthogonalize(x, LISTS[name])[:, 0, 0], expected, atol=1e-6)


def test_every_digit_of_polar_express_8_is_that_of_its_source():
    """Of values so small that eight rows do not bring them all to one."""
    s = np.array([1e-6, 1e-5, 3e-5, 1e-4, 2e-4, 3e-4, 6e-4])
    x = jnp.stack([jnp.diag(jnp.array([a, np.sqrt(1 - a * a)])) for a in s])
    expected = [0.006363, 0.063567, 0.189093, 0.574718, 0.888890, 0.983022, 0.999998]
    found = mj.orthogonalize(x, mj.POLAR_EXPRESS_8)[:, 0, 0]
    assert_near(found, expected, atol=1e-6)


def test_singular_vectors_stay():
    x = gaussian(8, 32, dtype=jnp.float64)
    u, _, vh = np.linalg.svd(x, full_matrices=False)
    rotated = u.T @ np.asarray(mj.orthogonalize(x)) @ vh.T
    assert_near(rotated, np.diag(np.diag(rotated)))


def test_one_row_is_its_polynomial():
    """By hand: diag(3, 4) has norm 5, so s = 0.6, 0.8, and f(s) = 2 s - s^3 + s^5."""
    y = mj.orthogonalize(jnp.diag(jnp.array([3.0, 4.0])), [(2.0, -1.0, 1.0)])
    f = lambda s: 2 * s - s**3 + s**5
    assert_near(y, np.diag([f(0.6), f(0.8)]), atol=1e-14)


def test_the_normalizer_of_a_list_divides_the_input():
    """By hand: of one entry the norm is itself, so with safety 1.02 s = 1 / 1.02."""
    row = mj.POLAR_EXPRESS._replace(rows=((2.0, -1.0, 1.0),))
    s = 1 / 1.02
    y = mj.orthogonalize(jnp.array([[7.0]]), row)
    assert_near(y, [[2 * s - s**3 + s**5]], atol=1e-14)


def test_a_batch_is_its_matrices_one_by_one():
    x = gaussian(2, 3, 8, 12)
    y = mj.orthogonalize(x)
    for i, j in np.ndindex(2, 3):
        assert_near(y[i, j], mj.orthogonalize(x[i, j]), atol=1e-6)


def test_tall_is_the_transpose_of_wide():
    x = gaussian(24, 8)
    np.testing.assert_array_equal(mj.orthogonalize(x), mj.orthogonalize(x.T).T)


# Subnormal numbers count as zero: so that there are none, entries are at least half of
# the largest.
@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
@pytest.mark.parametrize(
    "exponent", [-37, -35, -30, -20, -13, -8, 8, 12, 13, 20, 30, 38]
)
def test_the_result_is_free_of_scale(exponent, preconditioning):
    x = gaussian(8, 24)
    x = jnp.sign(x) * (1 + jnp.abs(x) / abs(x).max())
    scaled = jnp.float32(
        np.asarray(x, np.float64) * 10.0**exponent / float(abs(x).max())
    )
    fn = functools.partial(mj.orthogonalize, preconditioning=preconditioning)
    assert_near(jax.jit(fn)(scaled), fn(x), atol=1e-5)


@pytest.mark.parametrize("exponent", [-300, -200, -103, -20, 20, 103, 200, 300])
def test_the_result_is_free_of_scale_in_float64(exponent):
    x = gaussian(8, 24, dtype=jnp.float64)
    assert_near(mj.orthogonalize(x * 10.0**exponent), mj.orthogonalize(x))


def test_a_matrix_of_entries_at_the_least_normal_number_is_orthogonalized():
    x = jnp.eye(4, dtype=jnp.float32) * 1.2e-38
    assert_near(mj.orthogonalize(x), mj.orthogonalize(jnp.eye(4)), atol=1e-6)


def test_zero_stays_zero_and_nan_stays_in_its_matrix():
    x = gaussian(4, 6, 6).at[0].set(0).at[1, 2, 3].set(jnp.nan).at[2, 0, 0].set(jnp.inf)
    y = mj.orthogonalize(x)
    assert (y[0] == 0).all()
    assert jnp.isnan(y[1:3]).all()
    np.testing.assert_array_equal(y[3], mj.orthogonalize(x[3:])[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_the_dtype_is_that_of_the_input(dtype):
    assert mj.orthogonalize(gaussian(4, 6, dtype=dtype)).dtype == dtype


def test_empty_matrices_are_fine():
    assert mj.orthogonalize(jnp.zeros((3, 0, 4))).shape == (3, 0, 4)


@pytest.mark.parametrize(
    "bad", [[], "muon", [(1.0, 2.0)], 5, [1.0, 2.0, 3.0], [(1.0, float("nan"), 1.0)]]
)
def test_bad_coefficients_are_refused(bad):
    with pytest.raises(ValueError, match=r"ns_coeffs.* rows"):
        mj.orthogonalize(gaussian(2, 2), bad)


@pytest.mark.parametrize("bad", [jnp.zeros(3), jnp.zeros((2, 2), jnp.int32)])
def test_what_is_no_matrix_is_refused(bad):
    with pytest.raises(ValueError, match="floating matrices"):
        mj.orthogonalize(bad)
