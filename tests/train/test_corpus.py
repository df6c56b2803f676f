"""Text, its split, and its tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from goldenkv.errors import MissingExtra
from goldenkv.text import tokenizer_bytes
from goldenkv.train import read_corpus, stdlib_files, train_tokenizer
from goldenkv.train.corpus import END, Source, folder_files, tokens

pytest.importorskip("datasets", reason="the extra 'train' is not installed")
pytest.importorskip("tokenizers", reason="the extra 'train' is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files enough that some are held out, one empty, one that is a test."""
    for number in range(60):
        (tmp_path / f"file{number:02}.py").write_text(
            f"def f{number}(x):\n    return x + {number}  # é\n" * 3
        )
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "file.py").write_text("assert False")
    return tmp_path


def test_no_file_is_on_both_sides(folder: Path) -> None:
    files = folder_files(folder)
    assert [f.name for f in files] == sorted(f.name for f in files)
    assert "tests/file.py" not in {f.name for f in files}
    corpus, tokenizer = read_corpus(files, vocab_size=300)
    held_out = [f for f in files if f.held_out]
    assert corpus.files == (60 - len(held_out), len(held_out)) and held_out
    train, rest = (
        tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in (corpus.train, corpus.held_out)
    )
    for file in files:
        if text := file.path.read_text():
            assert (text + END in rest) == file.held_out and (text + END in train) != file.held_out
    assert corpus.train_bytes == sum(f.path.stat().st_size for f in files if not f.held_out)


def test_the_split_goes_by_name_alone(folder: Path) -> None:
    before = {f.name: f.held_out for f in folder_files(folder)}
    for file in folder_files(folder):
        file.path.write_text("other text")
    assert {f.name: f.held_out for f in folder_files(folder)} == before
    assert Source("a", folder / "b").held_out == Source("a", folder).held_out


def test_the_digest_knows_every_text(folder: Path) -> None:
    first, _ = read_corpus(folder_files(folder), vocab_size=300)
    again, _ = read_corpus(folder_files(folder), vocab_size=300)
    assert first.digest == again.digest and np.array_equal(first.train, again.train)
    (folder / "file03.py").write_text("x")
    assert read_corpus(folder_files(folder), vocab_size=300)[0].digest != first.digest


def test_no_text_is_foreign_to_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["def f():\n    return 1\n"] * 5, 280)
    for text in ("", "\x00\x7f \t\r\n", "äöü € 漢字 🙂", "<|end|"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.token_to_id(END) == 0
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = tokenizer_bytes(tmp_path / "tokenizer.json")
    made = tokens(["é🙂\n\x00", "def f"], tokenizer)
    assert b"".join(words[t] for t in made) == "é🙂\n\x00<|end|>def f<|end|>".encode()


def test_a_file_that_is_no_such_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"added_tokens": [], "model": {"vocab": {"漢": 0}}}')
    for name in ("a.json", "b.json"):
        (tmp_path / "b.json").write_text("{}")
        with pytest.raises(ValueError, match=rf"{name}' is not a byte-level tokenizer\.json"):
            tokenizer_bytes(tmp_path / name)


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no file '\*\.py' below"):
        folder_files(tmp_path)
    (tmp_path / "only.py").write_text("x")
    with pytest.raises(
        ValueError, match=r"1 files to train on and 0 held out|0 files to train on and 1 held"
    ):
        read_corpus(folder_files(tmp_path))
    with pytest.raises(ValueError, match="vocab_size=256 must be at least 257"):
        train_tokenizer(["x"], 256)
    for package in ("datasets", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(MissingExtra, match=r"goldenkv\[train\]"):
                read_corpus([Source(str(n), tmp_path / "only.py") for n in range(60)])


def test_the_standard_library_is_there() -> None:
    files = stdlib_files()
    assert {"argparse.py", "asyncio/tasks.py"} <= {f.name for f in files}
    assert not any("test" in f.name.split("/")[:-1] for f in files)
    assert 0.02 < np.mean([f.held_out for f in files]) < 0.1
