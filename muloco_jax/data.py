"""Documents to batches of tokens, by an integer position.

The tokens of a corpus are made once and kept in a memory-mapped file, as one stream in
which every document is followed by an end-of-text token, and the first also preceded by
one:

    eot doc_1 eot doc_2 eot ... doc_n eot
    |------- train -------|--- held out ---|

Token shards are tokens already. Each is a stream of its own, and is read where it lies.

Training examples are windows of L + 1 tokens of a stream that overlap by one, so that
every token is predicted once an epoch, but for the first of each stream and the fewer
than L that remain. They are shuffled globally, anew each epoch, by random access. So
the whole state of the data is one number, the examples consumed, and what it yields
depends neither on the number of workers nor on that of processes.
"""

import hashlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grain
import numpy as np

from muloco_jax import shards
from muloco_jax.corpus import Corpus, Files


class Tokenizer(NamedTuple):
    """Bytes to token ids.

    Attributes:
        name: part of the key of the cache; a new one for each change of behaviour.
        vocab_size: number of ids.
        end_of_text: id that ends a document.
        encode: the bytes of a document -> its ids.
    """

    name: str
    vocab_size: int
    end_of_text: int
    encode: Callable[[bytes], np.ndarray]


# One token per byte.
BYTES = Tokenizer("bytes", 257, 256, lambda text: np.frombuffer(text, np.uint8))


class Tokens(NamedTuple):
    """What is trained on, memory-mapped, and what is held out.

    Attributes:
        train: ids `[tokens]` of each stream.
        held_out: ids `[1 + tokens]`; the first is context alone.
        held_out_bytes: bytes of text in the held-out part; 0 if unknown.
        fingerprint: hexadecimal, of the data and their split, wherever the files lie;
            it tells texts apart by every byte, shards by name, size and both ends.
    """

    train: tuple[np.ndarray, ...]
    held_out: np.ndarray
    held_out_bytes: int
    fingerprint: str


def tokenize(corpus: Corpus, tokenizer: Tokenizer, cache: str = "") -> Tokens:
    """The tokens of a corpus, made at the first call and then read from a cache.

    Args:
        corpus: the documents.
        tokenizer: what turns them into ids.
        cache: a folder; by default `~/.cache/muloco_jax` (or under XDG_CACHE_HOME).

    Raises:
        ValueError: if nothing would be held out, or everything.
    """
    digest = hashlib.sha256(f"{corpus.version} {tokenizer.name}".encode())
    sizes = []
    for text in corpus.documents():
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
        sizes.append(len(text))
    key = digest.hexdigest()[:32]
    file = _cache_folder(cache) / f"{key}.bin"
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    stream = _read(file, dtype)
    ends = np.flatnonzero(stream == tokenizer.end_of_text)
    if len(ends) != len(sizes) + 1:  # One in front, and one after each document.
        _write(file, corpus, tokenizer, dtype)
        stream = _read(file, dtype)
        ends = np.flatnonzero(stream == tokenizer.end_of_text)
    if whole := corpus.held_out_documents:
        held_out = len(stream) - 1 - int(ends[-1 - whole])
        held_out_bytes = sum(sizes[-whole:])
    else:
        held_out = round(corpus.held_out_share * len(stream))
        # A document may be cut, so bytes are charged by the share of tokens.
        texts = held_out - np.count_nonzero(ends >= len(stream) - held_out)
        held_out_bytes = round(sum(sizes) * texts / max(1, len(stream) - len(ends)))
    cut = len(stream) - held_out
    if cut < 2 or held_out_bytes < 1:
        raise _nothing_left(held_out, len(stream))
    return Tokens(
        (stream[:cut],), stream[cut - 1 :], held_out_bytes, _fingerprint(key, cut)
    )


def read_shards(
    files: Files, read: Callable[[pathlib.Path, int], np.ndarray], vocab_size: int
) -> Tokens:
    """The tokens of shards; of those trained on none is copied into memory.

    The held-out share is cut from the end of the shards one after another. The first
    token of shards that are held out whole is context alone.

    Args:
        files: the shards.
        read: a file and `vocab_size` to its ids, such as `shards.nanogpt`.
        vocab_size: number of ids.

    Raises:
        ValueError: if a file is not what `read` reads, or if nothing would be held out,
            or everything.
    """
    train = [read(file, vocab_size) for file in files.train]
    held_out = [read(file, vocab_size) for file in files.held_out]
    total = cut = sum(map(len, train))
    if not held_out:
        cut -= round(files.held_out_share * total)
        if not 2 <= cut < total:
            raise _nothing_left(total - cut, total)
        ends = np.cumsum([len(stream) for stream in train])
        last = int(np.searchsorted(ends, cut))  # The shard that is cut, or ends there.
        kept = cut - int(ends[last]) + len(train[last])
        held_out = [train[last][kept - 1 :], *train[last + 1 :]]
        train = [*train[:last], train[last][:kept]]
    content = shards.fingerprint(files.train + files.held_out)
    return Tokens(tuple(train), np.concatenate(held_out), 0, _fingerprint(content, cut))


