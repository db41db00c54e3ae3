"""The decoder and its loss: properties, an independent forward pass, and shardings."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problem import FAST, assert_close, assert_near, mesh

import muloco_jax as mj
from muloco_jax import model

END = 0
CONFIG = model.ModelConfig(
    vocab_size=16, num_layers=2, width=16, head_dim=4, num_kv_heads=2, mlp_ratio=2.5,
    end_of_text=END, dtype="float64", param_dtype="float64",
)  # fmt: skip
replace = functools.partial(dataclasses.replace, CONFIG)


@functools.cache
def losses_of(config):
    return jax.jit(model.token_losses(config), compiler_options=FAST)


@functools.cache
def value_and_grad(config):
    loss = model.next_token_loss(config)
    return jax.jit(jax.value_and_grad(loss), compiler_options=FAST)


@pytest.fixture(scope="module")
def params():
    """As at the start, but with norms and small kernels that are not all alike."""
    noise = np.random.default_rng(0)
    spread = lambda x: x + 0.1 * jnp.asarray(noise.standard_normal(x.shape))
    return jax.tree.map(spread, model.init(CONFIG, jax.random.key(0)))


@pytest.fixture(scope="module")
def tokens():
    """Two sequences of nine tokens; the second has two documents."""
    rows = np.random.default_rng(1).integers(1, 16, (2, 9))
    rows[1, 4] = END
    return jnp.asarray(rows, jnp.int32)


def by_hand(params, tokens):
    """The cross-entropies of one sequence, in plain numpy, head by head."""
    p = jax.tree.map(np.asarray, params)
    norm = lambda x, scale: x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale
    length, size = len(tokens) - 1, CONFIG.head_dim
    document = np.cumsum(np.concatenate([[0], tokens[:-1] == END]))[:length]
    visible = np.tril(document[:, None] == document[None, :])

    def rotate(x):  # Each pair of entries is a complex number, turned by its angle.
        pairs = x[:, 0::2] + 1j * x[:, 1::2]
        turn = np.arange(length)[:, None] * 5e5 ** (-np.arange(0, size, 2) / size)
        pairs = pairs * np.exp(1j * turn)
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    x = p["embed"]["embedding"][tokens[:-1]]
    for i in range(CONFIG.num_layers):
        b = jax.tree.map(lambda a, i=i: a[i], p["blocks"])
        a = b["attention"]
        y = norm(x, b["pre_attention_norm"]["scale"])
        q, k, v = (y @ a[name]["kernel"] for name in ("query", "key", "value"))
        heads = []
        for n in range(CONFIG.num_heads):
            g = n * CONFIG.kv_heads // CONFIG.num_heads
            cut = lambda z, j: z[:, j * size : (j + 1) * size]
            q_n = rotate(norm(cut(q, n), a["query_norm"]["scale"]))
            k_n = rotate(norm(cut(k, g), a["key_norm"]["scale"]))
            scores = np.where(visible, q_n @ k_n.T / np.sqrt(size), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ cut(v, g))
        y = np.concatenate(heads, -1) @ a["out"]["kernel"]
        x = x + norm(y, b["post_attention_norm"]["scale"])
        y = norm(x, b["pre_mlp_norm"]["scale"])
        gate, up, down = (b["mlp"][name]["kernel"] for name in ("gate", "up", "down"))
        y = (y @ gate / (1 + np.exp(-(y @ gate))) * (y @ up)) @ down
        x = x + norm(y, b["post_mlp_norm"]["scale"])
    logits = norm(x, p["norm"]["scale"]) @ p["head"]["kernel"]
    log_z = np.log(np.exp(logits).sum(-1))
    return log_z - logits[np.arange(length), tokens[1:]], log_z


def test_the_losses_are_those_of_the_formulas(params, tokens):
    losses, log_z = losses_of(CONFIG)(params, tokens)
    for row in range(2):
        expected = by_hand(params, np.asarray(tokens[row]))
        assert_near(losses[row], expected[0])
        assert_near(log_z[row], expected[1])


def test_the_loss_is_the_mean_and_the_weighted_square_of_the_partition(params, tokens):
    losses, log_z = losses_of(CONFIG)(params, tokens)
    loss, _ = value_and_grad(replace(z_loss=0.1))(params, tokens)
    assert_near(loss, losses.mean() + 0.1 * (log_z**2).mean(), atol=1e-14)


def test_the_logits_are_those_that_the_losses_are_of(params, tokens):
    logits = model.logits(CONFIG)(params, tokens[:, :-1])
    assert logits.shape == (2, 8, CONFIG.vocab_size)
    chosen = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), np.asarray(tokens)[:, 1:, None], -1
    )
    assert_near(-chosen[..., 0], losses_of(CONFIG)(params, tokens)[0])


def test_no_token_sees_a_later_one_or_another_document(params, tokens):
    """Hidden state i depends on embedding j exactly if j <= i and the document is one.

    All pairs are covered: past, present and future, within and across documents.
    """
    embedded = params["embed"]["embedding"][tokens[1, :-1]]
    hidden = lambda x: _hidden(params, x, tokens[1, :-1])
    jacobian = jax.jit(jax.jacobian(hidden), compiler_options=FAST)(embedded)
    depends = np.asarray(abs(jacobian).max(axis=(1, 3)) > 0)
    document = np.array([0, 0, 0, 0, 0, 1, 1, 1])  # The fifth token ends the first.
    expected = np.tril(document[:, None] == document[None, :])
    np.testing.assert_array_equal(depends, expected)


def _hidden(params, embedded, tokens):
    """Hidden states `[L, D]` of tokens whose embeddings are given by position."""
    config = replace(vocab_size=16 + len(tokens))
    # Each position gets an id of its own, unless it ends a document.
    own = jnp.where(tokens == END, END, 16 + jnp.arange(len(tokens)))
    table = jnp.concatenate([params["embed"]["embedding"], embedded])
    table = table.at[END].set(embedded[jnp.argmin(tokens)])
    head = jnp.zeros((config.width, config.vocab_size))
    graph, _ = model._abstract(config)
    swapped = {**params, "embed": {"embedding": table}, "head": {"kernel": head}}
    return model.nnx.merge(graph, swapped)(own[None])[0]


def test_without_an_end_of_text_there_is_one_document(params, tokens):
    one = losses_of(replace(end_of_text=-1))(params, tokens)[0]
    masked = losses_of(CONFIG)(params, tokens)[0]
    np.testing.assert_array_equal(one[0], masked[0])  # The first has no end of text.
    assert float(abs(one[1, 5:] - masked[1, 5:]).min()) > 1e-6


def test_recomputing_blocks_changes_nothing(params, tokens):
    recomputed = value_and_grad(replace(remat=True))(params, tokens)
    assert_close(recomputed, value_and_grad(CONFIG)(params, tokens), 1e-14)


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_loss_in_chunks_is_the_plain_one(params, tokens, chunk):
    plain = replace(z_loss=0.1)
    in_chunks = value_and_grad(replace(z_loss=0.1, loss_chunk=chunk))(params, tokens)
    assert_close(in_chunks, value_and_grad(plain)(params, tokens))


def test_a_loss_in_chunks_needs_less_than_half_the_memory():
    sizes = {"vocab_size": 128_256, "dtype": "float32", "param_dtype": "float32"}
    plain = replace(**sizes)
    shapes = jax.eval_shape(lambda: model.init(plain, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 65), jnp.int32)

    def temporaries(config):
        grad = jax.jit(jax.grad(model.next_token_loss(config)))
        memory = grad.lower(shapes, tokens).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporaries(replace(**sizes, loss_chunk=8)) < temporaries(plain) / 2


def test_a_chunk_that_does_not_divide_the_sequence_is_refused(params, tokens):
    with pytest.raises(ValueError, match=r"does not divide .* 8; .* \[1, 2, 4, 8\]"):
        model.next_token_loss(replace(loss_chunk=3))(params, tokens)


@pytest.mark.parametrize(
    "sequential, remat, chunk", [(True, True, 4), (False, False, 4), (False, True, 0)]
)
def test_on_a_mesh_loss_and_gradients_are_those_of_one_device(
    params, tokens, sequential, remat, chunk
):
    config = replace(remat=remat, loss_chunk=chunk)
    mesh_ = mesh(workers=2, fsdp=2, tensor=2)
    specs = model.partition_specs(config, mesh_)
    assert specs["embed"]["embedding"] == P("tensor", "fsdp")
    assert specs["blocks"]["mlp"]["down"]["kernel"] == P(None, "tensor", "fsdp")
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh_, spec))
    # Four workers, two a slice; the last two have the sequences the other way round.
    batches = jnp.stack([tokens, tokens, tokens[::-1], tokens[::-1]])
    stacked = jax.tree.map(
        lambda x, s: place(jnp.stack([x] * 4), P("workers", *s)), params, specs
    )
    one = jax.value_and_grad(model.next_token_loss(config))
    all_workers = mj.Workers(4, mesh_, sequential).map(one, (0, 0))
    loss, grads = jax.jit(all_workers, compiler_options=FAST)(
        stacked, place(batches, P("workers", "fsdp"))
    )
    expected = value_and_grad(CONFIG)(params, tokens)
    for k in range(4):
        assert_close((loss[k], jax.tree.map(lambda g, k=k: g[k], grads)), expected)


def test_a_mesh_that_does_not_divide_a_parameter_is_refused():
    config = replace(vocab_size=17)
    with pytest.raises(ValueError, match=r"'tensor' of size 2 .* embed/embedding .*17"):
        model.partition_specs(config, mesh(workers=1, tensor=2))


def test_bfloat16_is_for_activations_only(params, tokens):
    config = replace(dtype="bfloat16", param_dtype="float32")
    small = jax.tree.map(jnp.float32, params)
    loss, grads = value_and_grad(config)(small, tokens)
    assert loss.dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    exact, _ = value_and_grad(CONFIG)(params, tokens)
    assert 1e-5 < abs(float(loss) - float(exact)) < 0.05


def test_the_initialization_is_the_papers():
    """Standard deviations, of 2^14 numbers and more: 4 sigma is below 3 percent."""
    config = model.ModelConfig(vocab_size=256, num_layers=3, width=128, head_dim=32)
    p = model.init(config, jax.random.key(0))
    std = lambda x: np.asarray(x.std(axis=(-2, -1)))
    layer = np.arange(3)
    deep = 0.02 / np.sqrt(2 * (layer + 1))
    a, m = p["blocks"]["attention"], p["blocks"]["mlp"]
    for kernel in (a["query"], a["key"], a["value"], m["gate"]):
        np.testing.assert_allclose(std(kernel["kernel"]), 0.02, rtol=0.03)
    for kernel in (a["out"], m["up"], m["down"]):
        np.testing.assert_allclose(std(kernel["kernel"]), deep, rtol=0.03)
    np.testing.assert_allclose(std(p["embed"]["embedding"]), 1.0, rtol=0.03)
    # A normal cut at three standard deviations has 0.9866 of its own.
    np.testing.assert_allclose(std(p["head"]["kernel"]), 0.9866 * 128**-0.5, rtol=0.03)
    assert float(abs(p["head"]["kernel"]).max()) <= 3 * 128**-0.5
    scales = [x for path, x in jax.tree.leaves_with_path(p) if "scale" in str(path[-1])]
    assert len(scales) == 7
    assert all(bool((x == 1).all()) for x in scales)
    first, second = a["query"]["kernel"][0], a["query"]["kernel"][1]
    assert float(abs(first - second).max()) > 0.01  # Layers differ.


@pytest.mark.parametrize(
    "width, layers, expected",
    [
        (512, 6, 150_616_064),
        (1024, 12, 416_862_208),
        (1536, 18, 914_343_936),
        (2048, 24, 1_758_666_752),
        (2560, 30, 3_065_436_160),
        (4608, 54, 15_229_089_792),
    ],
)
def test_the_papers_sizes_have_the_papers_numbers_of_parameters(
    width, layers, expected
):
    config = model.ModelConfig(128_256, layers, width, head_dim=128)
    shapes = jax.eval_shape(lambda: model.init(config, jax.random.key(0)))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == expected


def matrix_product_flops(jaxpr):
    """Of all matrix products that a jaxpr carries out, by their shapes."""
    total = 0
    for equation in jaxpr.eqns:
        assert equation.primitive.name not in ("while", "cond")  # How often, or which?
        if equation.primitive.name == "dot_general":
            (contracting, _), _ = equation.params["dimension_numbers"]
            lhs, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            # M, N and the batch are in the result, K is what it lacks.
            total += 2 * math.prod(out) * math.prod(lhs[i] for i in contracting)
        inner = jaxprs_in_params(equation.params)
        times = equation.params.get("length", 1)  # Of a scan.
        total += times * sum(map(matrix_product_flops, inner))
    return total


@pytest.mark.parametrize("kv_heads, layers, chunk", [(2, 2, 0), (4, 3, 2)])
def test_flops_are_those_of_the_matrix_products_of_a_training_step(
    kv_heads, layers, chunk
):
    """But for the logits, which the backward pass computes again to save memory."""
    config = replace(num_kv_heads=kv_heads, num_layers=layers, loss_chunk=chunk)
    shapes = jax.eval_shape(lambda: model.init(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((3, 9), jnp.int32)
    step = jax.value_and_grad(model.next_token_loss(config))
    counted = matrix_product_flops(jax.make_jaxpr(step)(shapes, tokens).jaxpr)
    recomputed = 2 * config.width * config.vocab_size
    assert counted == 3 * 8 * (model.flops_per_token(config, 8) + recomputed)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_layers": 0}, "num_layers must be positive, got 0"),
        ({"head_dim": 3}, "head_dim must be even and divide width=16, got 3"),
        ({"head_dim": 6}, "head_dim must be even and divide width=16, got 6"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide the 4 query heads"),
        ({"num_kv_heads": -1}, "num_kv_heads must be finite and not negative, got -1"),
        ({"mlp_ratio": 2.3}, r"whole number, got 2.3 \* 16"),
        ({"mlp_ratio": 0.0}, "positive whole number"),
        ({"end_of_text": 16}, "end_of_text must be less than vocab_size=16, got 16"),
        ({"z_loss": float("nan")}, "z_loss must be finite and not negative, got nan"),
        ({"dtype": "float33"}, "dtype must be one of .*, got 'float33'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(**change)
