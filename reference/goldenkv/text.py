"""Tokens from text: bytes, or a tokenizer.json; and a real text that every Python installation has."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from .errors import MissingExtra


def default_text() -> str:
    """The language reference that ships with Python as help topics (`pydoc_data.topics`), about 700 kB."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def byte_tokens(text: str, vocab_size: int) -> np.ndarray:
    """One token a UTF-8 byte, int32.

    Raises:
        ValueError: the vocabulary is smaller than 256.
    """
    if vocab_size < 256:
        raise ValueError(f"byte tokens need a vocabulary of at least 256, got {vocab_size=}")
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def tokenizer_tokens(text: str, path: str | os.PathLike[str]) -> np.ndarray:
    """Tokens of a Hugging Face `tokenizer.json`, int32, without special tokens.

    Raises:
        MissingExtra: the tokenizers package is not installed.
        ValueError: the file is not a tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra("tokenizer", "reading tokenizer.json") from None
    try:
        tokenizer = Tokenizer.from_str(Path(path).read_text())
    except Exception as error:  # the package raises a bare Exception
        raise ValueError(f"{os.fspath(path)!r} is not a tokenizer.json: {error}") from None
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def tokenizer_bytes(path: str | os.PathLike[str]) -> list[bytes]:
    """The bytes of every token of a byte-level BPE `tokenizer.json`, special tokens as their names.

    Reading needs no package: such a file writes each byte as one printable character, in the order of bytes
    for printable Latin-1 ones and from U+0100 on for the others.

    Raises:
        ValueError: the file is not such a tokenizer.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    bytes_of = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
    try:
        read = json.loads(Path(path).read_text())
        special = {word["id"]: word["content"] for word in read["added_tokens"]}
        words = {number: word for word, number in read["model"]["vocab"].items()}
        return [
            special[n].encode() if n in special else bytes(bytes_of[c] for c in words[n])
            for n in range(len(words))
        ]
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not a byte-level tokenizer.json: {error!r}") from None
