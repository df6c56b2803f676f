"""A run of the benchmark is read as it was written, and refused where nothing may be concluded from it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from goldenkv_kernels.gates.measured import Timed, read_measured
from goldenkv_kernels.gates.run import ROOT

POINT = {
    "name": "f", "size": "small", "usual": True, "implementation": "pallas", "floor": 1e-6, "bound": "bytes",
    "intensity": 100.0, "seconds": 2e-6, "share": 0.5, "problem": "",
}  # fmt: skip
RUN: dict[str, Any] = {
    "device": "NVIDIA H200", "jax": "1", "dry_run": False,
    "numerics": [{"case": "f", "problem": ""}], "points": [POINT],
}  # fmt: skip


def write(path: Path, **changed: Any) -> Path:
    path.write_text(json.dumps(RUN | changed))
    return path


def test_no_file_is_no_run(tmp_path: Path) -> None:
    assert read_measured(tmp_path / "none.json") is None


def test_points_are_read(tmp_path: Path) -> None:
    found = read_measured(write(tmp_path / "run.json"))
    assert found is not None and (found.device, found.jax) == ("NVIDIA H200", "1")
    assert found.points == (Timed("f", "small", "pallas", True, 100.0, 2e-6, 0.5),)
    assert found.points[0].operations_a_second == 0.5 * 100 * 4.3e12
    above = Timed("f", "small", "pallas", True, 1000.0, 2e-6, 0.5)  # where the matrix units are the floor
    assert above.operations_a_second == 0.5 * 790e12


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dry_run": True}, "dry run"),
        ({"numerics": [{"case": "g", "problem": "wrong"}]}, "kernels failed.*'g'"),
        ({"points": [POINT | {"problem": "no memory", "seconds": None}]}, "kernels failed.*no memory"),
        ({"points": [{"name": "f", "problem": ""}]}, "bench.py --json"),
        ({"points": 3}, "bench.py --json"),
    ],
    ids=["dry", "wrong", "failed", "part", "other"],
)
def test_what_proves_nothing_is_refused(tmp_path: Path, changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_measured(write(tmp_path / "run.json", **changed))


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"run.json must be written by kernels/bench.py"):
        read_measured(path)


def test_the_benchmark_writes_what_is_read(tmp_path: Path) -> None:
    """A dry run, with the numbers put in that a GPU would give."""
    spec = importlib.util.spec_from_file_location("kernels_bench", ROOT / "kernels" / "bench.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    path = tmp_path / "run.json"
    assert bench.main(["--dry-run", "--only", "copy", "--json", str(path)]) == 0
    with pytest.raises(ValueError, match="dry run"):
        read_measured(path)
    data = json.loads(path.read_text())
    for point in data["points"]:
        point |= {"seconds": 4 * point["floor"], "share": 0.25}
    path.write_text(json.dumps(data | {"dry_run": False}))
    found = read_measured(path)
    assert found is not None and [(p.name, p.implementation, p.share) for p in found.points] == [
        ("copy", "xla", 0.25)
    ]
