"""Orthogonalization: golden numbers, and what holds for every matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import wave
from problem import assert_near

import muloco_jax as mj

LISTS = {"jordan": mj.JORDAN, "dion": mj.DION, "polar_express": mj.POLAR_EXPRESS}
# Bounds on the singular values that five rows reach from a Gaussian 64 x 256 matrix.
BOUNDS = {"jordan": (0.65, 1.15), "dion": (0.97, 1.04), "polar_express": (0.84, 1.15)}


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


@pytest.mark.parametrize("name", LISTS)
def test_singular_values_come_near_one(name):
    y = mj.orthogonalize(gaussian(64, 256), LISTS[name])
    low, high = BOUNDS[name]
    assert low < singular_values(y).min()
    assert singular_values(y).max() < high


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
    ],
)
def test_every_digit_of_the_lists_is_that_of_their_sources(name, expected):
    """What singular values become, computed from the printed lists without the library.

    A matrix of norm one has a given value s and sqrt(1 - s^2).
    """
    s = np.array([0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0])
    x = jnp.stack([jnp.diag(jnp.array([a, np.sqrt(1 - a * a)])) for a in s])
    assert_near(mj.orthogonalize(x, LISTS[name])[:, 0, 0], expected, atol=1e-6)


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


def test_eps_adds_to_the_norm():
    y = mj.orthogonalize(jnp.array([[3.0]]), [(1.0, 0.0, 0.0)], eps=1.0)
    assert_near(y, [[0.75]], atol=1e-15)


def test_a_batch_is_its_matrices_one_by_one():
    x = gaussian(2, 3, 8, 12)
    y = mj.orthogonalize(x)
    for i, j in np.ndindex(2, 3):
        assert_near(y[i, j], mj.orthogonalize(x[i, j]), atol=1e-6)


def test_tall_is_the_transpose_of_wide():
    x = gaussian(24, 8)
    np.testing.assert_array_equal(mj.orthogonalize(x), mj.orthogonalize(x.T).T)


# Below 1e-35 the smaller entries are subnormal, and gone before the first operation.
@pytest.mark.parametrize("exponent", [-35, -30, -20, -8, 8, 20, 30, 38])
def test_the_result_is_free_of_scale(exponent):
    x = gaussian(8, 24)
    scaled = jnp.float32(
        np.asarray(x, np.float64) * 10.0**exponent / float(abs(x).max())
    )
    assert_near(jax.jit(mj.orthogonalize)(scaled), mj.orthogonalize(x), atol=1e-5)


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


@pytest.mark.parametrize("bad", [[], "muon", [(1.0, 2.0)], 5, [1.0, 2.0, 3.0]])
def test_bad_coefficients_are_refused(bad):
    with pytest.raises(ValueError, match=r"ns_coeffs.* rows"):
        mj.orthogonalize(gaussian(2, 2), bad)


@pytest.mark.parametrize("bad", [jnp.zeros(3), jnp.zeros((2, 2), jnp.int32)])
def test_what_is_no_matrix_is_refused(bad):
    with pytest.raises(ValueError, match="floating matrices"):
        mj.orthogonalize(bad)
