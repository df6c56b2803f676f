"""Text as prompts: sessions of a folder, turn by turn, mixed as a server would get them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def read_sessions(folder: str | os.PathLike[str], turns: int = 8) -> list[list[str]]:
    """The sessions in a folder, by file name: of each the texts of its prompts, in order.

    Args:
        folder: of `.jsonl` files, a request a line (`input`, and `timestamp` and `session_id` where there are
            any), and of `.txt` files, each a session that grows in equal steps.
        turns: steps of a `.txt` file.

    Raises:
        ValueError: there are none, or a line is no request.
    """
    sessions: list[list[str]] = []
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".txt":
            sessions.append(growing(path.read_text(), turns))
        elif path.suffix == ".jsonl":
            found: dict[Any, list[tuple[float, str]]] = {}
            for number, line in enumerate(path.read_text().splitlines()):
                try:
                    request = json.loads(line)
                    asked = float(request.get("timestamp", number)), str(request["input"])
                    found.setdefault(request.get("session_id"), []).append(asked)
                except (ValueError, KeyError, AttributeError, TypeError):
                    raise ValueError(f"{path.name}, line {number + 1}: not a request with an input") from None
            for asked_in_any_order in found.values():
                in_order = sorted(asked_in_any_order, key=lambda asked: asked[0])
                sessions.append([text for _, text in in_order])
    if not sessions:
        raise ValueError(f"{os.fspath(folder)!r} must have .jsonl or .txt files")
    return sessions


def growing(text: str, turns: int) -> list[str]:
    """A text as the prompts of a session: each is all that there was before, and a part more."""
    return [text[: len(text) * (turn + 1) // turns] for turn in range(turns)]


def interleaved(sessions: Sequence[Sequence[np.ndarray]], seed: int) -> list[np.ndarray]:
    """All prompts of all sessions, those of a session in their order; by chance whose turn it is."""
    turns = np.repeat(np.arange(len(sessions)), [len(session) for session in sessions])
    prompts = [iter(session) for session in sessions]
    return [next(prompts[which]) for which in np.random.default_rng(seed).permutation(turns)]
