"""The paper's decoder and its next-token loss, as functions of plain parameters.

A Llama-like block with norms before and after attention and MLP, per-head norms of
queries and keys, and SwiGLU (MuLoCo, appendix; Gemma 3). All layers are one stacked
module: kernels are `[layers, fan_in, fan_out]`, so compile time does not grow with
depth, and Muon sees all layers of a kernel at once.

The module is flax nnx inside. Outside it is `init`, `token_losses` and
`partition_specs`, over a nested dict of arrays.

Shapes: B sequences, L tokens of each, D width, N query heads, G key and value heads,
H size of a head, F hidden width of the MLP, V vocabulary.

References:
    Chowdhery et al., `PaLM <https://arxiv.org/abs/2204.02311>`_, 2022
    Grattafiori et al., `Llama 3 <https://arxiv.org/abs/2407.21783>`_, 2024
    Gemma Team, `Gemma 3 <https://arxiv.org/abs/2503.19786>`_, 2025
    Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from muloco_jax import tree

PyTree = Any

# Logical axes of parameters -> the mesh axis that shards them, if the mesh has it.
RULES = {
    "layers": None,  # Never: fragments and Muon take layers apart.
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "norm": None,
}

DTYPES = ("bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and numerics of a decoder.

    Attributes:
        vocab_size: V.
        num_layers: number of blocks.
        width: D, a multiple of `head_dim`.
        head_dim: H, even. There are `width / head_dim` query heads, N.
        num_kv_heads: G, divides N; 0 means N, plain multi-head attention.
        mlp_ratio: F = mlp_ratio * width, a whole number.
        rope_theta: base of the rotary frequencies.
        end_of_text: id of the token that ends a document and belongs to it; tokens
            attend only within their document. Negative: one document throughout.
        dtype: of activations and matrix products.
        param_dtype: of the parameters.
        remat: whether blocks are recomputed in the backward pass instead of stored.
        loss_chunk: tokens of each sequence whose logits exist at a time; 0: all. It
            divides the sequence length.
        z_loss: weight of the squared log-partition function in the training loss.
    """

    vocab_size: int
    num_layers: int
    width: int
    head_dim: int
    num_kv_heads: int = 0
    mlp_ratio: float = 2.75
    rope_theta: float = 5e5
    end_of_text: int = -1
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False
    loss_chunk: int = 0
    z_loss: float = 0.0

    def __post_init__(self):
        for key in ("vocab_size", "num_layers", "width", "head_dim"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be positive, got {getattr(self, key)}")
        for key in ("num_kv_heads", "loss_chunk", "z_loss", "mlp_ratio", "rope_theta"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(
                    f"{key} must be finite and not negative, got {getattr(self, key)}"
                )
        if self.rope_theta == 0:
            raise ValueError("rope_theta must be positive, got 0")
        if self.width % self.head_dim or self.head_dim % 2:
            raise ValueError(
                f"head_dim must be even and divide width={self.width}, got "
                f"{self.head_dim}"
            )
        for key in ("dtype", "param_dtype"):
            if getattr(self, key) not in DTYPES:
                raise ValueError(
                    f"{key} must be one of {DTYPES}, got {getattr(self, key)!r}"
                )
            if jax.dtypes.canonicalize_dtype(getattr(self, key)) != getattr(self, key):
                raise ValueError(f"{key}='float64' needs JAX_ENABLE_X64=1")
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads must divide the {self.num_heads} query heads (width / "
                f"head_dim), got {self.num_kv_heads}"
            )
        if self.mlp_ratio * self.width != self.mlp_width or self.mlp_width < 1:
            raise ValueError(
                f"mlp_ratio * width must be a positive whole number, got "
                f"{self.mlp_ratio} * {self.width} = {self.mlp_ratio * self.width}"
            )
        if self.end_of_text >= self.vocab_size:
            raise ValueError(
                f"end_of_text must be less than vocab_size={self.vocab_size}, got "
                f"{self.end_of_text}"
            )

    @property
    def num_heads(self) -> int:
        """N, the number of query heads."""
        return self.width // self.head_dim

    @property
    def kv_heads(self) -> int:
        """G, the number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_width(self) -> int:
        """F, the hidden width of the MLP."""
        return int(self.mlp_ratio * self.width)


def _at_least_f32(dtype) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _normal(std) -> Callable:
    """Initializer; `std` may be traced, so that it can depend on the layer."""
    return lambda key, shape, dtype: std * jax.random.normal(key, shape, dtype)


def _norm(size, config, rngs):
    """RMSNorm over the last axis, with eps 1e-6, computed in float32 or wider."""
    return nnx.RMSNorm(
        size,
        scale_init=nnx.with_partitioning(nnx.initializers.ones_init(), ("norm",)),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _linear(fan_in, fan_out, axes, init, config, rngs):
    return nnx.Linear(
        fan_in,
        fan_out,
        use_bias=False,
        kernel_init=nnx.with_partitioning(init, axes),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def rotate(x_BLNH: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of interleaved pairs, in float32 or wider."""
    *_, length, _, size = x_BLNH.shape
    x = x_BLNH.astype(_at_least_f32(x_BLNH.dtype))
    frequency = theta ** (-jnp.arange(0, size, 2, dtype=x.dtype) / size)
    angle_LH = jnp.arange(length, dtype=x.dtype)[:, None] * frequency[None]
    cos, sin = (f(angle_LH)[None, :, None] for f in (jnp.cos, jnp.sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return rotated.reshape(x.shape).astype(x_BLNH.dtype)


def attend(q_BLNH, k_BLGH, v_BLGH, mask_BLL):
    """Softmax attention; query head n reads key and value head `n G // N`.

    Like `jax.nn.dot_product_attention`, whose softmax is float32 even of float64.
    """
    B, L, N, H = q_BLNH.shape
    G = k_BLGH.shape[2]
    q_BLGRH = q_BLNH.reshape(B, L, G, N // G, H)  # R query heads for each of the G.
    scores_BGRLM = jnp.einsum(
        "BLGRH,BMGH->BGRLM",
        q_BLGRH,
        k_BLGH,
        preferred_element_type=_at_least_f32(q_BLNH.dtype),
    )
    scores_BGRLM = jnp.where(mask_BLL[:, None, None], scores_BGRLM * H**-0.5, -jnp.inf)
    weights_BGRLM = jax.nn.softmax(scores_BGRLM).astype(v_BLGH.dtype)
    return jnp.einsum("BGRLM,BMGH->BLGRH", weights_BGRLM, v_BLGH).reshape(B, L, N, H)


class Attention(nnx.Module):
    """Causal attention within documents, with per-head norms of queries and keys."""

    def __init__(self, config: ModelConfig, depth_std, rngs: nnx.Rngs):
        d, size = config.width, config.head_dim
        heads, kv_heads = config.num_heads * size, config.kv_heads * size
        linear = functools.partial(_linear, config=config, rngs=rngs)
        self.query = linear(d, heads, ("embed", "heads"), _normal(0.02))
        self.key = linear(d, kv_heads, ("embed", "heads"), _normal(0.02))
        self.value = linear(d, kv_heads, ("embed", "heads"), _normal(0.02))
        self.out = linear(heads, d, ("heads", "embed"), _normal(depth_std))
        self.query_norm = _norm(size, config, rngs)
        self.key_norm = _norm(size, config, rngs)
        self.config = config

    def __call__(self, x_BLD, mask_BLL):
        config = self.config
        split = lambda y: y.reshape(*y.shape[:2], -1, config.head_dim)
        q_BLNH = self.query_norm(split(self.query(x_BLD)))
        k_BLGH = self.key_norm(split(self.key(x_BLD)))
        y_BLNH = attend(
            rotate(q_BLNH, config.rope_theta),
            rotate(k_BLGH, config.rope_theta),
            split(self.value(x_BLD)),
            mask_BLL,
        )
        return self.out(y_BLNH.reshape(*x_BLD.shape[:2], -1))


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, depth_std, rngs: nnx.Rngs):
        d, f = config.width, config.mlp_width
        linear = functools.partial(_linear, config=config, rngs=rngs)
        self.gate = linear(d, f, ("embed", "mlp"), _normal(0.02))
        self.up = linear(d, f, ("embed", "mlp"), _normal(depth_std))
        self.down = linear(f, d, ("mlp", "embed"), _normal(depth_std))

    def __call__(self, x_BLD):
        return self.down(jax.nn.silu(self.gate(x_BLD)) * self.up(x_BLD))


class Block(nnx.Module):
    """Attention and MLP, each with a norm before and after."""

    def __init__(self, config: ModelConfig, depth_std, rngs: nnx.Rngs):
        self.attention = Attention(config, depth_std, rngs)
        self.mlp = MLP(config, depth_std, rngs)
        self.pre_attention_norm = _norm(config.width, config, rngs)
        self.post_attention_norm = _norm(config.width, config, rngs)
        self.pre_mlp_norm = _norm(config.width, config, rngs)
        self.post_mlp_norm = _norm(config.width, config, rngs)

    def __call__(self, x_BLD, mask_BLL):
        y_BLD = self.attention(self.pre_attention_norm(x_BLD), mask_BLL)
        x_BLD = x_BLD + self.post_attention_norm(y_BLD)
        y_BLD = self.mlp(self.pre_mlp_norm(x_BLD))
        return x_BLD + self.post_mlp_norm(y_BLD)


class Decoder(nnx.Module):
    """Tokens to hidden states, and the head that turns those into logits."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.embed = nnx.Embed(
            config.vocab_size,
            config.width,
            embedding_init=nnx.with_partitioning(_normal(1.0), ("vocab", "embed")),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(
            in_axes=(0, 0),
            out_axes=0,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        def stack(rngs, depth_std):
            return Block(config, depth_std, rngs)

        # Deeper layers start smaller: 0.02 / sqrt(2 l) for l = 1, 2, ...
        layer = jnp.arange(1, config.num_layers + 1, dtype=config.param_dtype)
        setattr(self, tree.STACKED, stack(rngs, 0.02 * (2 * layer) ** -0.5))
        self.norm = _norm(config.width, config, rngs)
        std = config.width**-0.5
        init = nnx.initializers.truncated_normal(std, lower=-3, upper=3)
        self.head = _linear(
            config.width, config.vocab_size, ("embed", "vocab"), init, config, rngs
        )
        self.config = config

    def __call__(self, tokens_BL):
        """Hidden states `[B, L, D]`, normalized for the head."""
        config = self.config
        table = self.embed.embedding[...]
        if AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types:
            # A lookup in a table that fsdp shards, with rows that fsdp shards, aborts
            # inside XLA under shard_map (jax 0.10.2 to 0.12.0): gather the table first.
            table = jax.lax.with_sharding_constraint(table, P(None, None))
        x_BLD = jnp.take(table, tokens_BL, axis=0).astype(config.dtype)
        document_BL = documents(tokens_BL, config.end_of_text)
        causal_LL = jnp.tri(tokens_BL.shape[1], dtype=bool)
        mask_BLL = document_BL[:, :, None] == document_BL[:, None, :]
        mask_BLL = mask_BLL & causal_LL[None]

        def block(x_BLD, block):
            return block(x_BLD, mask_BLL)

        layers = nnx.scan(
            nnx.remat(block) if config.remat else block,
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        return self.norm(layers(x_BLD, getattr(self, tree.STACKED)))


def documents(tokens_BL: jax.Array, end_of_text: int) -> jax.Array:
    """Number of the document each token is in; the end-of-text token ends its own.

    >>> import jax.numpy as jnp
    >>> documents(jnp.array([[5, 0, 7, 0, 0, 9]]), end_of_text=0)
    Array([[0, 0, 1, 1, 2, 3]], dtype=int32)
    """
    ends = (tokens_BL == end_of_text).astype(jnp.int32)
    return jnp.cumsum(ends, axis=-1, dtype=jnp.int32) - ends


def _abstract(config: ModelConfig):
    """The module's graph, and its state as shapes with logical axes, without arrays."""
    with nnx.use_eager_sharding(False):
        return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))


def init(config: ModelConfig, key: jax.Array) -> PyTree:
    """Parameters with the paper's initialization, a nested dict of arrays.

    Embeddings are N(0, 1); kernels N(0, 0.02^2), but `out`, `up` and `down` of layer
    l = 1, 2, ... N(0, 0.02^2 / 2l); the head is N(0, 1/D), cut at three standard
    deviations; norms are one.
    """
    with nnx.use_eager_sharding(False):
        return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(key))))


