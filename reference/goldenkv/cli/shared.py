"""What the commands share: where they print, and what they check before a long run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

out = Console()
err = Console(stderr=True)


def check_folders(*files: Path | None) -> None:
    """Before a run, that its results can be written after it."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise ValueError(f"{str(file)!r} cannot be written: there is no folder {str(file.parent)!r}")


class Prompt(NamedTuple):
    """Tokens to run, int32, and what they are."""

    tokens: np.ndarray
    name: str


def prompt(text: Path | None, tokenizer: Path | None, vocab_size: int, *, ours: bool) -> Prompt:
    """The tokens that a command runs.

    Args:
        text: by default held-out text for the trained model, Python's help topics for any other.
        tokenizer: a tokenizer.json; by default the trained model's, or bytes for any other.
        vocab_size: of the model.
        ours: it is the trained model.

    Raises:
        ValueError: the text has tokens that the model does not know.
        MissingExtra: reading a tokenizer needs the package tokenizers.
    """
    from .. import trained
    from ..text import byte_tokens, default_text, tokenizer_tokens

    if ours and text is None and tokenizer is None:
        return Prompt(trained.held_out(), "held-out text of the trained model")
    words, name = (default_text(), "pydoc_data.topics") if text is None else (text.read_text(), str(text))
    if ours and tokenizer is None:
        tokenizer = trained.FOLDER / "tokenizer.json"
    if tokenizer is None:
        return Prompt(byte_tokens(words, vocab_size), name)
    tokens = tokenizer_tokens(words, tokenizer)
    if len(tokens) and tokens.max() >= vocab_size:
        raise ValueError(f"{str(tokenizer)!r} has token {tokens.max()}, the model has {vocab_size} tokens")
    return Prompt(tokens, name)
