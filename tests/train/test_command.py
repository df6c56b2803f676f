"""`goldenkv train` as a user runs it, on a model and a text of a few kilobytes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from goldenkv import cli
from goldenkv.config import Numerics, micro
from goldenkv.engine import Engine
from goldenkv.model.checkpoint import load_checkpoint
from goldenkv.train import Recipe, window_only

for package in ("datasets", "optax", "tokenizers"):
    pytest.importorskip(package, reason="the extra 'train' is not installed")

CONFIG = replace(
    micro(), vocab_size=2048, num_hidden_layers=2, compress_ratios=(4, 8), hc_mult=2, hc_sinkhorn_iters=2
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of random words: nothing that a tokenizer could make short."""
    folder, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    for number in range(60):
        letters = rng.integers(97, 123, 3000).astype(np.uint8)
        letters[rng.random(3000) < 0.2] = ord(" ")
        (folder / f"file{number:02}.txt").write_bytes(letters.tobytes())
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape and a recipe that take seconds."""
    monkeypatch.setattr("goldenkv.train.small", lambda: CONFIG)
    quick = partial(Recipe, batch_tokens=64, lengths=((1.0, 32),))
    monkeypatch.setattr("goldenkv.train.Recipe", quick)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code."""
    monkeypatch.setattr(sys, "argv", ["goldenkv", "train", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_it_trains_and_goes_on_and_says_what_it_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    arguments = (tmp_path, "--text", text, "--pattern", "*.txt")
    assert run(monkeypatch, *arguments, "--steps", 3) == 0
    assert "step     3" in capsys.readouterr().out
    config, model = load_checkpoint(tmp_path)
    assert config == CONFIG
    engine = Engine(model, config, Numerics(), slots=1, max_length=64)
    assert np.isfinite(engine.prefill(engine.open(), np.arange(40))).all()
    about = json.loads((tmp_path / "training.json").read_text())
    assert about["curve"][-1]["step"] == about["recipe"]["steps"] == 3 and len(about["ngrams"]) == 5
    assert about["corpus"]["files"][0] + about["corpus"]["files"][1] == 60

    weights = (tmp_path / "model.safetensors").read_bytes()
    assert run(monkeypatch, *arguments, "--steps", 3) == 0  # it is done: nothing changes
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert json.loads((tmp_path / "training.json").read_text()) == about

    assert run(monkeypatch, *arguments, "--steps", 4) == 2
    assert "saved under another recipe" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "model.safetensors").read_bytes() == weights


def test_the_model_to_compare_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    assert (
        run(monkeypatch, tmp_path, "--text", text, "--pattern", "*.txt", "--steps", 1, "--window-only") == 0
    )
    assert load_checkpoint(tmp_path)[0] == window_only(CONFIG)


def test_a_folder_without_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    assert run(monkeypatch, tmp_path, "--text", text) == 2
    assert "no file '*.py' below" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
