"""The reload gate and the command line: what passes, what must fail, and how it says so."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from rich.console import Console

from goldenkv import cli
from goldenkv.config import ModelConfig, Numerics, tiny
from goldenkv.engine import Engine
from goldenkv.errors import MissingExtra
from goldenkv.gate import Gate, ModelSource, Report, Result, tables
from goldenkv.model.checkpoint import save_checkpoint
from goldenkv.model.weights import Model
from goldenkv.state import Snapshot
from goldenkv.text import byte_tokens, default_text, tokenizer_tokens
from goldenkv.tiers import server
from goldenkv.tiers.faults import Faulty
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.objects import Address, Head

TOKENS, STEPS = 301, 6
PATHS = 26
CONTROLS = 6


def checkpoint(folder: Path, config: ModelConfig) -> Path:
    save_checkpoint(Model(config, seed=3), config, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("tiny"), tiny())


def gate_of(folder: Path, tokens: int = TOKENS) -> Gate:
    ids = byte_tokens(default_text(), 256)[:tokens]
    return Gate(ModelSource(checkpoint=str(folder)), ids, steps=STEPS)


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return gate_of(folder).run()


def test_every_path_is_equal_and_every_control_is_caught(report: Report) -> None:
    assert report.ok
    paths = [r for r in report.results if not r.control]
    controls = [r for r in report.results if r.control]
    assert (len(paths), len(controls)) == (PATHS, CONTROLS)
    for r in paths:
        assert r.difference is not None and r.difference.same and r.difference.rows > 500, r.name
    restores = {r.name: r.reused for r in paths if r.name.startswith("restore")}
    assert restores == {f"restore: {way}": TOKENS for way in ("host memory", "disk", "new process")}
    # Of 301 tokens 271 were served before: two pages of 128, or to the end of what was asked.
    policies = {r.name: r.reused for r in paths if r.name.startswith("policy")}
    assert policies == {
        "policy: full": 256,
        "policy: periodic": 0,
        "policy: end points": 271,
        "policy: zero": 0,
    }
    tiers = {r.name: r.reused for r in paths if r.name.startswith("tier")}
    assert tiers == {f"tier: {name}": 256 for name in ("device", "host", "disk", "redis")}
    assert {r.name: r.reused for r in paths if "kill" in r.name} == {
        "disk, after kill -9": 128,
        "host killed mid-load": 0,
        "disk killed mid-load": 0,
        "redis killed mid-load": 0,
    }
    notes = {r.name.split()[0]: r.note for r in paths if "mid-load" in r.name}
    assert notes == {"host": "unavailable", "disk": "missing", "redis": "unavailable"}
    assert [r.caught.split(":")[0] for r in controls if r.name == "bit flipped"] == ["checksum"]


def test_json_and_tables_say_the_same(report: Report) -> None:
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["ok"] is True
    assert [r["name"] for r in plain["results"]] == [r.name for r in report.results]
    console = Console(width=80, record=True, file=sys.stderr)
    for table in tables(report):
        console.print(table)
    text = console.export_text()
    assert "…" not in text, "a column is cut off at 80 characters"
    assert len(re.findall(r" equal(?:: \w+)? *\n", text)) >= PATHS
    assert all(r.name in text for r in report.results)


def broken(damage: Callable[[Snapshot], Snapshot]) -> Callable:
    """An engine whose restore loses something."""
    good = Engine.restore
    return lambda self, snapshot: good(self, damage(snapshot))


def without_overlap(snapshot: Snapshot) -> Snapshot:
    lost = {name: np.zeros_like(r) for name, r in snapshot.rows.items() if "overlap" in name}
    return dataclasses.replace(snapshot, rows=snapshot.rows | lost)


def test_control_a_restore_that_loses_the_overlap_fails_the_gate(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_of(folder)
    monkeypatch.setattr(Engine, "restore", broken(without_overlap))
    result = gate.run_line("restore: host memory")
    assert not result.ok
    assert not Report({}, [result]).ok
    assert result.difference is not None and result.difference.first is not None
    assert "overlap" in result.difference.first[0]


def test_control_damage_that_is_not_caught_fails_the_gate(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the reload ignores what the snapshot holds, so that no damage can show."""
    gate = gate_of(folder)
    kept = gate.snapshot
    monkeypatch.setattr(Engine, "restore", broken(lambda _: kept))
    result = gate.run_line("stale window rows")
    assert result.control and not result.ok and result.caught == ""


