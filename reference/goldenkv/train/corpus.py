"""Text to train on: files loaded with `datasets`, split by name, cut into tokens by a tokenizer of their own.

By default Python's standard library: real source with its documentation strings, on every machine that can
run this at all, under the PSF licence.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MissingExtra

END = "<|end|>"
"""Stands after every document; token 0."""

_HELD_OUT = 20
"""One file in so many is held out."""

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "ensurepip"}
"""Folders of tests, of other projects, and of tables rather than text."""


@dataclass(frozen=True, slots=True)
class Source:
    """One text file: its name within the corpus, and where it lies."""

    name: str
    path: Path

    @property
    def held_out(self) -> bool:
        """Whether it is never trained on: decided by its name, so that no order or seed can mix the two."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little") % _HELD_OUT == 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of all documents, one after the other, each ended by `END`.

    Attributes:
        train, held_out: int32 tokens.
        train_bytes, held_out_bytes: of UTF-8 text behind them.
        digest: SHA-256 of all names and texts: what exactly was trained on.
        files: (training files, held-out files).
    """

    train: np.ndarray
    held_out: np.ndarray
    train_bytes: int
    held_out_bytes: int
    digest: str
    files: tuple[int, int]

    @property
    def about(self) -> dict[str, Any]:
        """The data recipe in numbers."""
        return {
            "digest": self.digest,
            "files": list(self.files),
            "bytes": [self.train_bytes, self.held_out_bytes],
            "tokens": [len(self.train), len(self.held_out)],
        }


def stdlib_files() -> list[Source]:
    """The source files of this Python's standard library, without tests and tables."""
    return folder_files(sysconfig.get_paths()["stdlib"])


def folder_files(folder: str | Path, pattern: str = "*.py") -> list[Source]:
    """The text files below a folder, in the order of their names.

    Raises:
        ValueError: there is none.
    """
    root = Path(folder)
    found = [
        Source(path.relative_to(root).as_posix(), path)
        for path in sorted(root.rglob(pattern))
        if not _LEFT_OUT & set(path.relative_to(root).parts[:-1])
    ]
    if not found:
        raise ValueError(f"no file {pattern!r} below {str(folder)!r}")
    return found


def texts(files: Sequence[Source]) -> list[str]:
    """What they hold, one text a file, in their order.

    Raises:
        MissingExtra: `datasets` is not installed.
    """
    try:
        from datasets import load_dataset
        from datasets.utils.logging import disable_progress_bar
    except ImportError:
        raise MissingExtra("train", "loading text") from None
    disable_progress_bar()
    readable = [str(file.path) for file in files if file.path.stat().st_size]
    loaded = load_dataset("text", data_files=readable, sample_by="document", split="train")
    return list(loaded["text"])


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of a text: no text is foreign to it, and token 0 is `END`.

    Raises:
        MissingExtra: `tokenizers` is not installed.
        ValueError: a vocabulary too small for all bytes and `END`.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise MissingExtra("train", "training a tokenizer") from None
    if vocab_size < 257:
        raise ValueError(f"{vocab_size=} must be at least 257: every byte, and the end of a document")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def read_corpus(files: Sequence[Source], tokenizer: Any = None, vocab_size: int = 2048) -> tuple[Corpus, Any]:
    """Loads, splits and tokenizes; trains the tokenizer on the training part if none is given.

    Raises:
        MissingExtra: `datasets` or `tokenizers` is not installed.
        ValueError: nothing is held out, or nothing is left.
    """
    kept = [file for file in files if file.path.stat().st_size]
    parts = [[f for f in kept if not f.held_out], [f for f in kept if f.held_out]]
    if not all(parts):
        raise ValueError(
            f"{len(parts[0])} files to train on and {len(parts[1])} held out: expected some of both"
        )
    train, held_out = (texts(part) for part in parts)
    if tokenizer is None:
        tokenizer = train_tokenizer(train, vocab_size)
    digest = hashlib.sha256()
    for file, text in zip(parts[0] + parts[1], train + held_out, strict=True):
        digest.update(f"{file.name}\0{len(text)}\0{text}".encode())
    corpus = Corpus(
        tokens(train, tokenizer),
        tokens(held_out, tokenizer),
        sum(len(text.encode()) for text in train),
        sum(len(text.encode()) for text in held_out),
        digest.hexdigest(),
        (len(parts[0]), len(parts[1])),
    )
    return corpus, tokenizer


def tokens(documents: Sequence[str], tokenizer: Any) -> np.ndarray:
    """int32 tokens of documents, each ended by `END`."""
    end = tokenizer.token_to_id(END)

    def each() -> Iterator[np.ndarray]:
        for encoded in tokenizer.encode_batch(list(documents), add_special_tokens=False):
            yield np.array([*encoded.ids, end], np.int32)

    return np.concatenate(list(each()))
