"""Every configuration builds, and every key is read."""

import importlib
import pathlib

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import default
from muloco_jax import experiment, settings

FOLDER = pathlib.Path(default.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))

ARGUMENTS = {"paper": ["416m,muloco,k8"]}  # The others take none.


def load(name):
    module = importlib.import_module(f"configs.{name}")
    return module.get_config(*ARGUMENTS.get(name, []))


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_is_locked_and_has_the_keys_of_the_default(name):
    config = load(name)
    assert config.is_locked
    assert dict(keys(config)).keys() == dict(keys(default.get_config())).keys()


# The data of the paper is for its users to bring.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "paper"])
def test_a_configuration_builds(name):
    experiment.build(load(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_says_how_it_is_run(name):
    text = importlib.import_module(f"configs.{name}").__doc__
    assert "python run.py" in text


def keys(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_no_value_is_none_and_every_key_has_a_comment():
    source = pathlib.Path(default.__file__).read_text().splitlines()
    for key, value in keys(default.get_config()):
        assert value is not None, key
        (line,) = (i for i, text in enumerate(source) if f"config.{key} = " in text)
        assert "#" in source[line] or source[line - 1].strip().startswith("#"), key


class Watched:
    """A configuration that remembers which keys were read."""

    def __init__(self, config, read, prefix=""):
        self._config, self._read, self._prefix = config, read, prefix

    def __getattr__(self, key):
        value = self._config[key]
        if isinstance(value, ConfigDict):
            return Watched(value, self._read, f"{self._prefix}{key}.")
        self._read.add(f"{self._prefix}{key}")
        return value

    __getitem__ = __getattr__

    def to_json(self):  # To compare keys, not to use them.
        return self._config.to_json()

    def to_dict(self):
        return {key: self[key] for key in self._config}


# The host loop alone reads these, and `experiment` has nothing to check about them.
OF_THE_HOST_LOOP = {"logging.tensorboard", "logging.wandb"}


def test_every_key_is_read(tmp_path):
    read = set()
    (tmp_path / "text.txt").write_text("a" * 10_000)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 10_000)
    tokens, path = np.zeros(10_000, "<u2"), str(tmp_path)
    tokens.tofile(tmp_path / "tokens.bin")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    (tmp_path / "tokens.llmc").write_bytes(header.tobytes() + tokens.tobytes())
    for keys_of_data in (
        {"format": "shakespeare"},
        {"format": "text", "path": path},
        {"format": "jsonl", "path": path},
        {"format": "nanogpt", "path": path, "vocab_size": 1},
        {"format": "llmc", "path": f"{path}/*.llmc", "vocab_size": 1},
    ):
        config = default.get_config()
        config.data.update(keys_of_data)
        experiment.build(Watched(config, read))
    assert read == dict(keys(default.get_config())).keys() - OF_THE_HOST_LOOP


def test_what_says_nothing_is_what_the_default_says():
    config = default.get_config()
    for key, (_, unset) in settings._USES.items():
        assert config.data[key] == unset, key
