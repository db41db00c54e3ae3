"""Names decide what a parameter is."""

import jax
import pytest
from flax import nnx

from muloco_jax import tree

HIDDEN = [
    "blocks/attention/query/kernel",
    "blocks/mlp/gate/kernel",
    "layers/0/multi_head_attention/out/kernel",
    "layers_3/gate_proj/kernel",
    "params/Dense_0/kernel",
    "encoder/normalizer_free/kernel",
    "layers/0/ember/kernel",
    "blocks/attention/output/kernel",
    "blocks/attention/head_proj/kernel",
    "blocks/mlp/position_wise/kernel",
    "decoder/proj_pos_feed/kernel",
    "0/1",
]
NOT_HIDDEN = [
    "embed/embedding",
    "params/Embed_0/embedding",
    "tok_embeddings/weight",
    "model/embed_tokens/weight",
    "tok_emb/weight",
    "pos_emb",
    "emb/kernel",
    "token_embedding_table",
    "to_logits/kernel",
    "logits_dense/kernel",
    "classifier/kernel",
    "mlm_head/kernel",
    "out_head/kernel",
    "lm_head_proj/kernel",
    "embed_out/kernel",
    "readout/kernel",
    "blocks/moe/router_weights",
    "norm1/weight",
    "output/weight",
    "params/output/kernel",
    "value_head/kernel",
    "lmHead/kernel",
    "model/tokenEmbedding/weight",
    "transformer/wte/embedding",
    "transformer/wpe/embedding",
    "unembed/kernel",
    "lm_head/kernel",
    "head/kernel",
    "params/head_0/kernel",
    "logits/kernel",
    "classifier_head/kernel",
    "blocks/pre_attention_norm/scale",
    "blocks/attention/q_norm/weight",
    "params/LayerNorm_0/scale",
    "params/RMSNorm_12/scale",
    "ln_f/weight",
    "ln1/weight",
    "blocks/moe/router/kernel",
    "blocks/mlp/up/bias",
    "vocab/kernel",
    "vocab_proj/kernel",
    "embed/W_E",
    "unembed/W_U",
    "pos_embed/W_pos",
    "pos",
    "encoder/pos_table",
    "position/weight",
    "blocks/attention/rel_bias",
    "blocks/attention/relative_position_bias_table",
    "cls_token",
    "register_tokens",
]


@pytest.mark.parametrize("path", HIDDEN)
def test_matrices_between_layers_may_be_hidden(path):
    assert tree.may_be_hidden(path)


@pytest.mark.parametrize("path", NOT_HIDDEN)
def test_embeddings_heads_norms_routers_and_biases_are_not_hidden(path):
    assert not tree.may_be_hidden(path)


@pytest.mark.parametrize(
    "path, expected",
    [
        ("blocks/mlp/up/kernel", True),
        ("decoder/blocks/up", True),
        ("blocks/3/up/kernel", False),
        ("blocks/layer_0/up/kernel", False),
        ("layers/up/kernel", False),
        ("blocks_0/up/kernel", False),
    ],
)
def test_leaves_under_blocks_are_stacked_unless_blocks_is_a_list(path, expected):
    assert tree.is_stacked(path) is expected


def test_a_variable_of_nnx_has_the_name_of_its_place():
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    names = [tree.name(path) for path, _ in jax.tree.leaves_with_path(state)]
    assert sorted(names) == ["bias", "kernel"]
    assert tree.name((jax.tree_util.DictKey("value"),)) == "value"
