"""The third gate: kernels are compiled for an H200 without one, and what the assembler says of them is kept.

The work is done by `child` in the `environment` of another Python. Nothing runs there and nothing is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import goldenkv

from .environment import Environment

PACKAGE = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 1800


class CompilingFailed(Exception):
    """The environment is there and does not work: that is no reason to skip the gate."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one compiled kernel takes.

    Attributes:
        name: its entry point.
        registers: a thread; 255 at most.
        spill: bytes stored and loaded because there were too few.
        shared: bytes of shared memory a program; 232,448 at most.
        threads: of a program.
    """

    name: str
    registers: int
    spill: int
    shared: int
    threads: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the assembler said.

    Attributes:
        jax, ptxas: versions.
        cases: the kernels of each case by its id, or why it could not be compiled.
    """

    jax: str
    ptxas: str
    cases: dict[str, tuple[Kernel, ...] | str]


def compile_cases(environment: Environment, wanted: Sequence[str]) -> Compiled:
    """Compiles the cases and controls of these ids.

    Raises:
        CompilingFailed: the process did not start, or had no answer when it ended or its time was over.
    """
    with tempfile.TemporaryDirectory() as scratch:
        dump, sources = Path(scratch, "dump"), Path(scratch, "sources")
        dump.mkdir()
        sources.mkdir()
        # Only these two packages: what else lies beside them is of the other Python.
        for package in (Path(str(goldenkv.__file__)).parent, PACKAGE):
            (sources / package.name).symlink_to(package, target_is_directory=True)
        flags = (
            f"--xla_dump_to={dump}",
            "--xla_dump_emitter_re=ptx",
            f"--xla_gpu_cuda_data_dir={environment.toolkit}",
        )
        child = (
            str(environment.python),
            "-m",
            "goldenkv_kernels.gates.child",
            str(dump),
            str(environment.toolkit),
        )
        variables = {"PYTHONPATH": str(sources), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTHON"))}
        try:
            done = subprocess.run(
                [*child, *wanted],
                capture_output=True,
                text=True,
                env=inherited | variables,
                cwd=scratch,
                timeout=LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise CompilingFailed(f"the process that compiles took over {LIMIT_SECONDS} s") from None
        except OSError as error:
            raise CompilingFailed(f"the process that compiles did not start: {error}") from error
    if done.returncode:
        raise CompilingFailed(f"the process that compiles failed: {' '.join(done.stderr.splitlines()[-1:])}")
    said = json.loads(done.stdout.splitlines()[-1])
    cases = {
        name: case["kernels"]
        if isinstance(case["kernels"], str)
        else tuple(Kernel(**k) for k in case["kernels"])
        for name, case in said["cases"].items()
    }
    return Compiled(said["jax"], said["ptxas"], cases)
