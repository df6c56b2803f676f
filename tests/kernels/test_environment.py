"""`make kernels` passes on every machine: what one lacks is skipped with the reason, the rest is checked."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from goldenkv_kernels import command
from goldenkv_kernels.gates import cases, environment, run

ROOT = run.ROOT


def install(monkeypatch: pytest.MonkeyPatch, folder: Path):
    """`goldenkv kernels check --install`, of one small case, with the environment in this folder."""
    small = [case for case in cases.CASES if case.id == "gather_pages: small"]
    monkeypatch.setattr(cases, "CASES", small)
    monkeypatch.setattr(run, "ENVIRONMENT", folder)
    wide = {"COLUMNS": "200", "TERM": "dumb"}
    return CliRunner().invoke(command.app, ["check", "--install"], env=wide)


def assert_the_rest_passed(done) -> None:
    assert done.exit_code == 0, done.output
    assert "passed: 1 cases; 7 kernels that are wrong on purpose were refused" in done.output
    assert "sm_90a by jax" not in done.output  # nothing is said of compiled kernels


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python would do")
def test_without_a_python_that_would_do_compiling_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    done = install(monkeypatch, tmp_path / "made")
    assert "skipped: compiling for sm_90a: no Python 3.12 to 3.14" in done.output
    assert_the_rest_passed(done)
    assert not (tmp_path / "made").exists()


def test_without_a_network_compiling_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real environment is begun, and pip has nowhere to install from. What is half made is not used."""
    try:
        environment.find_python()
    except environment.Unavailable as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    done = install(monkeypatch, tmp_path / "made")
    assert "skipped: compiling for sm_90a: the environment cannot be made: ERROR: " in done.output
    assert_the_rest_passed(done)
    with pytest.raises(environment.Unavailable, match="no environment"):
        environment.find(tmp_path / "made", install=False)


def test_an_environment_that_does_not_work_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: only what is missing is skipped."""
    broken = environment.Environment(Path(sys.executable), tmp_path)
    monkeypatch.setattr(environment, "find", lambda folder, *, install: broken)
    done = install(monkeypatch, tmp_path / "made")
    assert done.exit_code == 1 and "failed: the process that compiles failed" in done.output
    assert "skipped" not in done.output and "wrong kernel" not in done.output  # its control did not run


def recipe(makefile: str, target: str) -> str:
    """The commands of a target; none if it is not there or not in the list of `make help`."""
    if not re.search(rf"^## make {target} ", makefile, re.MULTILINE):
        return ""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)*)", makefile, re.MULTILINE)
    return found[1] if found else ""


def test_make_kernels_is_documented_and_part_of_ci() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert recipe(makefile, "kernels") == "\t$(BIN)/goldenkv kernels check --install\n"
    assert not recipe(makefile.replace("## make kernels", "# make kernels"), "kernels")  # it can fail
    steps = re.findall(r"^step .* make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert steps.index("kernels") < steps.index("notebooks-check")


def test_types_are_checked_in_every_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

    def covered(files: list[str]) -> bool:
        return all(any(Path(p).is_relative_to(f) for f in files) for p in [*packages, "kernels/bench.py"])

    assert covered(config["tool"]["mypy"]["files"]) and not covered(["reference"])
