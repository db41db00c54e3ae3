"""Configurations become values, and what does not hold together says so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import assert_close, assert_near
from small_run import SETTINGS, settings, write_text

import muloco_jax as mj
from configs import default
from muloco_jax import corpus, data, experiment, model


@pytest.fixture
def config(tmp_path):
    """A small one, with text of its own."""
    write_text(tmp_path)
    config = default.get_config()
    config.update_from_flattened_dict(
        settings(tmp_path, **{"steps": 4, "evaluation.batch_size": 3})
    )
    return config


def test_the_schedule_is_the_papers():
    """T = 8161 and W = 500 of the authors' code, whose values these are."""
    config = default.get_config()
    config.steps, config.schedule.warmup_steps = 8161, 500
    config.inner.learning_rate = 1.0
    schedule = experiment.learning_rate_schedule(config)
    expected = {0: 0.002, 499: 1, 500: 1, 501: 0.99999996, 4330: 0.55009227}
    for step, value in (expected | {8160: 0.10000004}).items():
        assert float(schedule(step)) == pytest.approx(value, abs=1e-7)


def test_batches_may_grow(config):
    """Rounds of two steps: one of 8 sequences a step, then one of 16."""
    config.schedule.batch_sizes, config.data.batch_size = ((2, 8),), 16
    built = experiment.build(config)
    assert built.plan.examples.tolist() == [0, 16, 48]
    first, second = built.batches(0), built.batches(1)
    assert (first.shape, second.shape) == ((4, 2, 2, 17), (4, 2, 4, 17))
    # The same stream of examples, dealt out in larger batches.
    config.schedule.batch_sizes, config.data.batch_size = (), 8
    config.steps = 6
    even = experiment.build(config)
    order = lambda x: np.concatenate(np.asarray(x).swapaxes(0, 1).reshape(-1, 17)[None])
    expected = np.concatenate([order(even.batches(r)) for r in range(3)])
    np.testing.assert_array_equal(
        np.concatenate([order(first), order(second)]), expected
    )


def test_every_key_of_the_inner_optimizer_reaches_muon():
    config = default.get_config()
    values = {
        "weight_decay": 0.3,
        "muon_momentum": 0.7,
        "muon_nesterov": True,
        "adam_b1": 0.8,
        "adam_b2": 0.6,
        "adam_eps": 0.01,
        "clip_norm": 0.5,
    }
    config.inner.update(values)
    rate = optax.constant_schedule(0.1)
    expected = optax.chain(
        optax.clip_by_global_norm(0.5),
        mj.muon(
            rate,
            beta=0.7,
            nesterov=True,
            weight_decay=0.3,
            adam_b1=0.8,
            adam_b2=0.6,
            adam_eps=0.01,
        ),
    )
    params = {"up": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}
    trajectories = []
    for optimizer in (experiment.inner_optimizer(config, rate), expected):
        theta, state = params, optimizer.init(params)
        for step in range(3):  # Of a constant gradient Adam forgets its betas.
            grads = jax.tree.map(lambda x, step=step: jnp.cos(x + step), params)
            updates, state = optimizer.update(grads, state, theta)
            theta = optax.apply_updates(theta, updates)
        trajectories.append(theta)
    assert_close(*trajectories, 0)


def test_adamw_inside_is_diloco():
    """One step of AdamW on a unit gradient moves by the learning rate of that step."""
    config = default.get_config()
    config.inner.name, config.inner.clip_norm = "adamw", 0.0
    optimizer = experiment.inner_optimizer(config, optax.constant_schedule(0.5))
    params = {"up": jnp.zeros((2, 2))}
    updates, _ = optimizer.update({"up": jnp.eye(2)}, optimizer.init(params), params)
    assert_near(updates["up"], -0.5 * np.eye(2), atol=1e-7)


def test_gradients_are_clipped_before_the_optimizer():
    config = default.get_config()
    config.inner.name, config.inner.clip_norm = "adamw", 1e-3
    config.inner.adam_eps = 1.0  # So that the size of the gradient matters.
    optimizer = experiment.inner_optimizer(config, optax.constant_schedule(1.0))
    params = {"up": jnp.zeros(1)}
    updates, _ = optimizer.update({"up": jnp.ones(1)}, optimizer.init(params), params)
    assert_near(updates["up"], [-1e-3 / 1.001], atol=1e-9)