def logits(config: ModelConfig) -> Callable[[PyTree, jax.Array], jax.Array]:
    """What the model expects to follow each token, for sampling.

    Returns:
        A function of `(params, tokens [B, L])` to unnormalized log-probabilities
        `[B, L, V]` of the tokens after them, in float32 or wider.
    """
    graph, _ = _abstract(config)

    def predict(params, tokens):
        model = nnx.merge(graph, params)
        return model.head(model(tokens)).astype(_at_least_f32(config.dtype))

    return predict


def token_losses(config: ModelConfig) -> Callable[[PyTree, jax.Array], Any]:
    """The cross-entropy of each next token.

    Returns:
        A function of `(params, tokens [B, L + 1])` to the pair of the cross-entropies
        `[B, L]` in nats and the log-partition functions `[B, L]`, in float32 or wider.
    """
    graph, _ = _abstract(config)

    def losses(params, tokens):
        model = nnx.merge(graph, params)
        x_BLD, targets_BL = model(tokens[:, :-1]), tokens[:, 1:]
        length = targets_BL.shape[1]
        chunk = config.loss_chunk or length
        if length % chunk:
            divisors = [c for c in range(1, length + 1) if length % c == 0]
            raise ValueError(
                f"loss_chunk={chunk} does not divide the sequence length {length}; "
                f"it may be one of {divisors}"
            )

        @jax.checkpoint  # Logits are recomputed in the backward pass, chunk by chunk.
        def cross_entropy(x_BLD, targets_BL):
            logits_BLV = model.head(x_BLD).astype(_at_least_f32(config.dtype))
            log_z_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
            # A sum over a mask, not a gather: the vocabulary may be sharded.
            hit = jax.nn.one_hot(targets_BL, config.vocab_size, dtype=bool)
            logit_BL = jnp.sum(jnp.where(hit, logits_BLV, 0), axis=-1)
            return log_z_BL - logit_BL, log_z_BL

        # Cut along the sequence, so that the batch axis stays sharded as it is.
        cut = lambda a: jnp.moveaxis(
            a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0
        )
        join = lambda a: jnp.moveaxis(a, 0, 1).reshape(targets_BL.shape)
        pieces = jax.lax.map(lambda c: cross_entropy(*c), (cut(x_BLD), cut(targets_BL)))
        return jax.tree.map(join, pieces)

    return losses


