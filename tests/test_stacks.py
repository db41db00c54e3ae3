"""Many matrices at once, without a mesh; with one in test_muon_sharding.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problem import FAST

import muloco_jax as mj
from muloco_jax import stacks

SHAPES = [(1, 4, 6), (3, 6, 4), (2, 4, 6), (1, 5, 5), (0, 4, 6), (2, 0, 3), (7, 4, 6)]


def draw(dtype=jnp.float32):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in SHAPES]


def applied(arrays, one_by_one, pack_bytes=2**20):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacks, "PACK_BYTES", pack_bytes)
        patch.setattr(stacks, "CPU_PACK_BYTES", pack_bytes)
        fn = lambda arrays: stacks.apply(
            mj.orthogonalize, list(map(stacks.Stack, arrays)), one_by_one=one_by_one
        )
        return jax.jit(fn, compiler_options=FAST)(arrays)


# Bytes of two and a half matrices: packs of one, of two, and stacks cut into parts.
@pytest.mark.parametrize("pack_bytes", [0, 240, 2**20])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_each_matrix_is_treated_by_itself(one_by_one, pack_bytes):
    arrays = draw()
    # Products of a batch are summed in another order than those of one matrix.
    atol = 1e-6
    for x, y in zip(arrays, applied(arrays, one_by_one, pack_bytes), strict=True):
        assert y.shape == x.shape
        for matrix, result in zip(x, y, strict=True):
            expected = mj.orthogonalize(matrix)
            np.testing.assert_allclose(result, expected, rtol=0, atol=atol)


def test_on_cpu_stacked_is_separate_bit_for_bit():
    stack = jnp.asarray(np.random.default_rng(0).standard_normal((5, 16, 48)), "f")
    together = {"blocks": {"up": stack}}
    apart = {f"up{i}": x for i, x in enumerate(stack)}
    updates = [
        jax.jit(mj.muon(0.1).update)(grads, mj.muon(0.1).init(grads))[0]
        for grads in (together, apart)
    ]
    np.testing.assert_array_equal(
        updates[0]["blocks"]["up"], jnp.stack(list(updates[1].values()))
    )


def test_tall_and_wide_matrices_share_a_trace():
    traced = []

    def fn(x):
        traced.append(x.shape)
        return x

    arrays = [jnp.ones((1, *shape)) for shape in ((4, 6), (6, 4), (4, 6))]
    jax.eval_shape(functools.partial(stacks.apply, fn), list(map(stacks.Stack, arrays)))
    assert traced == [(4, 6)]


def test_matrices_of_one_shape_share_one_function_of_the_program():
    params = {f"w{i}": jnp.ones((300, 300), jnp.float32) for i in range(4)}
    params |= {f"v{i}": jnp.ones((300, 400), jnp.float32) for i in range(2)}
    params |= {f"u{i}": jnp.ones((400, 300), jnp.float32) for i in range(2)}
    optimizer = mj.muon(0.1)
    state = jax.eval_shape(optimizer.init, params)
    text = jax.jit(optimizer.update).lower(params, state).as_text()
    # Five products of each of two shapes, of which one is done by its Gram matrix.
    assert text.count("func.func private @_orthogonalize") == 2


def test_a_step_takes_less_than_two_copies_of_the_momentum():
    """The momentum after looking ahead, and stacks of up to a megabyte."""

    def temp(n):
        params = {f"w{i}": jnp.ones((256, 300), jnp.float32) for i in range(n)}
        optimizer = mj.muon(0.1, nesterov=True)
        state = jax.eval_shape(optimizer.init, params)
        compiled = jax.jit(optimizer.update).lower(params, state).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    size = 256 * 300 * 4
    assert temp(12) - temp(4) <= 2 * 8 * size
