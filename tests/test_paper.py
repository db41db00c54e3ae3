"""The paper's runs: numbers from its tables, and what follows from them."""

import itertools

import jax
import pytest

from configs import default, paper
from muloco_jax import model

# Millions of parameters, as the paper prints them.
PRINTED = {
    "150m": "150.6",
    "416m": "416.9",
    "914m": "914.3",
    "1760m": "1758.7",
    "3100m": "3065.4",
    "15b": "15229",
}
METHODS = [
    *itertools.product(("muloco", "diloco"), (1, 2, 4, 8, 16)),
    *itertools.product(("dp_muon", "dp_adamw"), (1,)),
]


@pytest.mark.parametrize("size, printed", PRINTED.items())
def test_sizes_are_those_of_the_paper_and_of_the_model(size, printed):
    config = paper.get_config(f"{size},dp_muon")
    sizes = model.ModelConfig(
        vocab_size=config.data.vocab_size,
        num_layers=config.model.num_layers,
        width=config.model.width,
        head_dim=config.model.head_dim,
        mlp_ratio=config.model.mlp_ratio,
    )
    shapes = jax.eval_shape(lambda: model.init(sizes, jax.random.key(0)))
    num = paper.num_params(config.model.num_layers, config.model.width)
    assert num == sum(x.size for x in jax.tree.leaves(shapes))
    assert f"{num / 1e6:.{len(printed.partition('.')[2])}f}" == printed


@pytest.mark.parametrize(
    "run, batch_size, steps",
    [
        ("150m,dp_muon", 512, 2880),
        ("416m,muloco,k8", 512, 8160),
        ("914m,diloco,k2", 512, 17_520),
        ("1760m,dp_adamw", 512, 33_600),
        ("3100m,dp_muon", 512, 58_560),
        ("3100m,dp_adamw", 256, 117_120),
        ("3100m,muloco,k16", 2048, 14_640),
        ("3100m,diloco,k16", 1024, 29_280),
        ("15b,diloco,k1", 512, 290_640),
        ("15b,dp_muon", 2048, 72_660),
        ("15b,dp_adamw", 1024, 145_320),
        ("15b,muloco,k16", 4096, 36_330),
        ("15b,muloco,k1", 8192, 18_180),  # 18165 is no multiple of 30.
    ],
)
def test_batches_and_steps_are_the_papers(run, batch_size, steps):
    config = paper.get_config(run)
    assert (config.data.batch_size, config.steps) == (batch_size, steps)


@pytest.mark.parametrize(
    "run, rate, decay, outer",
    [
        ("416m,muloco,k8", 0.0625, 0.00125, ("nesterov", 0.9, 0.8)),
        ("416m,diloco,k8", 0.003906, 0.00125, ("nesterov", 0.9, 0.9)),
        ("3100m,muloco,k16", 0.015625, 0.00025, ("nesterov", 1.0, 0.9)),
        ("3100m,diloco,k16", 0.000691, 0.000125, ("nesterov", 1.0, 0.9)),
        ("15b,dp_muon", 0.011049, 0.0004, ("sgd", 1.0, 0.0)),
        ("3100m,dp_adamw", 0.001381, 0.0005, ("sgd", 1.0, 0.0)),
        # Not known: 914M is nearer to 417M, 1.76B to 3.1B, K = 2 to 1, K = 4 to 8.
        ("914m,muloco,k2", 0.0625, 0.005, ("nesterov", 0.7, 0.6)),
        ("1760m,diloco,k4", 0.000691, 0.00025, ("nesterov", 0.9, 0.9)),
        ("150m,diloco,k1", 0.003906, 0.001, ("nesterov", 0.7, 0.8)),
    ],
)
def test_optimizers_are_those_of_known_runs(run, rate, decay, outer):
    config = paper.get_config(run)
    assert config.inner.name == ("muon" if "mu" in run else "adamw")
    assert config.inner.learning_rate == pytest.approx(rate, rel=1e-3)
    assert config.inner.weight_decay == pytest.approx(decay)
    found = config.outer
    assert (found.name, found.learning_rate, found.momentum) == outer


@pytest.mark.parametrize("size", PRINTED)
@pytest.mark.parametrize("method, num", METHODS)
def test_every_run_holds_together(size, method, num):
    arguments = [f"{size},{method},k{num}"]
    if method.startswith("dp_"):
        arguments.append(f"{size},{method}")
    for argument in arguments:
        config = paper.get_config(argument)
        assert config.is_locked
        keys = lambda config: jax.tree.structure(config.to_dict())
        assert keys(config) == keys(default.get_config())
        assert config.workers.num == num
        assert config.data.batch_size % num == 0
        assert config.steps % config.sync_every == 0
        assert config.schedule.warmup_steps < config.steps
        assert config.data.sequence_length % config.model.loss_chunk == 0


@pytest.mark.parametrize(
    "argument",
    [
        "",
        "416m",
        "416m,muloco",
        "417m,muloco,k8",
        "417m,dp_muon",
        "416m,sgd,k8",
        "416m,muloco,k3",
        "416m,muloco,8",
        "416m,dp_muon,k8",
        "416m,dp_muon,k1,k1",
        "416m,muloco,k8,k8",
        "416m, muloco, k8",
    ],
)
def test_a_run_that_there_is_not_is_answered_with_those_there_are(argument):
    with pytest.raises(ValueError) as error:
        paper.get_config(argument)
    text = str(error.value)
    assert text.endswith(f"got {argument!r}")
    assert "150m, 416m, 914m, 1760m, 3100m, 15b" in text
    assert "muloco, diloco, dp_muon, dp_adamw" in text
    assert "k1, k2, k4, k8, k16" in text
    assert "\n" not in text


def test_what_is_left_to_the_defaults_is_the_papers():
    config = default.get_config()
    assert (config.inner.muon_momentum, config.inner.muon_nesterov) == (0.9, False)
    assert (config.inner.adam_b1, config.inner.adam_b2) == (0.9, 0.99)
    assert config.inner.adam_eps == 1e-8
    assert config.outer.name == "nesterov"
    assert (config.model.mlp_ratio, config.model.rope_theta) == (2.75, 5e5)
    assert (config.model.num_kv_heads, config.model.z_loss) == (0, 0.0)