@pytest.mark.parametrize(
    "name, first, second", [("nesterov", 1.5, 1.75), ("sgd", 1, 1.5)]
)
def test_the_outer_optimizers_by_hand(name, first, second):
    """Momentum 0.5 and a constant delta: b = 1, 1.5; delta + 0.5 b, or b itself."""
    config = default.get_config()
    config.outer.name, config.outer.momentum, config.outer.learning_rate = (
        name,
        0.5,
        2.0,
    )
    optimizer, state = experiment.outer_optimizer(config), None
    state = optimizer.init(jnp.zeros(()))
    for expected in (first, second):
        updates, state = optimizer.update(jnp.ones(()), state)
        assert_near(updates, -2.0 * expected)


def test_building_takes_devices_for_each_worker(config):
    built = experiment.build(config)
    assert dict(built.plan.workers.mesh.shape) == {"workers": 4}
    config.mesh.data = 2
    mesh = experiment.plan(config).workers.mesh
    assert dict(mesh.shape) == {"workers": 4, "data": 2}
    config.mesh.tensor, config.model.vocab_multiple = 2, 2
    mesh = experiment.plan(config).workers.mesh
    assert dict(mesh.shape) == {"workers": 2, "data": 2, "tensor": 2}


def test_batches_are_placed_over_workers_and_data(config):
    config.mesh.data = 2
    built = experiment.build(config)
    batch = built.batches(1)
    assert batch.shape == (4, 2, 2, 17)
    assert {s.data.shape for s in batch.addressable_shards} == {(1, 2, 1, 17)}
    config.mesh.data = 1
    np.testing.assert_array_equal(batch, experiment.build(config).batches(1))


def test_counts_are_those_of_the_parts(config):
    built = experiment.build(config)
    plan, params = built.plan, built.plan.init()
    assert plan.num_params == sum(x.size for x in jax.tree.leaves(params))
    assert plan.wire_bytes == 2 * 3 * 4 * plan.num_params // 4
    assert plan.rounds == 2
    assert plan.examples.tolist() == [0, 16, 32]
    assert_near(plan.learning_rates[:2], [0.03, 0.03], atol=1e-7)
    assert len(plan.learning_rates) == 4
    state = plan.algorithm.init(params)

    def assert_alike(shape, x):
        assert (shape.shape, shape.dtype) == (x.shape, x.dtype)
        assert shape.sharding.is_equivalent_to(x.sharding, x.ndim)

    jax.tree.map(assert_alike, plan.state, state)


