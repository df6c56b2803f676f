"""`goldenkv selection` as a user runs it, on a model of a few layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from goldenkv.cli.selection import selection
from goldenkv.config import Numerics, micro
from goldenkv.engine import Engine
from goldenkv.model.checkpoint import save_checkpoint
from goldenkv.model.weights import Model
from goldenkv.selection import study
from goldenkv.selection.study import least_tokens
from goldenkv.text import default_text

CONFIG = replace(micro(), vocab_size=256)
APP = typer.Typer()
APP.command()(selection)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(Model(CONFIG, Numerics()), CONFIG, path)
    (path / "text").write_text(default_text()[:1024])
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(APP, [str(a) for a in arguments], env={"COLUMNS": "80"})


def test_it_says_what_it_found_in_80_columns(folder: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ("--checkpoint", folder, "--text", folder / "text", "--tokens", 512, "--json", out)
    pytest.importorskip("matplotlib")
    result = run(*arguments, "--figure", picture)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Half of the visible entries") and max(map(len, lines)) <= 80
    assert "same prefix (control)  0, bit-equal" in " ".join(result.stdout.split("\n")).replace("   ", " ")
    found = json.loads(out.read_text())
    assert " ".join(found["finding"].split()) in " ".join(result.stdout.split())
    assert found["spliced"]["exact"]["equal"] and not found["spliced"]["other"]["equal"]
    [layer] = found["layers"]
    assert layer["layer"] == 1 and layer["curves"]["oracle"]["recall"][-1] == 1
    for name, curve in layer["curves"].items():
        assert np.less_equal(curve["recall"], np.array(layer["curves"]["oracle"]["recall"]) + 1e-9).all(), (
            name
        )
    assert sum(heat["share"] for heat in layer["heats"]) == pytest.approx(1)
    for paged in found["paged"]:
        hits = {name: [one["hits"] for one in results] for name, results in paged["results"].items()}
        for name in set(hits) - {"speculative"}:  # which fetches ahead
            assert np.less_equal(hits[name], hits["Belady"]).all(), name
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(480, "at least 512"), (520, "a multiple of 32"), (544, "the text has 1024 tokens, 1088 are needed")],
    ids=["short", "odd", "text"],
)
def test_a_text_or_a_length_that_does_not_do(folder: Path, tokens: int, said: str) -> None:
    result = run("--checkpoint", folder, "--text", folder / "text", "--tokens", tokens)
    assert isinstance(result.exception, ValueError) and said in str(result.exception)


def test_what_cannot_be_written_is_said_first(folder: Path, tmp_path: Path) -> None:
    result = run("--checkpoint", folder, "--json", tmp_path / "no" / "out.json")
    assert isinstance(result.exception, ValueError) and "there is no folder" in str(result.exception)


def test_the_least_is_enough(folder: Path) -> None:
    engine = Engine(Model(CONFIG, Numerics()), CONFIG, slots=2, max_length=608)
    assert least_tokens(engine) == 512
    with pytest.raises(ValueError, match="512"):
        study(engine, Model(CONFIG, Numerics()), np.zeros(2000, np.int32), 480)
