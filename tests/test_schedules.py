"""Learning rates and batch sizes in pieces, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problem import assert_near

from muloco_jax import schedules


def rates(peak, steps, warmup_steps, *pieces):
    schedule = schedules.learning_rate(peak, steps, warmup_steps, pieces)
    return jax.vmap(schedule)(jnp.arange(steps))


def test_the_warmup_ends_at_the_peak_and_a_constant_stays_there():
    expected = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]
    assert_near(rates(0.8, 6, 4, ("constant", 0, 1.0)), expected, atol=1e-7)


def test_without_warmup_it_starts_at_the_peak():
    assert_near(rates(0.8, 2, 0, ("linear", 0, 0.0)), [0.8, 0.4], atol=1e-7)


def test_a_cosine_goes_from_where_it_is_to_where_it_ends():
    """From 0.8 to 0.2 in four steps, half way after two, and then linearly to 0."""
    found = rates(1.0, 9, 1, ("linear", 2, 0.8), ("cosine", 4, 0.2), ("linear", 2, 0.0))
    quarter = 0.3 * (1 + np.cos(np.pi / 4))
    expected = [1, 1, 0.9, 0.8, 0.2 + quarter, 0.5, 0.8 - quarter, 0.2, 0.1]
    assert_near(found, expected, atol=1e-6)


def test_steps_of_a_decay_are_constants():
    found = rates(
        2.0, 5, 0, ("constant", 2, 1.0), ("constant", 2, 0.5), ("constant", 1, 0)
    )
    assert_near(found, [2, 2, 1, 1, 0])


@pytest.mark.parametrize(
    "steps, warmup_steps, pieces, message",
    [
        (4, 4, [("cosine", 0, 0.1)], "warmup_steps=4 must be less than steps=4"),
        (4, 1, [("square", 0, 0.1)], "'cosine', 'linear' or 'constant', got 'square'"),
        (4, 1, [("cosine", 0, -0.1)], "ends at -0.1 of the peak, which must be >= 0"),
        (4, 1, [("cosine", 0, np.nan)], "ends at nan of the peak"),
        (
            4,
            1,
            [("linear", 1, 0.0), ("cosine", 0, 1.0)],
            "a cosine cannot start from 0",
        ),
        (4, 1, [], r"pieces of \[\] steps .* sum up to 3"),
        (4, 1, [("linear", 2, 0.1)], r"pieces of \[2\] steps .* sum up to 3"),
        (4, 1, [("linear", 0, 0.5), ("linear", 3, 0.1)], r"pieces of \[0, 3\] steps"),
        (4, 1, [("linear", 3, 0.5), ("linear", 0, 0.1)], r"pieces of \[3, 0\] steps"),
        (4, 1, [("linear", 4, 0.5), ("linear", -1, 0.1)], r"pieces of \[4, -1\] steps"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(steps, warmup_steps, pieces, message):
    with pytest.raises(ValueError, match=message):
        schedules.learning_rate(1.0, steps, warmup_steps, pieces)


@pytest.mark.parametrize(
    "pieces, message",
    [
        ([(3, 8), (0, 16)], "a piece of 3 steps cuts a round; .* sync_every=2"),
        ([(8, 8), (0, 16)], r"pieces of \[8, 0\] steps must .* sum up to 8"),
    ],
)
def test_batches_change_between_rounds(pieces, message):
    with pytest.raises(ValueError, match=message):
        schedules.batch_sizes(8, 2, pieces)
