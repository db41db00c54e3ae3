"""Settings of a trainer small enough for tests, with text of its own."""

SETTINGS = {
    "sync_every": 2,
    "inner.learning_rate": 0.03,
    "schedule.warmup_steps": 1,
    "model.width": 16,
    "model.head_dim": 8,
    "model.num_layers": 1,
    "model.mlp_ratio": 2.0,
    "data.format": "text",
    "data.sequence_length": 16,
    "data.batch_size": 8,
}


def write_text(folder):
    """1680 bytes."""
    text = "to be or not to be, that is the question. " * 40
    (folder / "text.txt").write_text(text)


def settings(folder, **others):
    """Flat keys of a configuration that trains on the text in `folder`."""
    data = {"data.path": str(folder / "text.txt"), "data.cache": str(folder)}
    return SETTINGS | data | others
