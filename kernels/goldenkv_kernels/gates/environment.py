"""The environment of the third gate: another Python with JAX's CUDA plugin, and a CUDA toolkit, but no GPU.

The plugin for a JAX version has wheels for Python 3.12 and newer, so it lives in a virtual environment of its
own. Everything is pinned: registers and shared memory are compared with committed numbers.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

JAX = "0.11.2"
PACKAGES = (
    f"jax=={JAX}",
    "beartype>=0.22",
    "jaxtyping>=0.3.6",
    "numpy>=2.1",
    "safetensors>=0.8",
    "xxhash>=3.5",
)
PLUGINS = (f"jax-cuda13-plugin=={JAX}", f"jax-cuda13-pjrt=={JAX}")
"""Installed without what they depend on, which is 3 GB of libraries for running."""

CUDA = "13.0"
TOOLKIT = tuple(
    f"{name}=={CUDA}.*"
    for name in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-crt")
)
"""Where no toolkit of this version is on the machine."""


class Unavailable(Exception):
    """The gate cannot run on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python that can compile for a GPU.

    Attributes:
        python: its interpreter.
        toolkit: a folder with bin/ptxas and nvvm/libdevice.
    """

    python: Path
    toolkit: Path


def find(folder: Path, *, install: bool) -> Environment:
    """The environment in `folder`, made first if it is not there and `install` is set.

    Raises:
        Unavailable: it is not there, or cannot be made.
    """
    stamp, python = folder / "installed.txt", folder / "bin" / "python"
    wanted = "\n".join((*PACKAGES, *PLUGINS)) + "\n"
    if not python.exists() or not stamp.exists() or stamp.read_text() != wanted:
        if not install:
            raise Unavailable(
                f"no environment in {_shown(folder)}; `goldenkv kernels check --install` makes it"
            )
        base = find_python()
        shutil.rmtree(folder, ignore_errors=True)
        _run(str(base), "-m", "venv", str(folder))
        _pip(python, *PACKAGES)
        _pip(python, "--no-deps", *PLUGINS)
        stamp.write_text(wanted)
    toolkit = find_toolkit(folder)
    if toolkit is None and install:
        _pip(python, "--no-deps", *TOOLKIT)
        toolkit = find_toolkit(folder)
    if toolkit is None:
        raise Unavailable(f"no CUDA toolkit {CUDA}; `goldenkv kernels check --install` gets one")
    return Environment(python, toolkit)


def find_python() -> Path:
    """An interpreter for which the plugin has wheels.

    Raises:
        Unavailable: there is none.
    """
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob("3.1[2-4].*/bin/python"))
    on_path = filter(None, (shutil.which(name) for name in ("python3.12", "python3.13", "python3.14")))
    for candidate in (sys.executable, *on_path, *map(str, pyenv)):
        code = "import sys, venv; print((3, 12) <= sys.version_info[:2] <= (3, 14))"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        if done.stdout.strip() == "True":  # a shim of pyenv is there for versions that are not
            return Path(candidate)
    raise Unavailable(f"no Python 3.12 to 3.14, which the CUDA plugin of jax {JAX} needs")


def find_toolkit(folder: Path) -> Path | None:
    """A toolkit of version `CUDA`: of the machine, or in the environment."""
    for candidate in _toolkits(folder):
        ptxas = candidate / "bin" / "ptxas"
        if ptxas.exists() and (candidate / "nvvm" / "libdevice").is_dir():
            said = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
            if f"release {CUDA}," in said:
                return candidate
    return None


def _toolkits(folder: Path) -> Iterator[Path]:
    found = shutil.which("ptxas")
    if found:
        yield Path(found).resolve().parents[1]
    yield Path("/usr/local/cuda")
    yield Path(f"/usr/local/cuda-{CUDA}")
    yield from sorted(folder.glob("lib/python3.*/site-packages/nvidia/cu13"))


def _pip(python: Path, *packages: str) -> None:
    _run(str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the environment cannot be made: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise Unavailable(f"the environment cannot be made: {' '.join(lines[-3:])}")


def _shown(folder: Path) -> str:
    """Relative to where the command runs, if it lies there."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
