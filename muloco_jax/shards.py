"""Token files that other trainers wrote, memory-mapped.

A shard is a stream of ids, which of what text and by which tokenizer the file does not
say. What is wrong with a file is found here, before the first step: after this a shard
is an array.
"""

import hashlib
import pathlib
from collections.abc import Iterable

import numpy as np

_HEADER_WORDS = 256  # Of llm.c, int32: magic, version, number of tokens, and no more.
# Magic and version -> what each token is. All that llm.c writes: of GPT-2 and Llama 3.
_LLMC_TYPES = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
_TOKENS_AT_A_TIME = 2**20
_FINGERPRINT_BYTES = 2**16


def nanogpt(file: pathlib.Path, vocab_size: int) -> np.ndarray:
    """The tokens of a file of nanoGPT, which is uint16 and nothing else.

    Raises:
        ValueError: if it is no such file, or has an id that is not below `vocab_size`.
    """
    dtype = np.dtype("<u2")
    if vocab_size > 2**16:
        raise ValueError(
            f"{file} is read as uint16, whose ids are below 65536, but vocab_size is "
            f"{vocab_size}; lower it, or write uint32 tokens in the format of llm.c"
        )
    if (size := file.stat().st_size) % dtype.itemsize:
        raise ValueError(
            f"{file} has {size} bytes, which is no whole number of uint16 tokens; copy "
            f"or write it again"
        )
    return _read(file, dtype, 0, vocab_size)


def llmc(file: pathlib.Path, vocab_size: int) -> np.ndarray:
    """The tokens of a file of llm.c, uint16 or uint32 as its header says.

    Raises:
        ValueError: if it is no such file, or has an id that is not below `vocab_size`.
    """
    header = np.fromfile(file, "<i4", _HEADER_WORDS)
    dtype = _LLMC_TYPES.get(tuple(header[:2].tolist()))
    if dtype is None or len(header) < _HEADER_WORDS:
        known = " or ".join(f"{magic}, {version}" for magic, version in _LLMC_TYPES)
        raise ValueError(
            f"{file} does not begin with a header of llm.c, magic and version {known}, "
            f"but with {header[:2].tolist()}; if it is uint16 tokens alone, its format "
            f"is nanogpt"
        )
    count, size = int(header[2]), file.stat().st_size - header.nbytes
    if count * dtype.itemsize != size:
        raise ValueError(
            f"the header of {file} counts {count} {dtype.name} tokens, but {size} "
            f"bytes follow it; copy or write it again"
        )
    return _read(file, dtype, header.nbytes, vocab_size)


def _read(file, dtype, offset, vocab_size):
    if file.stat().st_size == offset:
        raise ValueError(f"{file} has no tokens; remove it or write it again")
    tokens = np.memmap(file, dtype, "r", offset)
    if np.iinfo(dtype).max < vocab_size:
        return tokens
    for start in range(0, len(tokens), _TOKENS_AT_A_TIME):
        some = tokens[start : start + _TOKENS_AT_A_TIME]
        if len(beyond := np.flatnonzero(some >= vocab_size)):
            raise ValueError(
                f"{file} has the token id {some[beyond[0]]} at position "
                f"{start + beyond[0]}, but vocab_size is {vocab_size}; give that of "
                f"the tokenizer that wrote it"
            )
    return tokens


def fingerprint(files: Iterable[pathlib.Path]) -> str:
    """A digest of names, sizes, and the first and last 64 KiB; not of the folder."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            digest.update(content.read(_FINGERPRINT_BYTES))
            content.seek(max(0, size - _FINGERPRINT_BYTES))
            digest.update(content.read())
    return digest.hexdigest()