@pytest.mark.parametrize("inside", [{}, {"data": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_evaluation_is_the_mean_over_all_held_out_tokens(config, inside):
    """By the sum over windows, one by one; padding and the mesh change nothing."""
    for axis, size in inside.items():
        config.mesh[axis] = size
    config.model.vocab_multiple = 2  # 257 is odd.
    built = experiment.build(config)
    params = built.plan.init()
    tokens = data.tokenize(
        corpus.text_files(
            corpus.find_files(config.data.path, "*.txt", config.data.held_out)
        ),
        data.BYTES,
        config.data.cache,
    )
    sizes = model.ModelConfig(
        258, 1, 16, 8, mlp_ratio=2.0, end_of_text=data.BYTES.end_of_text
    )
    losses = model.token_losses(sizes)
    host = jax.device_get(params)
    held_out = np.asarray(tokens.held_out, np.int32)
    total = 0.0
    for start in range(0, len(held_out) - 1, 16):
        window = held_out[start : start + 17]
        total += float(losses(host, jnp.asarray(window)[None])[0].sum())
    expected = total / (len(held_out) - 1)
    assert built.held_out_tokens == len(held_out) - 1 == 84
    assert float(built.evaluate(params)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("steps", 0, "steps must be at least 1, got 0"),
        ("steps", 5, "steps=5 is not a multiple of sync_every=2; .* 4 or 6"),
        ("workers.num", 0, "workers.num must be at least 1, got 0"),
        (
            "data.batch_size",
            9,
            "batch_size=9 is not a multiple of workers.num=4; .* 8 or 12",
        ),
        ("data.batch_size", 2, "batch_size=2 is not a multiple .* nearest that is: 4"),
        ("mesh.workers", 3, "4 workers do not divide evenly over .* size 1, 2, 4"),
        ("mesh.workers", 16, "needs 16 devices, but there are 8; make one"),
        ("mesh.tensor", 16, "needs 16 devices, but there are 8"),
        ("mesh.tensor", 2, "'tensor' of size 2 does not divide embed/embedding"),
        ("inner.name", "lion", "inner.name must be 'muon' or 'adamw', got 'lion'"),
        (
            "inner.learning_rate",
            -1.0,
            "inner.learning_rate must be at least 0, got -1.0",
        ),
        (
            "inner.muon_momentum",
            1.0,
            "muon_momentum must be at least 0 and less than 1",
        ),
        ("outer.name", "adam", "outer.name must be 'nesterov' or 'sgd', got 'adam'"),
        ("outer.momentum", 1.0, "outer.momentum must be .* less than 1, got 1.0"),
        (
            "schedule.pieces",
            (("square", 0, 0.1),),
            "schedule: a piece must be 'cosine', 'linear' or 'constant', got 'square'",
        ),
        (
            "schedule.pieces",
            (("cosine", 9, 0.1),),
            r"schedule: pieces of \[9\] steps .* 3",
        ),
        ("schedule.batch_sizes", ((1, 8),), "batch_sizes: a piece of 1 steps cuts"),
        ("schedule.batch_sizes", ((8, 8),), "batch_sizes: pieces .* sum up to 4"),
        ("schedule.batch_sizes", ((2, 9),), "a batch of schedule.batch_sizes=9 is not"),
        ("data.microbatch", -1, "data.microbatch must be at least 0, got -1"),
        ("data.microbatch", 3, "workers.num=2 is not a multiple of data.microbatch=3"),
        ("checkpoint.keep", 0, "checkpoint.keep must be at least 1, got 0"),
        ("checkpoint.every_rounds", -1, "checkpoint.every_rounds must be at least 0"),
        (
            "checkpoint.may_change",
            ("inner.lr",),
            "checkpoint.may_change names 'inner.lr', which is no key",
        ),
        ("schedule.warmup_steps", 4, "warmup_steps=4 must be less than steps=4"),
        ("inner.adam_eps", -1.0, "inner.adam_eps must be at least 0, got -1.0"),
        ("model.rope_theta", 0.0, "model.rope_theta must be positive, got 0"),
        ("model.z_loss", float("nan"), "model.z_loss must be finite .* got nan"),
        ("model.mlp_ratio", float("inf"), "model.mlp_ratio must be finite .* got inf"),
        ("data.held_out", 0.0, "held_out must be between 0 and 1, got 0.0"),
        ("model.num_layers", 0, "model.num_layers must be positive, got 0"),
        (
            "model.loss_chunk",
            5,
            "sequence_length=16 is not a multiple of model.loss_chunk=5",
        ),
        (
            "data.format",
            "csv",
            "data.format must be one of .*'shakespeare', .*, got 'csv'",
        ),
        ("data.format", "shakespeare", "path=.*, but .* 'shakespeare', which has no"),
        ("data.format", "nanogpt", "cache=.* leave it at '', or .* to shakespeare or"),
        ("data.field", "body", "field=body .* leave it at 'text', or .* to jsonl"),
        ("data.vocab_size", 9, "vocab_size=9 .* at 0, or .* to nanogpt or llmc"),
        ("data.vocab_size", -1, "data.vocab_size must be at least 0, got -1"),
        ("data.end_of_text", 0, "end_of_text=0 is given, .* leave it at -1, or"),
        ("data.end_of_text", -2, "data.end_of_text must be at least -1, got -2"),
        ("data.held_out_path", "nowhere.txt", "no file matches nowhere.txt"),
        ("data.path", "nowhere.txt", "no file matches nowhere.txt"),
        ("data.sequence_length", 4096, "0 examples of length 4096"),
        ("seed", 2**31, "seed must be at least 0 and less than 2147483648, got 21"),
        ("data.held_out", 1.0, "data.held_out must be between 0 and 1, got 1.0"),
        ("inner.learning_rate", float("inf"), "at least 0 and finite, got inf"),
        ("inner.learning_rate", float("nan"), "at least 0 and finite, got nan"),
        ("schedule.pieces", ("cosine", 0, 0.1), r"must be \(shape, .* a comma"),
        ("schedule.pieces", (("cosine", 0),), r"must be \(shape, steps, fraction\)"),
        ("schedule.pieces", (("cosine", 0.5, 0.1),), "of types str, int, float, got"),
        ("schedule.pieces", (("cosine", True, 0.1),), "of types str, int, float, got"),
        ("schedule.batch_sizes", (2, 8), r"must be \(steps, batch size\), .* got 2"),
        ("schedule.batch_sizes", ((2, 8.0),), "of types int, int, got"),
        ("schedule.batch_sizes", ((2, 0),), "a batch size must be at least 1, got 0"),
        ("checkpoint.may_change", ("inner.l",), "names 'inner.l', which is no key"),
        ("checkpoint.may_change", ("",), "names '', which is no key and no section"),
        ("checkpoint.may_change", (5,), "names 5, which is no key and no section"),
        ("mesh.workers", 2**40, "mesh.workers must be at least 0 and less than"),
        ("seed", -1, "seed must be at least 0, got -1"),
    ],
)
def test_what_does_not_hold_together_says_what_would(config, key, value, message):
    config.update_from_flattened_dict({key: value})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        experiment.build(config)


def shard_config(path):
    config = default.get_config()
    values = SETTINGS | {"data.format": "nanogpt", "data.vocab_size": 10}
    config.update_from_flattened_dict(values | {"steps": 4, "data.path": str(path)})
    return config


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("data.vocab_size", 0, "data.vocab_size=0 must be above 0 .* do not say it"),
        ("data.end_of_text", 10, "vocab_size=10 must be above .* data.end_of_text=10"),
        ("data.field", "body", "'nanogpt', which has no use for it"),
        ("data.cache", "here", "data.cache=here is given, but .* 'nanogpt'"),
    ],
)
def test_the_vocabulary_of_shards_is_checked_before_a_file_is_read(key, value, message):
    config = shard_config("nowhere.bin")
    sizes = experiment.plan(config).model
    assert (sizes.vocab_size, sizes.end_of_text) == (10, -1)
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=message):
        experiment.plan(config)


