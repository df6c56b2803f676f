"""How much of a GPU a kernel fills, against the calculator that comes with CUDA."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from goldenkv_kernels.gates.compilation import Kernel
from goldenkv_kernels.gates.controls import double
from goldenkv_kernels.gates.environment import find_toolkit
from goldenkv_kernels.gates.h200 import PROGRAMS, REGISTERS, RESERVED, SHARED, THREADS
from goldenkv_kernels.gates.occupancy import held, programs
from goldenkv_kernels.gates.run import ENVIRONMENT, TABLE
from goldenkv_kernels.gates.table import read_table

CALCULATOR = """
#include <cuda_occupancy.h>
#include <cstdio>
int main() {
    cudaOccDeviceProp gpu;
    gpu.computeMajor = 9; gpu.computeMinor = 0; gpu.warpSize = 32; gpu.numSms = 132;
    gpu.maxThreadsPerBlock = 1024; gpu.maxThreadsPerMultiprocessor = %(threads)d;
    gpu.regsPerBlock = gpu.regsPerMultiprocessor = %(registers)d;
    gpu.sharedMemPerBlock = 49152; gpu.sharedMemPerMultiprocessor = %(shared)d;
    gpu.sharedMemPerBlockOptin = %(shared)d - %(reserved)d; gpu.reservedSharedMemPerBlock = %(reserved)d;
    cudaOccDeviceState state;
    int registers, shared, threads;
    while (scanf("%%d %%d %%d", &registers, &shared, &threads) == 3) {
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = 1024; kernel.numRegs = registers; kernel.sharedSizeBytes = 0;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = gpu.sharedMemPerBlockOptin;
        cudaOccResult result;
        int error = cudaOccMaxActiveBlocksPerMultiprocessor(
            &result, &gpu, &kernel, &state, threads, shared);
        printf("%%d\\n", error ? -1 : result.activeBlocksPerMultiprocessor);
    }
}
"""


def test_it_is_what_the_calculator_of_cuda_says(tmp_path: Path) -> None:
    """For everything near an edge, and for every kernel in the table."""
    toolkit, compiler = find_toolkit(ENVIRONMENT), shutil.which("c++")
    if toolkit is None or compiler is None or not (toolkit / "include" / "cuda_occupancy.h").exists():
        pytest.skip("the calculator needs a CUDA toolkit with its headers, and a C++ compiler")
    sizes = {"threads": THREADS, "registers": REGISTERS, "shared": SHARED, "reserved": RESERVED}
    (tmp_path / "calculator.cpp").write_text(CALCULATOR % sizes)
    built = [compiler, "-w", "-I", str(toolkit / "include"), "calculator.cpp", "-o", "calculator"]
    subprocess.run(built, cwd=tmp_path, check=True, capture_output=True)
    registers = (1, 8, 9, 32, 33, 40, 63, 64, 65, 127, 128, 129, 168, 254, 255)
    shared = (
        0,
        1,
        127,
        128,
        129,
        1024,
        45_600,
        48 * 1024,
        77 * 1024,
        115_711,
        115_712,
        115_713,
        SHARED - RESERVED,
    )
    threads = (1, 31, 32, 33, 128, 224, 256, 512, 1024)
    kernels = [Kernel("k", r, 0, s, t) for r, s, t in itertools.product(registers, shared, threads)]
    kernels += [kernel for found in read_table(TABLE).cases.values() for kernel in found]
    asked = "\n".join(f"{k.registers} {k.shared} {k.threads}" for k in kernels)
    done = subprocess.run([tmp_path / "calculator"], input=asked, capture_output=True, text=True, check=True)
    assert [held(kernel) for kernel in kernels] == [int(line) for line in done.stdout.split()]
    assert min(map(held, kernels)) == 0 and max(map(held, kernels)) == PROGRAMS


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "count"),
    [
        (255, 0, 256, 1), (255, 0, 288, 0), (32, 0, 1024, 2),
        (16, 0, 32, 32), (16, 66_048, 128, 3), (16, 231_424, 32, 1),
    ],
    ids=["registers", "too many", "threads", "programs", "shared", "all shared"],
)  # fmt: skip
def test_the_least_limit_counts(registers: int, shared: int, threads: int, count: int) -> None:
    assert held(Kernel("k", registers, 0, shared, threads)) == count


def test_programs_are_read_from_the_grid() -> None:
    """Of ten rows in blocks of four, in one call, in a loop, and in two calls; nothing is computed."""
    twice = partial(double, interpret=False)
    shape = jax.ShapeDtypeStruct((10, 8), jnp.float32)
    assert programs(twice, shape) == [("_double", 3)]
    assert programs(lambda x: jax.lax.fori_loop(0, 7, lambda _, x: twice(x), x), shape) == [("_double", 3)]
    assert programs(lambda x: twice(twice(x)[:8]), shape) == [("_double", 3), ("_double", 2)]
    assert programs(jnp.sum, np.zeros(3)) == []