def next_token_loss(config: ModelConfig) -> Callable[[PyTree, jax.Array], jax.Array]:
    """The training loss.

    Returns:
        A function of `(params, tokens [B, L + 1])` to the mean cross-entropy in nats
        per token, plus `z_loss` times the mean squared log-partition function.
    """
    losses = token_losses(config)

    def loss(params, tokens):
        cross_entropy_BL, log_z_BL = losses(params, tokens)
        loss = jnp.mean(cross_entropy_BL)
        if config.z_loss:
            loss += config.z_loss * jnp.mean(log_z_BL**2)
        return loss

    return loss


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Floating-point operations that training on one token takes.

    Six per parameter that multiplies an activation (two forward, four backward): all
    kernels and the head, not the embedding table and the norms. Plus `12 D L` per layer
    for queries times keys and weights times values, all L of them: the causal mask
    saves nothing in this convention (Chowdhery et al., PaLM, 2022, appendix B). What is
    recomputed to save memory does not count.

    >>> flops_per_token(ModelConfig(10, num_layers=1, width=8, head_dim=4), 2)
    5376
    """
    d, kv = config.width, config.kv_heads * config.head_dim
    kernels = 2 * d * d + 2 * d * kv + 3 * d * config.mlp_width
    matrices = config.num_layers * kernels + d * config.vocab_size
    return 6 * matrices + 12 * config.num_layers * d * sequence_length


def partition_specs(config: ModelConfig, mesh: Mesh) -> PyTree:
    """How the parameters are sharded over the axes of `mesh` inside a worker.

    Raises:
        ValueError: if a mesh axis does not divide what it shards.
    """
    _, state = _abstract(config)
    shapes = nnx.to_pure_dict(state)
    logical = nnx.to_pure_dict(nnx.get_partition_spec(state))

    def leaf(path, spec, shape):
        spec = P(*(RULES[axis] if RULES[axis] in mesh.shape else None for axis in spec))
        for axis, size in zip(spec, shape.shape, strict=True):
            if axis and size % mesh.shape[axis]:
                raise ValueError(
                    f"mesh axis {axis!r} of size {mesh.shape[axis]} does not divide "
                    f"{tree.name(path)} with shape {shape.shape}"
                )
        return spec

    return jax.tree_util.tree_map_with_path(leaf, logical, shapes)
