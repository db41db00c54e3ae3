"""The MuLoCo paper's runs: six sizes, four methods, up to sixteen workers.

    python run.py --config=configs/paper.py:416m,muloco,k8 --config.data.path=TOKENS

The argument is SIZE,METHOD,K: 150m, 416m, 914m, 1760m, 3100m or 15b; muloco, diloco,
dp_muon or dp_adamw; k1, k2, k4, k8 or k16 (data-parallel methods go without). TOKENS
are token shards of llm.c by the tokenizer of Llama 3.1. Set `mesh.*` for your devices.

None of it has been run here. On its own data, held-out Nemotron-CC, the paper reports a
loss of 2.638 for 416m,muloco,k1 and of 2.641 for 416m,dp_muon.

The momenta and their decays, the cosine to a tenth, the ratio of the MLP and the rotary
base are those of `default.py`, which are the paper's. Its table of tuned learning rates
was not published: rates and outer settings are those of the nearest run that is known.

Paper: Therien et al., MuLoCo, https://arxiv.org/abs/2505.23725
Its code, "the code" below: https://github.com/facebookresearch/MuLoCo
"""

import math

from ml_collections import ConfigDict

from configs import default

INNER = {"muloco": "muon", "diloco": "adamw", "dp_muon": "muon", "dp_adamw": "adamw"}
WORKERS = {"k1": 1, "k2": 2, "k4": 4, "k8": 8, "k16": 16}

# Layers and width: six layers for each 512 (the code, model_map.py).
SIZES = {
    "150m": (6, 512),
    "416m": (12, 1024),
    "914m": (18, 1536),
    "1760m": (24, 2048),
    "3100m": (30, 2560),
    "15b": (54, 4608),
}
HEAD_DIM = 128  # The code, model_map.py.
VOCABULARY = 128_256  # Llama 3.1's.

# Sequences per inner step over all workers: the best of those swept at 3.1B, read off
# the paper's figure of loss over batch size, and those of the 15B runs in its figure of
# wall-clock time, where K = 2, 4 and 8 were not run. Of MuLoCo with one worker it says
# that rescaled weight decays are 5e-4 to 5e-3, which are those of 256. Elsewhere 512,
# where the code tunes weight decays; the best batch may be another.
BATCH_SIZE = {
    ("150m", "muloco", 1): 256,
    ("416m", "muloco", 1): 256,
    ("914m", "muloco", 1): 256,
    ("1760m", "muloco", 1): 256,
    ("3100m", "muloco", 1): 256,
    ("3100m", "muloco", 8): 1024,
    ("3100m", "muloco", 16): 2048,
    ("3100m", "diloco", 1): 256,
    ("3100m", "diloco", 16): 1024,
    ("3100m", "dp_adamw", 1): 256,
    ("15b", "muloco", 1): 8192,
    ("15b", "muloco", 16): 4096,
    ("15b", "diloco", 16): 2048,
    ("15b", "dp_muon", 1): 2048,
    ("15b", "dp_adamw", 1): 1024,
}

# Weight decay of one worker with 512 sequences (the code, OPTIMAL_WD_MAP).
WEIGHT_DECAY = {
    "150m": {"muon": 0.01, "adamw": 0.001},
    "416m": {"muon": 0.01, "adamw": 0.01},
    "914m": {"muon": 0.01, "adamw": 0.01},
    "1760m": {"muon": 0.001, "adamw": 0.001},
    "3100m": {"muon": 0.001, "adamw": 0.001},
    "15b": {"muon": 0.0001, "adamw": 0.0001},
}

# Peak inner learning rate, by millions of parameters. Known runs (the code, its jobs):
# MuLoCo at 417M with K = 8 and 512 sequences, at 3.1B with K = 16 and 2048;
# data-parallel Muon at 15B with 2048; DiLoCo at 417M with K = 8 and 512 sequences, at
# 3.1B with K = 16 and 1024; data-parallel AdamW at 3.1B with 256 (of several in a
# comment there). All are powers of sqrt(2), as the paper's grid is.
_MUON_RATE = {417: 2**-4, 3065: 2**-6, 15_229: 2**-6.5}
LEARNING_RATE = {
    "muloco": _MUON_RATE,
    "dp_muon": _MUON_RATE,
    "diloco": {417: 2**-8, 3065: 2**-10.5},
    "dp_adamw": {417: 2**-8, 3065: 2**-9.5},
}

