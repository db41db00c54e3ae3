"""Fragments of a tree, and the schedule of a round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muloco_jax import fragments
from muloco_jax.fragments import Segment

PARAMS = {"embed": jnp.arange(3.0), "blocks": {"up": jnp.arange(8.0).reshape(4, 2)}}
# Two fragments by hand: even layers and the embedding, odd layers.
EVEN = {"embed": True, "blocks": {"up": np.array([0, 2])}}
ODD = {"embed": False, "blocks": {"up": np.array([1, 3])}}


def test_the_whole_is_the_tree_itself():
    (whole,) = fragments.whole(PARAMS)
    assert jax.tree.structure(fragments.take(PARAMS, whole)) == jax.tree.structure(
        PARAMS
    )


def test_a_prefix_speaks_for_what_is_under_it():
    part = fragments.take(PARAMS, {"embed": False, "blocks": True})
    assert part == {"embed": None, "blocks": PARAMS["blocks"]}


def test_take_keeps_names_and_picks_layers():
    part = fragments.take(PARAMS, ODD)
    assert part["embed"] is None
    np.testing.assert_array_equal(part["blocks"]["up"], [[2.0, 3.0], [6.0, 7.0]])


def test_put_undoes_take():
    tree = jax.tree.map(jnp.zeros_like, PARAMS)
    for part in (EVEN, ODD):
        tree = fragments.put(tree, fragments.take(PARAMS, part), part)
    jax.tree.map(np.testing.assert_array_equal, tree, PARAMS)


def test_put_leaves_the_rest_alone():
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    tree = fragments.put(PARAMS, fragments.take(ones, ODD), ODD)
    np.testing.assert_array_equal(tree["embed"], PARAMS["embed"])
    np.testing.assert_array_equal(
        tree["blocks"]["up"], [[0, 1], [1, 1], [4, 5], [1, 1]]
    )


def test_trees_may_hold_none():
    tree = {"w": jnp.ones(2), "b": None}
    whole = {"w": True, "b": None}
    assert fragments.take(tree, whole)["b"] is None
    assert fragments.put(tree, tree, whole)["b"] is None


@pytest.mark.parametrize(
    "sync_every, num, delay", [(30, 1, 0), (30, 3, 0), (12, 3, 2), (5, 1, 4)]
)
def test_a_round_is_closed(sync_every, num, delay):
    """It takes H steps, in which each fragment is sent, and received `delay` later."""
    now, sent, received = 0, {}, {}
    for segment in fragments.schedule(sync_every, num, delay):
        now += segment.steps
        if segment.send is not None:
            sent[segment.send] = now
        if segment.receive is not None:
            received[segment.receive] = now
    assert now == sync_every
    assert received == {i: sync_every // num * (i + 1) for i in range(num)}
    assert sent == {i: at - delay for i, at in received.items()}


def test_without_delay_a_fragment_is_received_when_it_is_sent():
    assert fragments.schedule(4, 2) == [Segment(2, 0, 0), Segment(2, 1, 1)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0,), "sync_every must be an int of at least 1, got 0"),
        ((2.5,), "sync_every must be an int of at least 1, got 2.5"),
        ((30, 0), "num must be an int of at least 1, got 0"),
        ((30, 1, -1), "delay must be an int of at least 0, got -1"),
        (
            (30, 4),
            "does not divide into 4 fragments; the nearest that does is 28 or 32",
        ),
        ((2, 4), "the nearest that does is 4"),
        ((30, 3, 10), "delay=10 must be less than sync_every / fragments = 10"),
    ],
)
def test_a_round_that_cannot_be_cut_says_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        fragments.schedule(*arguments)