def _nothing_left(held_out, total):
    return ValueError(
        f"{held_out} of {total} tokens would be held out; hold out more than none and "
        f"fewer than all"
    )


def _fingerprint(content, cut):
    """Of what the data are, and of how many tokens of them are trained on."""
    return hashlib.sha256(f"{content} {cut}".encode()).hexdigest()[:16]


def _cache_folder(cache: str) -> pathlib.Path:
    if cache:
        return pathlib.Path(os.path.expanduser(cache))
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(os.path.expanduser(root)) / "muloco_jax"


def _read(file, dtype):
    """The stream in `file`, or nothing if there is none or it is no such thing."""
    size = file.stat().st_size if file.exists() else 0
    if size == 0 or size % dtype.itemsize:
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r")


def _write(file, corpus, tokenizer, dtype):
    """Writes the stream elsewhere, then moves it to `file`: it is whole or absent."""
    file.parent.mkdir(parents=True, exist_ok=True)
    end = np.array(tokenizer.end_of_text, dtype).tobytes()
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        part = pathlib.Path(folder) / "tokens"
        with part.open("wb") as out:
            out.write(end)
            for text in corpus.documents():
                out.write(tokenizer.encode(text).astype(dtype).tobytes() + end)
        os.replace(part, file)


class _Windows:
    """Windows of `length + 1` tokens, `length` apart: a random-access source."""

    def __init__(self, streams: Sequence[np.ndarray], length: int):
        self._streams, self._length = streams, length
        counts = [(len(stream) - 1) // length for stream in streams]
        self._first = np.cumsum([0, *counts])  # Window of each stream, and the end.

    def __len__(self):
        return int(self._first[-1])

    def __getitem__(self, index):
        stream = int(np.searchsorted(self._first, index, side="right")) - 1
        start = (int(index) - int(self._first[stream])) * self._length
        window = self._streams[stream][start : start + self._length + 1]
        return window.astype(np.int32)


class Batches:
    """Training batches of all workers, a pure function of the position.

    One global stream of shuffled examples is dealt out: each inner step takes the next
    K * B of them, of which worker k gets the k-th B. So data-parallel training with
    batches of K * B sees the same examples in the same order, and no two workers share
    an example within an epoch.

    Attributes:
        epoch: number of examples in an epoch.
    """

    def __init__(
        self,
        streams: Sequence[np.ndarray],
        sequence_length: int,
        num_workers: int,
        batch_size: int,
        seed: int,
    ):
        """Lays out the examples.

        Args:
            streams: the training tokens; no example is of two streams.
            sequence_length: L, tokens that an example predicts.
            num_workers: K.
            batch_size: B, sequences per worker and inner step.
            seed: of the shuffles.

        Raises:
            ValueError: if there is not enough text for one inner step.
        """
        windows = _Windows(streams, sequence_length)
        self.epoch = len(windows)
        if self.epoch < num_workers * batch_size:
            raise ValueError(
                f"the training text has {sum(map(len, streams))} tokens, which is "
                f"{self.epoch} examples of length {sequence_length}, but one inner "
                f"step of all workers takes {num_workers * batch_size}"
            )
        self._examples = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
        self._num_workers, self._batch_size = num_workers, batch_size

    def indices(self, position: int, steps: int) -> np.ndarray:
        """Indices `[K, steps, B]` into the global stream, of batches at `position`."""
        k, b = self._num_workers, self._batch_size
        stream = position + np.arange(steps * k * b).reshape(steps, k, b)
        return stream.swapaxes(0, 1)

    def examples(self, indices: np.ndarray) -> np.ndarray:
        """Examples `[..., L + 1]`, int32, at indices `[...]` into the global stream."""
        rows = np.array([self._examples[int(i)] for i in indices.ravel()])
        return rows.reshape(*indices.shape, -1)

    def __call__(self, position: int, steps: int = 1) -> np.ndarray:
        """Batches `[K, steps, B, L + 1]` of the steps after `position` examples."""
        return self.examples(self.indices(position, steps))


def evaluation_windows(
    tokens: np.ndarray, sequence_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Windows that predict each token but the first of a stream exactly once.

    >>> windows, counts = evaluation_windows(np.arange(6), sequence_length=3)
    >>> windows.tolist(), counts.tolist()
    ([[0, 1, 2, 3], [3, 4, 5, 5]], [[True, True, True], [True, True, False]])

    Returns:
        Tokens `[n, L + 1]`, int32, the last window filled up with the last token, and
        which of their targets `[n, L]` count, bool.

    Raises:
        ValueError: if there are fewer than L tokens to predict.
    """
    targets = len(tokens) - 1
    if targets < sequence_length:
        raise ValueError(
            f"the held-out text has {targets} tokens to predict, fewer than one "
            f"sequence of length {sequence_length}; hold out more, or take shorter "
            f"sequences"
        )
    n = -(-targets // sequence_length)
    place = np.arange(n)[:, None] * sequence_length + np.arange(sequence_length + 1)
    windows = tokens[np.minimum(place, targets)].astype(np.int32)
    return windows, place[:, 1:] <= targets
