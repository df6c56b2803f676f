"""Parity with the published inference code, on values it computed from random weights."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from safetensors.numpy import load_file

from goldenkv import parity
from goldenkv.config import ModelConfig, micro
from goldenkv.engine.engine import Engine
from goldenkv.model.checkpoint import CheckpointError, load_checkpoint
from goldenkv.model.tile import Probe
from goldenkv.model.weights import Model
from goldenkv.parity import ParityReport, ParityRow, compare_arrays, golden


class Recording(dict):
    """Remembers which keys were read."""

    def __init__(self, values: dict) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> np.ndarray:
        self.read.add(key)
        return super().__getitem__(key)


@pytest.fixture(scope="module")
def expected(golden_dir: Path) -> Recording:
    return Recording(load_file(golden_dir / "expected_plain.safetensors"))


@pytest.fixture(scope="module")
def plain(golden_dir: Path, expected: Recording) -> ParityReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden, "load_file", lambda path: expected)
        return parity.compare_golden(golden_dir, "plain")


def test_plain(plain: ParityReport) -> None:
    assert plain.ok, [row for row in plain.rows if not row.ok]
    by_name = {row.name: row for row in plain.rows}
    for name in ("logits", "logits, token by token", "state, token by token", "layers.3.rows_kv"):
        assert by_name[name].difference < 1e-4
    assert by_name["layer2.selected"].difference == 0
    assert "2 of 460" in by_name["layer2.selected"].note


def test_every_tensor_of_the_file_is_compared(plain: ParityReport, expected: Recording) -> None:
    assert set(expected) == expected.read
    assert {row.name: row.ok for row in plain.rows}["mtp_logits"]


def test_quantised(golden_dir: Path) -> None:
    report = parity.compare_golden(golden_dir, "quantised")
    assert report.ok
    compared = [row for row in report.rows if row.tolerance is not None]
    assert [row.name for row in compared] == ["logits, mean", "mtp_logits, mean"]


def logits(model: Model, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    engine = Engine(model, config, slots=2, max_length=len(tokens))  # the program of the report
    return engine.prefill(engine.open(), tokens, all_logits=True)


@pytest.fixture(scope="module")
def loaded(golden_dir: Path) -> tuple[ModelConfig, Model]:
    return load_checkpoint(golden_dir)


def test_a_changed_model_fails(loaded, expected: Recording, control) -> None:
    config, model = loaded[0], nnx.clone(loaded[1])
    ours = logits(model, control(model, config), expected["input_ids"])
    row = compare_arrays("logits", ours, expected["logits"], 1e-4)
    assert not row.ok
    assert row.difference > 1e-2


def test_leaving_quantisation_out_fails(golden_dir: Path, loaded) -> None:
    expected = load_file(golden_dir / "expected_quantised.safetensors")
    ours = logits(loaded[1], loaded[0], expected["input_ids"])
    assert np.mean(np.abs(ours - expected["logits"])) > 5 * parity.QUANTISED_MEAN


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected_plain\.safetensors"):
        parity.compare_golden(tmp_path)
    with pytest.raises(ValueError, match="which='other'"):
        parity.compare_golden(tmp_path, "other")


# The comparison itself -------------------------------------------------------------------------------------


def test_arrays() -> None:
    a = np.zeros((3, 4), np.float32)
    b = a.copy()
    b[1, 2] = 0.5
    assert compare_arrays("x", a, b, 0.5).ok
    row = compare_arrays("x", a, b, 0.4)
    assert (row.ok, row.difference, row.index, row.scale) == (False, 0.5, (1, 2), 0.5)
    assert not compare_arrays("x", a, b[:2], 1.0).ok
    assert compare_arrays("x", a[:0], a[:0], 1.0).tolerance is None


@pytest.mark.parametrize("tolerance", [1.0, np.inf, None])
def test_nan_never_passes(tolerance: float | None) -> None:
    a = np.zeros(3, np.float32)
    b = np.float32([0, np.nan, 0])
    for left, right in ((a, b), (b, a), (b, b)):
        row = compare_arrays("x", left, right, tolerance)
        assert (row.ok, row.index) == (False, (1,))


def test_infinities_pass_only_in_the_same_place() -> None:
    a = np.float32([-np.inf, 1])
    assert compare_arrays("x", a, a.copy(), 0.0).ok
    assert not compare_arrays("x", a, np.float32([np.inf, 1]), 1e9).ok
    assert not compare_arrays("x", a, np.float32([0, 1]), 1e9).ok


def test_a_report_that_compared_nothing_is_not_ok() -> None:
    assert not ParityReport("x", ()).ok
    assert not ParityReport("x", (ParityRow("mtp_logits", None),)).ok


def test_rendering_and_json() -> None:
    bad = compare_arrays("bad", np.float32([np.nan]), np.float32([1]), 0.1)
    report = ParityReport("title", (bad, compare_arrays("good", np.ones(2), np.ones(2), 0.1)))
    read = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (read["ok"], read["rows"][0]["difference"], read["rows"][1]["ok"]) == (False, "nan", True)
    out = io.StringIO()
    parity.render(report, Console(file=out, width=120))
    assert "DIFFERS" in out.getvalue() and "good" in out.getvalue()


@pytest.mark.parametrize(
    ("expected", "wrong"),
    [((3, 1), 0), ((1, 3), 0), ((3, 2), 0), ((3, 0), 1), ((1, 2), 1), ((3, -1), 1), ((3, 4), 1)],
)
def test_selections_may_differ_only_where_scores_tie(expected: tuple[int, int], wrong: int) -> None:
    """Scores of entries 0 .. 3 are 1, 2, 2, 5; top-k is 2; only the last query, at position 16, sees them."""
    config = micro()
    length, dim = 17, config.index_head_dim
    keys = np.zeros((4, dim), np.float32)
    keys[:, 0] = [1, 2, 2 - 1e-6, 5]
    q = np.zeros((length, 1, dim), np.float32)
    q[-1, 0, 0] = 1
    ours = np.full((length, 2), -1, np.int32)
    ours[-1] = 3, 1
    theirs = ours.copy()
    theirs[-1] = expected
    probe = Probe((), *((None, values) for values in (ours, q, np.ones((length, 1), np.float32))), None)
    rows = {"layers.1.index_keys": keys}
    for early in range(3, length - 1):  # all scores are 0 there: any visible entries are right
        ours[early, 0] = theirs[early, 0] = 0
    found = golden._selection(1, config, probe, rows, theirs, 1e-4)
    assert (found.difference, found.ok) == (wrong, not wrong)
