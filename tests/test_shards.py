"""Token shards: what is in a file is what is trained on, or the file is refused."""

import re

import numpy as np
import pytest

from muloco_jax import corpus, data, shards
from muloco_jax.data import BYTES

L = 4


def write_llmc(file, tokens, magic=20240520, version=1, count=None):
    """uint32 behind the magic of Llama 3, otherwise uint16."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    dtype = "<u4" if magic == 20240801 else "<u2"
    file.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return file


def write_llama(file, tokens):
    return write_llmc(file, tokens, 20240801, 7)


def write_nanogpt(file, tokens):
    np.asarray(tokens, "<u2").tofile(file)
    return file


WRITERS = [
    pytest.param(write_nanogpt, shards.nanogpt, id="nanogpt"),
    pytest.param(write_llmc, shards.llmc, id="llmc-uint16"),
    pytest.param(write_llama, shards.llmc, id="llmc-uint32"),
]


def read(path, reader=shards.nanogpt, vocab_size=1000, share=0.25, held_out_path=""):
    files = corpus.find_files(str(path), "*.bin", share, str(held_out_path))
    return data.read_shards(files, reader, vocab_size)


def streams(tokens):
    return [stream.tolist() for stream in tokens.train]


@pytest.mark.parametrize("write, reader", WRITERS)
def test_a_shard_is_mapped_and_holds_what_was_written(tmp_path, write, reader):
    tokens = reader(write(tmp_path / "a.bin", [5, 0, 999]), 1000)
    assert isinstance(tokens, np.memmap)
    assert tokens.tolist() == [5, 0, 999]


def test_ids_of_either_type_go_up_to_its_end(tmp_path):
    small = write_llmc(tmp_path / "small.bin", [0, 2**16 - 1])
    large = write_llama(tmp_path / "large.bin", [0, 2**31 - 2])
    assert shards.llmc(small, 2**16).tolist() == [0, 2**16 - 1]
    with pytest.raises(ValueError, match="token id 65535 at position 1"):
        shards.llmc(small, 2**16 - 1)
    assert shards.llmc(large, 2**31 - 1).tolist() == [0, 2**31 - 2]
    assert shards.nanogpt(write_nanogpt(small, [2**16 - 1]), 2**16).tolist() == [65535]


@pytest.mark.parametrize("write, reader", WRITERS)
def test_the_same_tokens_give_the_same_data_as_text(tmp_path, write, reader):
    def corpus_of(*texts):
        return corpus.Corpus("test", lambda: iter(texts), held_out_share=0.3)

    stream = [256, *range(100), 256, *range(100, 199), 256]
    text = data.tokenize(
        corpus_of(bytes(range(100)), bytes(range(100, 199))), BYTES, str(tmp_path)
    )
    write(tmp_path / "a.bin", stream)
    shard = read(tmp_path / "a.bin", reader, 257, share=0.3)
    batches = [
        data.Batches(t.train, L, 2, 3, seed=1)(0, steps=9) for t in (text, shard)
    ]
    windows = [data.evaluation_windows(t.held_out, L) for t in (text, shard)]
    np.testing.assert_array_equal(*batches)
    assert batches[0].dtype == batches[1].dtype == np.int32
    for one, other in zip(*windows, strict=True):
        np.testing.assert_array_equal(one, other)
    assert shard.held_out_bytes == 0


def test_every_token_of_every_shard_is_predicted_once_but_for_fewer_than_a_window(
    tmp_path,
):
    """Lengths around multiples of L, some too short for a window; no id comes twice."""
    lengths, first = [12, 3, 13, 1, 14, 15, 16, 2], 0
    for number, length in enumerate(lengths):
        write_nanogpt(tmp_path / f"{number}.bin", np.arange(first, first + length))
        first += length
    held_out = write_nanogpt(tmp_path / "val", np.arange(9))
    tokens = read(tmp_path, held_out_path=held_out)
    batches = data.Batches(tokens.train, L, 1, 1, seed=0)
    examples = batches.examples(np.arange(batches.epoch))
    assert (np.diff(examples, axis=1) == 1).all()
    predicted = examples[:, 1:].ravel().tolist()
    assert len(set(predicted)) == len(predicted)
    of_each = [len({*predicted} & {*stream}) for stream in streams(tokens)]
    assert of_each == [8, 0, 12, 0, 12, 12, 12, 0]
    left = np.array(lengths) - 1 - of_each  # The first of each is context alone.
    assert ((left >= 0) & (left < L)).all()


def test_shards_come_in_the_order_of_their_names(tmp_path):
    for name in ("b", "c", "a"):
        write_nanogpt(tmp_path / f"{name}.bin", [ord(name)] * 2)
    last = write_nanogpt(tmp_path / "held_out", [0] * 5)
    for path in (tmp_path, tmp_path / "?.bin"):
        found = streams(read(path, held_out_path=last))
        assert found == [[97] * 2, [98] * 2, [99] * 2]


@pytest.mark.parametrize(
    "share, train, held_out",
    [
        (0.1, [[0, 1, 2], [3, 4, 5], [6, 7, 8]], [8, 9]),
        (0.4, [[0, 1, 2], [3, 4, 5]], [5, 6, 7, 8, 9]),
        (0.5, [[0, 1, 2], [3, 4]], [4, 5, 6, 7, 8, 9]),
        (0.8, [[0, 1]], [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_the_held_out_share_ends_the_shards_one_after_another(
    tmp_path, share, train, held_out
):
    for number, tokens in enumerate(([0, 1, 2], [3, 4, 5], [6, 7, 8, 9])):
        write_nanogpt(tmp_path / f"{number}.bin", tokens)
    tokens = read(tmp_path, share=share)
    assert streams(tokens) == train
    assert all(isinstance(stream, np.memmap) for stream in tokens.train)
    assert tokens.held_out.tolist() == held_out


@pytest.mark.parametrize("share, held_out", [(0.01, 0), (0.9, 9), (0.99, 10)])
def test_a_share_that_leaves_nothing_is_refused(tmp_path, share, held_out):
    write_nanogpt(tmp_path / "a.bin", range(10))
    with pytest.raises(ValueError, match=f"{held_out} of 10 tokens would be held out"):
        read(tmp_path, share=share)


def test_shards_may_be_held_out_whole(tmp_path):
    """Whatever the share is; their first token is context alone."""
    (tmp_path / "val").mkdir()
    write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    write_nanogpt(tmp_path / "val" / "a.bin", [4, 5])
    write_nanogpt(tmp_path / "val" / "b.bin", [6, 7])
    tokens = read(tmp_path / "*.bin", held_out_path=tmp_path / "val")
    assert streams(tokens) == [[1, 2, 3]]
    assert tokens.held_out.tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match=r"val/a\.bin, .*val/b\.bin is in both"):
        read(tmp_path, held_out_path=tmp_path / "val")


def test_the_fingerprint_is_of_the_data_wherever_they_lie(tmp_path):
    """Of what is in the middle of a large shard it knows nothing but the size."""

    def fingerprint(folder, name="b.bin", share=0.25, **changes):
        tokens = np.arange(100_000) % 1000
        for index, value in changes.values():
            tokens[index] = value
        (tmp_path / folder).mkdir()
        write_nanogpt(tmp_path / folder / "a.bin", range(9))
        write_nanogpt(tmp_path / folder / name, tokens[: -1 or None])
        return read(tmp_path / folder, share=share).fingerprint

    first = fingerprint("first")
    assert fingerprint("moved") == first
    others = [
        fingerprint("renamed", name="c.bin"),
        fingerprint("split", share=0.3),
        fingerprint("begin", change=(0, 7)),
        fingerprint("end", change=(99_998, 7)),
    ]
    assert len({first, *others}) == 5
    assert fingerprint("middle", change=(50_000, 7)) == first


NANOGPT = [
    (b"\0" * 7, 10, "has 7 bytes, .* no whole number of uint16 tokens; copy or write"),
    (b"", 10, "has no tokens; remove it or write it again"),
    (b"\0" * 8, 65537, "uint16, whose ids are below 65536, but vocab_size is 65537; "),
    (b"\1\0\5\0\7\0", 7, "has the token id 7 at position 2, but vocab_size is 7; give"),
]


@pytest.mark.parametrize("content, vocab_size, message", NANOGPT)
def test_a_file_that_is_not_nanogpt_says_why(tmp_path, content, vocab_size, message):
    file = tmp_path / "a.bin"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(file)) + " .*" + message):
        shards.nanogpt(file, vocab_size)


@pytest.mark.parametrize(
    "header, message",
    [
        (
            {"magic": 20240522},
            r"no.*header of llm.c.* with \[20240522, 1\]; .* nanogpt",
        ),
        ({"version": 2}, r"20240520, 1 or 20240801, 7, but with \[20240520, 2\]"),
        ({"magic": 20240801}, r"but with \[20240801, 1\]"),
        ({"count": 4}, "counts 4 uint16 tokens, but 6 bytes follow it; copy or write"),
        ({"count": 2}, "counts 2 uint16 tokens, but 6 bytes follow it"),
        ({"magic": 20240801, "version": 7, "count": 6}, "counts 6 uint32 .* 12 bytes"),
    ],
)
def test_a_file_that_is_not_llmc_says_why(tmp_path, header, message):
    file = write_llmc(tmp_path / "a.bin", [1, 2, 3], **header)
    with pytest.raises(ValueError, match=rf"a\.bin .*{message}"):
        shards.llmc(file, 10)


def test_a_file_that_ends_within_its_header_or_with_it_says_so(tmp_path):
    file = write_llmc(tmp_path / "a.bin", [])
    with pytest.raises(ValueError, match=r"a\.bin has no tokens"):
        shards.llmc(file, 10)
    for size in (1023, 8, 3, 0):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ValueError, match=r"a\.bin does not begin with a header"):
            shards.llmc(file, 10)


@pytest.mark.parametrize("write, reader", WRITERS)
@pytest.mark.parametrize("position", [0, 3, 4, 10])
def test_an_id_beyond_the_vocabulary_is_found_wherever_it_is(
    tmp_path, monkeypatch, write, reader, position
):
    """Also where the file is read in several parts."""
    monkeypatch.setattr(shards, "_TOKENS_AT_A_TIME", 4)
    tokens = np.zeros(11, int)
    tokens[position:] = range(30, 41 - position)
    file = write(tmp_path / "a.bin", tokens)
    message = rf"a\.bin has the token id 30 at position {position}, .* is 30;"
    with pytest.raises(ValueError, match=message):
        reader(file, 30)
    assert len(reader(file, int(tokens.max()) + 1)) == 11


def test_a_folder_without_shards_and_an_empty_shard_are_errors_that_name_them(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \*\.bin files in the folder"):
        read(tmp_path)
    (tmp_path / "a.bin").touch()
    with pytest.raises(ValueError, match=r"a\.bin is empty; remove it or fill it"):
        read(tmp_path)