def test_control_a_kill_that_does_not_show_fails_the_gate(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_of(folder)
    monkeypatch.setattr(Faulty, "down", lambda self: None)
    result = gate.run_line("host killed mid-load")
    assert not result.ok and result.note == "the kill did not show"


def test_control_a_tier_that_returns_other_bytes_fails_the_gate(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_of(folder)
    good = HostStore.get_into

    def flipped(self: HostStore, address: Address, buffer: np.ndarray) -> Head:
        head = good(self, address, buffer)
        buffer[:1] ^= 1
        return dataclasses.replace(head, xxh3=xxhash.xxh3_128_hexdigest(buffer.data))

    monkeypatch.setattr(HostStore, "get_into", flipped)
    result = gate.run_line("tier: host")
    assert not result.ok and result.difference is not None and not result.difference.same


def test_a_store_that_is_not_there_is_skipped_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise MissingExtra("tiers", "a server of the Redis protocol")

    gate = gate_of(folder)
    monkeypatch.setattr(server, "find_program", missing)
    results = [gate.run_line(name) for name in ("tier: redis", "redis killed mid-load")]
    assert all(r.ok and "goldenkv[tiers]" in r.skipped for r in results)
    console = Console(width=80, record=True, file=sys.stderr)
    console.print(tables(Report({"tokens": 1, "steps": 1, "model": ""}, results))[0])
    assert "skipped" in console.export_text()


def test_a_prompt_shorter_than_a_page_has_no_lines_of_tiers(folder: Path) -> None:
    names = {
        tokens: [n for n in gate_of(folder, tokens).names if n.startswith("tier")] for tokens in (142, 143)
    }
    assert names[142] == [] and len(names[143]) == 4


def test_models_without_some_components(tmp_path: Path) -> None:
    """Damage that cannot be done is not asked for; the rest must still be caught."""
    config = dataclasses.replace(tiny(), num_hidden_layers=1, compress_ratios=(0,), num_hash_layers=0)
    gate = gate_of(checkpoint(tmp_path, config), 100)
    assert "overlap dropped" not in gate.names and "two entries swapped" not in gate.names
    for name in ("restore: disk", "stale window rows", "bit flipped", "bit flipped, unverified"):
        assert gate.run_line(name).ok, name


def test_too_short_a_prompt(folder: Path) -> None:
    with pytest.raises(ValueError, match="at least 97 tokens, got 96"):
        gate_of(folder, 96)


# The command line -----------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code."""
    monkeypatch.setattr(sys, "argv", ["goldenkv", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, report: Report) -> Callable[[bool], None]:
    """Lets `goldenkv reload` run at once on the results above, or on them with one path that differs."""

    def arrange(ok: bool) -> None:
        results = {r.name: r for r in report.results}
        if not ok:
            results["restore: disk"] = dataclasses.replace(results["restore: disk"], control=True, caught="")

        class Ready(Gate):
            def __init__(self, *_: object, **__: object) -> None:
                self.steps = STEPS

            names = property(lambda self: list(results))  # type: ignore[assignment]
            about = property(lambda self: dict(report.about))  # type: ignore[assignment]

            def run_line(self, name: str) -> Result:
                return results[name]

        monkeypatch.setattr("goldenkv.gate.Gate", Ready)

    return arrange


def test_reload_succeeds_and_writes_its_results(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    folder: Path,
    stand_in: Callable[[bool], None],
) -> None:
    stand_in(True)
    out = tmp_path / "out.json"
    assert run(monkeypatch, "reload", "--checkpoint", str(folder), "--json", str(out)) == 0
    assert f"{PATHS} paths are bit-equal to the cold run, {CONTROLS} controls were caught" in " ".join(
        capsys.readouterr().out.split()
    )
    assert json.loads(out.read_text())["about"]["text"] == "pydoc_data.topics"


def test_reload_fails_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    stand_in: Callable[[bool], None],
) -> None:
    stand_in(False)
    assert run(monkeypatch, "reload", "--checkpoint", str(folder)) == 1
    assert "FAILED: restore: disk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["reload", "--tokens", "5"], 2, "97"),
        (["reload", "--text", "/nowhere/text"], 2, "/nowhere/text"),
        (["reload", "--tokens", "9000000"], 2, "9000000 were asked for"),
        (["reload", "--checkpoint", "/nowhere"], 2, "config.json"),
        (["reload", "--dtype", "float16"], 2, "float16"),
        (["reload", "--json", "/nowhere/out.json"], 2, "no folder '/nowhere'"),
        (["parity"], 2, "either a folder of golden vectors or --transformers"),
        (["parity", "/nowhere"], 2, "/nowhere"),
        (["--version"], 0, "0.1.0"),
        (["reload", "--help"], 0, "--checkpoint"),
    ],
)
def test_what_a_user_can_get_wrong(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    assert run(monkeypatch, *arguments) == code
    seen = capsys.readouterr()
    assert said in seen.out + seen.err
    assert "Traceback" not in seen.err


def test_text() -> None:
    text = default_text()
    assert len(text) > 100_000
    assert byte_tokens("aé", 256).tolist() == [97, 195, 169]
    with pytest.raises(ValueError, match="at least 256, got vocab_size=255"):
        byte_tokens(text, 255)


def test_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'tokenizer' is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_tokens("a b c a", tmp_path / "tokenizer.json").tolist() == [0, 1, 2, 0]
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json' is not a tokenizer\.json"):
        tokenizer_tokens("a", tmp_path / "bad.json")


def test_missing_extras_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before anything runs."""
    from goldenkv.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'goldenkv\[tokenizer\]'"):
        tokenizer_tokens("a", tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(monkeypatch, "reload", "--figure", str(tmp_path / "out.png")) == 2
    assert "pip install 'goldenkv[explore]'" in capsys.readouterr().err


def test_numerics_reach_the_second_process() -> None:
    source = ModelSource(Numerics(dtype="bfloat16", fake_quantisation=True), None, 7)
    plain = json.loads(json.dumps(dataclasses.asdict(source)))
    assert ModelSource(Numerics(**plain.pop("numerics")), **plain) == source
