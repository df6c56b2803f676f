"""`goldenkv delta` on a small checkpoint: what it prints, writes and refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from goldenkv.cli.delta import TEXTS, delta
from goldenkv.config import Numerics, micro
from goldenkv.delta_study.methods import LOSSLESS
from goldenkv.model.checkpoint import save_checkpoint
from goldenkv.model.weights import Model

for package in ("blosc2", "pcodec", "constriction", "zstandard"):
    pytest.importorskip(package)

TOKENS = 136


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, and a text beside it."""
    found = tmp_path_factory.mktemp("checkpoint")
    config = replace(micro(), vocab_size=256)
    save_checkpoint(Model(config, Numerics(), seed=0), config, found)
    words = np.random.default_rng(0).choice([b"alpha ", b"beta ", b"gamma "], 400).tolist()
    (found / "text").write_bytes(b"".join(words)[: TEXTS * TOKENS])
    return found


def run(*arguments: object) -> tuple[int, str, BaseException | None]:
    app = typer.Typer()
    app.command()(delta)
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    return done.exit_code, done.stdout, done.exception


def test_the_finding_comes_first_and_fits(folder: Path) -> None:
    """80 columns; the JSON has what the tables show, and no folder of this machine."""
    out = folder / "out.json"
    code, text, error = run(
        "--checkpoint", folder, "--text", folder / "text", "--tokens", TOKENS, "--keyframe", 8, "--json", out
    )
    assert code == 0, error
    assert text.startswith("V4. Delta encoding does not reach the hoped-for 5 to 13 times")
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for name in (*LOSSLESS, "CSA entries", "INT4, scale a 32", "transform, 0.5"):
        assert name in text or name in text.replace("\n", " "), name
    found = json.loads(out.read_text())
    assert list(found) == ["V4"] and str(folder) not in out.read_text()
    assert found["V4"]["about"]["tokens"] == 2 * TOKENS and found["V4"]["about"]["keyframe"] == 8
    rows = {(r["component"], r["codec"]): r for r in found["V4"]["lossless"]}
    assert rows["window", "raw native"]["rows"] == 2 * TOKENS * 3
    assert rows["window", "raw native"]["ratio"] == 1
    assert all(r["encode_seconds"] > 0 and r["decode_seconds"] > 0 for r in rows.values())


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    """Before anything runs."""
    few = ("--checkpoint", folder, "--text", folder / "text", "--tokens", TOKENS + 1)
    code, _, error = run(*few)
    assert code and isinstance(error, ValueError) and f"{TEXTS * TOKENS + TEXTS} are needed" in str(error)
    for option in ("--json", "--figure"):
        code, _, error = run(*few, option, tmp_path / "none" / "file.png")
        assert code and isinstance(error, ValueError) and "there is no folder" in str(error)
    assert run("--tokens", 10)[0] == 2