def test_the_vocabulary_of_shards_is_that_of_the_model():
    config = shard_config("nowhere.bin")
    config.data.end_of_text, config.model.vocab_multiple = 3, 4
    sizes = experiment._model_config(config, experiment._vocabulary(config))
    assert (sizes.vocab_size, sizes.end_of_text) == (12, 3)


def test_shards_are_trained_on_each_by_itself(tmp_path):
    """Ids below five in the first and from five in the second: no window has both."""
    for number in range(2):
        (np.arange(163) % 5 + 5 * number).astype("<u2").tofile(
            tmp_path / f"{number}.bin"
        )
    config = shard_config(tmp_path)
    built = experiment.build(config)
    assert built.held_out_tokens == 16
    assert built.held_out_bytes == 0
    side = np.asarray(built.batches(0)) >= 5
    assert (side == side[..., :1]).all()
    assert {bool(s) for s in side[..., 0].ravel()} == {True, False}


def test_files_held_out_whole_reach_the_evaluation(config, tmp_path):
    (tmp_path / "held_out.txt").write_text("x" * 20)
    config.data.held_out_path = str(tmp_path / "held_out.txt")
    built = experiment.build(config)
    assert built.held_out_tokens == 21
    config.data.held_out_path = config.data.path
    with pytest.raises(ValueError, match=r"text\.txt is in both"):
        experiment.build(config)


def test_less_held_out_text_than_one_sequence_is_refused(config):
    config.data.held_out = 0.005
    with pytest.raises(ValueError, match=r"8 tokens to predict, .* of length 16"):
        experiment.build(config)


def test_the_field_of_json_reaches_the_corpus(config, tmp_path):
    lines = '{"body": "to be or not to be"}\n' * 60
    (tmp_path / "rows.jsonl").write_text(lines)
    config.data.path, config.data.format = str(tmp_path), "jsonl"
    with pytest.raises(ValueError, match=r"line 1 of .*rows\.jsonl: has no 'text'"):
        experiment.build(config)
    config.data.field = "body"
    assert experiment.build(config).held_out_bytes > 0
