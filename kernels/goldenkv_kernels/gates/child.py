"""Compiles cases for an H200 that is not there. Runs in the environment of `environment`, as a process.

`python -m goldenkv_kernels.gates.child FOLDER TOOLKIT CASE...` prints JSON: by case, what the assembler says
of each kernel in it, or why it could not be compiled. `XLA_FLAGS` must dump PTX into FOLDER; `compilation`
starts it so.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from . import cases, controls
from .h200 import TARGET, absent_device
from .machine import kernel_name
from .occupancy import pallas_calls


def main(folder: Path, toolkit: Path, wanted: list[str]) -> None:
    """Prints what became of each wanted case."""
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=TARGET)
    sharding = SingleDeviceSharding(topology.devices[0])
    said = subprocess.run([toolkit / "bin" / "ptxas", "--version"], capture_output=True, text=True).stdout
    found: dict[str, Any] = {"jax": jax.__version__, "ptxas": re.findall(r"V([\d.]+)", said)[0], "cases": {}}
    known = {case.id: case for case in (*cases.CASES, *controls.CASES)}
    for number, case in enumerate(known[name] for name in wanted):
        begin = time.perf_counter()
        name = f"case_{number}"
        try:
            with absent_device():
                kernels = compile_case(case.bound(interpret=False), case.arrays(), sharding, name)
            rows: Any = list(measure(folder, toolkit, name, kernels))
        except Exception as error:
            rows = f"{type(error).__name__}: {str(error)[:500]}"
        found["cases"][case.id] = {"kernels": rows, "seconds": round(time.perf_counter() - begin, 2)}
    print(json.dumps(found))


def compile_case(function: Any, arrays: Any, sharding: Any, name: str) -> set[str]:
    """Compiles a module of this name; returns the names of its Pallas kernels."""

    def call(arguments: Any) -> Any:
        return function(arguments)

    call.__name__ = name
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arrays)
    traced = jax.jit(call).trace(shapes)
    traced.lower().compile()
    return set(map(kernel_name, pallas_calls(traced.jaxpr.jaxpr)))


def measure(folder: Path, toolkit: Path, name: str, kernels: set[str]) -> Iterator[dict[str, Any]]:
    """What the assembler says of the dumped kernels of one module, in the order in which they run.

    Those that XLA made of its own are left out.
    """
    shared, threads = {}, {}
    launch = r"\] (\S+) grid: \[.*?\] threads: \[(.*?)\].*shared_memory: (\d+) bytes"
    for file in folder.glob(f"*.jit_{name}.thunk_sequence.txt"):
        for entry, axes, number in re.findall(launch, file.read_text()):
            shared[entry], threads[entry] = int(number), math.prod(map(int, axes.split(",")))
    said = ""
    for file in folder.glob(f"*.jit_{name}.*.ptx"):
        command = [str(toolkit / "bin" / "ptxas"), "-v", "-arch=sm_90a", str(file), "-o", "/dev/null"]
        said += subprocess.run(command, capture_output=True, text=True, check=True).stderr
    texts = dict(re.findall(r"entry function '(\w+)'(.*?)(?=Compiling|\Z)", said, re.DOTALL))
    names = {entry: re.sub(r"__\d+$", "", entry) for entry in shared}  # the second of one name is name__1
    for entry in (e for e in shared if names[e] in kernels):
        if entry not in texts:
            raise LookupError(f"no PTX was dumped of {entry}")
        stores, loads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", texts[entry])[0]
        static = re.findall(r"(\d+) bytes smem", texts[entry])
        yield {
            "name": entry,
            "registers": int(re.findall(r"Used (\d+) registers", texts[entry])[0]),
            "spill": int(stores) + int(loads),
            "shared": shared[entry] + sum(map(int, static)),
            "threads": threads[entry],
        }
    if kernels - set(names.values()):
        raise LookupError(f"no kernel {sorted(kernels - set(names.values()))} in the compiled module")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
