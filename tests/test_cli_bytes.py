"""`goldenkv bytes` as a user runs it."""

import json
import sys
from pathlib import Path

import pytest

from goldenkv import cli
from goldenkv.capacity import BUILT_IN, METADATA_BYTES

GQA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code."""
    monkeypatch.setattr(sys, "argv", ["goldenkv", "bytes", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_files_and_names_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, out = tmp_path / "article.json", tmp_path / "out.json"
    file.write_text(json.dumps(GQA))
    arguments = [
        "flash",
        "pro",
        "v3.2",
        str(file),
        "--context",
        "3200",
        "--requests",
        "100",
        "--json",
        str(out),
    ]
    assert run(monkeypatch, *arguments) == 0
    seen = capsys.readouterr().out
    for shown in (
        "100 requests of 3,200 tokens",
        "7.31%",
        "10.47%",
        "48,068",
        "131,072",
        "1.05 GiB",
        "article",
    ):
        assert shown in seen, shown
    found = json.loads(out.read_text())
    assert found["metadata_bytes_a_page"] == METADATA_BYTES
    assert [m["bytes_a_token"] for m in found["models"]] == [3514.25, 5031.4375, 48_068, 131_072]


def test_one_format_for_all_or_one_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    def found(*arguments: str) -> list[float]:
        assert run(monkeypatch, "pro", "v3.2", *arguments, "--json", str(out)) == 0
        return [m["bytes_a_token"] for m in json.loads(out.read_text())["models"]]

    assert found() == [5031.4375, 48_068]
    assert found("--format", "bf16") == [9848, 61 * (1152 + 256)]
    assert found("--format", "fp8+fp4", "--format", "bf16+fp8") == [5031.4375, 61 * (1152 + 132)]


def test_ranks_and_metadata_reach_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    arguments = ["llama-3.1-8b", "--tensor-parallel", "16", "--metadata", "24", "--context", "200000"]
    assert run(monkeypatch, *arguments, "--json", str(out)) == 0
    seen = capsys.readouterr().out
    assert "note: llama-3.1-8b has 8 KV heads: 16 ranks hold everything 2 times" in seen
    assert "note: llama-3.1-8b was made for 131,072 tokens, fewer than 200,000" in seen
    found = json.loads(out.read_text())
    assert (found["tensor_parallel"], found["context"], found["requests"]) == (16, 200_000, 1)
    assert found["models"][0]["pages"][0]["metadata"] == 24 / (16 * 16_384)


def test_help_names_the_built_in_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    seen = capsys.readouterr().out
    assert all(name in seen for name in BUILT_IN)


def test_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'explore' is not installed")
    picture = tmp_path / "out.png"
    assert run(monkeypatch, "flash", "--figure", str(picture)) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_missing_extra_shows_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(monkeypatch, "flash", "--figure", str(tmp_path / "out.png")) == 2
    seen = capsys.readouterr()
    assert "pip install 'goldenkv[explore]'" in seen.err and not seen.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "CONFIG"),
        (
            ["/nowhere/config.json"],
            "'/nowhere/config.json' is neither a file nor a built-in model (flash, pro, v3,",
        ),
        (["list.json"], "'list.json' must hold a JSON object, got list"),
        (["bad.json"], "'bad.json' is not JSON"),
        (["binary.json"], "'binary.json' is not JSON"),
        (["v4.json"], "v4: config.json lacks"),
        (["flash", "--context", "0"], "Invalid value for '--context'"),
        (["flash", "--context", "-5"], "Invalid value for '--context'"),
        (["flash", "--requests", "-1"], "Invalid value for '--requests'"),
        (["flash", "--tensor-parallel", "0"], "Invalid value for '--tensor-parallel'"),
        (["llama-3.1-8b", "--tensor-parallel", "3"], "tensor_parallel=3 must divide the 8 KV heads"),
        (["flash", "--format", "fp9"], "format 'fp9' is unknown"),
        (["llama-3.1-8b", "--format", "fp8+fp4"], "format 'fp8+fp4' does not fit GQA"),
        (["flash", "pro", "v3", "--format", "bf16", "--format", "bf16"], "expected once, or 3 times"),
        (["flash", "--json", "/nowhere/out.json"], "there is no folder '/nowhere'"),
    ],
)
def test_what_a_user_can_get_wrong(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "v4.json").write_text('{"compress_ratios": [4]}')
    assert run(monkeypatch, *arguments) == 2
    seen = capsys.readouterr()
    assert said in " ".join(seen.err.split()) and "Traceback" not in seen.err
    assert not seen.out  # nothing half-done
