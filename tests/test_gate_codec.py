"""The lines of the reload gate through the delta codec."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from rich.console import Console

from goldenkv.config import tiny
from goldenkv.delta import DeltaCodec
from goldenkv.gate import Gate, ModelSource, Report, tables
from goldenkv.model.checkpoint import save_checkpoint
from goldenkv.model.weights import Model
from goldenkv.text import byte_tokens, default_text
from goldenkv.tiers import coded

LINES = ["delta codec: host", "delta codec: disk"]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    folder = tmp_path_factory.mktemp("tiny")
    save_checkpoint(Model(tiny(), seed=3), tiny(), folder)
    return Gate(ModelSource(checkpoint=str(folder)), byte_tokens(default_text(), 256)[:301], steps=6)


def test_state_comes_back_from_delta_frames(gate: Gate) -> None:
    """As many tokens as from the same stores without a codec, the same bits, fewer bytes."""
    pytest.importorskip("zstandard", reason="the extra 'delta' is not installed")
    assert [name for name in gate.names if "codec" in name] == LINES
    plain = gate.run_line("tier: host")
    results = [gate.run_line(name) for name in LINES]
    for r in results:
        assert r.ok and r.difference is not None and r.difference.rows > 500, r.name
        assert r.reused == plain.reused == 256
        assert 0 < r.nbytes < plain.nbytes
    console = Console(width=80, record=True, file=sys.stderr)
    console.print(tables(Report({"tokens": 301, "steps": 6, "model": ""}, results))[0])
    text = console.export_text()
    assert "…" not in text and all(name in text for name in LINES)


def test_control_a_codec_that_returns_other_bits_fails_the_gate(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks at checksums here, so that the bits reach the device."""
    pytest.importorskip("zstandard", reason="the extra 'delta' is not installed")
    good = DeltaCodec.decode

    def wrong(self: DeltaCodec, stream: memoryview, rows: range | None = None) -> np.ndarray:
        found = good(self, stream, rows)
        found.view(np.uint8)[0, 0] ^= 1
        return found

    monkeypatch.setattr(DeltaCodec, "decode", wrong)
    caught = gate.run_line(LINES[0])
    assert caught.reused == 0, "the checksum goes along: it is a miss"
    monkeypatch.setattr(coded, "_checked", lambda head, payload: head)
    monkeypatch.setattr("goldenkv.tiers.objects.Item.check", lambda self: None)
    result = gate.run_line(LINES[0])
    assert not result.ok and result.difference is not None and not result.difference.same


def test_without_the_extra_the_lines_are_skipped(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for name in LINES:
        result = gate.run_line(name)
        assert result.ok and "goldenkv[delta]" in result.skipped