# Outer learning rate and momentum, by K. K = 1: the paper for MuLoCo, "at every scale";
# for DiLoCo its momentum, and the rate of the authors' package muloco-1. K = 8, at
# 417M, and K = 16, at 3.1B: the code, its jobs. So K = 2 has those of 1, and 4 of 8.
OUTER = {
    "muloco": {1: (0.7, 0.6), 8: (0.9, 0.8), 16: (1.0, 0.9)},
    "diloco": {1: (0.7, 0.8), 8: (0.9, 0.9), 16: (1.0, 0.9)},
}


def get_config(argument: str = "") -> ConfigDict:
    size, method, num_workers = _parse(argument)
    layers, width = SIZES[size]
    params = num_params(layers, width)
    batch_size = BATCH_SIZE.get((size, method, num_workers), 512)

    config = default.get_config()
    config.sync_every = 30  # H (the paper).
    # 20 tokens a parameter, embeddings included (the code, model_map.py): steps of 512
    # sequences of 2048 tokens, 2^20, up to a multiple of 240. With other batches as
    # many tokens, up to a multiple of H: just for 15b,muloco,k1 18180 and not 18165.
    steps_of_512 = 240 * math.ceil(20 * params / (240 * 2**20))
    config.steps = 30 * math.ceil(steps_of_512 * 512 / (30 * batch_size))
    config.workers.num = num_workers

    config.inner.name = INNER[method]
    config.inner.learning_rate = _nearest(LEARNING_RATE[method], params / 1e6)
    # In proportion to the batch of a worker (the code, its jobs).
    tuned = WEIGHT_DECAY[size][INNER[method]]
    config.inner.weight_decay = tuned * batch_size / (512 * num_workers)
    config.inner.clip_norm = 1.0  # The code, its configurations.
    config.schedule.warmup_steps = 500  # At every batch size (the code, its jobs).
    if method in OUTER:
        outer = _nearest(OUTER[method], num_workers)
        config.outer.learning_rate, config.outer.momentum = outer
    else:  # As in dp_muon.py: the outer step does nothing.
        config.outer.name = "sgd"
        config.outer.learning_rate, config.outer.momentum = 1.0, 0.0

    config.model.num_layers, config.model.width = layers, width
    config.model.head_dim = HEAD_DIM
    # The code's mixed precision with FSDP; up to 416M its residual stays in float32.
    config.model.dtype = "bfloat16"
    config.model.remat = True  # Activations of up to 54 layers would not fit.
    # Logits of a sequence are then 131 MB at a time in float32, and not 1.05 GB.
    config.model.loss_chunk = 256

    config.data.format = "llmc"
    config.data.vocab_size = VOCABULARY
    # What llm.c puts between documents with this tokenizer: its <|begin_of_text|>.
    # Other writers take <|end_of_text|>, 128001.
    config.data.end_of_text = 128_000
    config.data.sequence_length = 2048  # The code, its configurations.
    config.data.batch_size = batch_size
    return config


def num_params(layers: int, width: int) -> int:
    """Parameters of the model, embeddings included."""
    embedding_and_head = 2 * VOCABULARY * width
    matrices = 4 * width**2 + 3 * int(2.75 * width) * width  # Attention, MLP.
    norms = 4 * width + 2 * HEAD_DIM  # Around attention and MLP, of queries and keys.
    return embedding_and_head + layers * (matrices + norms) + width  # The last norm.


def _nearest(table, x):
    """The entry whose key has the nearest logarithm."""
    return table[min(table, key=lambda known: abs(math.log(known / x)))]


def _parse(argument):
    """Size, method and number of workers."""
    match argument.split(","):
        case [size, ("dp_muon" | "dp_adamw") as method, *rest]:
            if size in SIZES and rest in ([], ["k1"]):
                return size, method, 1
        case [size, ("muloco" | "diloco") as method, workers]:
            if size in SIZES and workers in WORKERS:
                return size, method, WORKERS[workers]
    raise ValueError(
        f"paper.py takes SIZE,METHOD,K as in --config=configs/paper.py:416m,muloco,k8, "
        f"with SIZE one of {', '.join(SIZES)}, METHOD one of {', '.join(INNER)}, and K "
        f"one of {', '.join(WORKERS)} (of dp_muon and dp_adamw only k1, or none); got "
        f"{argument!r}"
    )
