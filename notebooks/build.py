"""Execute the notebooks: each `NN_name.py` (percent format, the source) becomes `NN_name.ipynb`.

    python notebooks/build.py                  execute all and write them
    python notebooks/build.py 01_tour          execute one and write it
    python notebooks/build.py --check          execute all and compare with the files written before

A build is reproducible: the same code gives the same file. A check compares sources, text outputs and
the pixels of pictures, and shows any difference. A notebook has a minute, and may not write to stderr.
"""

import argparse
import base64
import difflib
import hashlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jupytext
import matplotlib.font_manager  # noqa: F401  builds its font cache here, for it says so on stderr
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from PIL import Image

FOLDER = Path(__file__).resolve().parent
LIMIT_SECONDS = 60

DATA = {"06_tiers_and_faults": FOLDER.parent.parent / "shared" / "traces" / "agent_text"}
"""What a committed notebook is made from that is not in this repository. Without it it runs on other data."""

# The same on every machine, so without the patch version of Python.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    },
}

# IPython's settings for the kernel. A PNG would name the version of matplotlib that drew it.
KERNEL_SETTINGS = """
c.InlineBackend.figure_formats = {"png"}
c.InlineBackend.print_figure_kwargs = {"bbox_inches": "tight", "metadata": {"Software": None}}
c.InlineBackend.rc = {}
"""


class BuildError(Exception):
    """A notebook did not run cleanly."""


def read_source(path: Path) -> NotebookNode:
    """Read a percent-format file as a notebook without outputs, with cell ids from the cells' order."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(METADATA)
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:03d}"
        cell.metadata = nbformat.from_dict({"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {})
    return notebook


def execute(notebook: NotebookNode) -> None:
    """Run all cells in a fresh kernel of this interpreter; the outputs go into the notebook.

    Raises:
        BuildError: a cell raised or wrote to stderr, or the notebook took longer than `LIMIT_SECONDS`.
    """
    with tempfile.TemporaryDirectory() as settings:
        profile = Path(settings, "profile_default")
        profile.mkdir()
        (profile / "ipython_kernel_config.py").write_text(KERNEL_SETTINGS)
        # The written outputs are those of a CPU, with one order of sets.
        environment = os.environ | {
            "IPYTHONDIR": settings,
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "PYTHONHASHSEED": "0",
        }
        deadline = time.monotonic() + LIMIT_SECONDS
        # No folders of kernels: "python3" is then this interpreter, whatever else is installed.
        kernels = KernelSpecManager(kernel_dirs=[])
        manager = AsyncKernelManager(
            kernel_name="python3", kernel_spec_manager=kernels, transport="ipc", ip=f"{settings}/kernel"
        )
        client = NotebookClient(
            notebook,
            km=manager,
            timeout_func=lambda cell: max(1, int(deadline - time.monotonic())),
            resources={"metadata": {"path": str(FOLDER)}},
            coalesce_streams=True,
            record_timing=False,
            store_widget_state=False,
        )

        try:
            client.execute(env=environment, cleanup_kc=True)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise BuildError(str(error)) from None
    notebook.metadata = nbformat.from_dict(METADATA)  # the kernel has added its own version
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                raise BuildError(f"{cell.id} wrote to stderr:\n{output.text}")
    nbformat.validate(notebook)


def lines(notebook: NotebookNode) -> Iterator[str]:
    """Everything in a notebook as lines of text, a picture as the digest of its pixels."""
    yield f"format {notebook.nbformat}.{notebook.nbformat_minor}"
    yield json.dumps(notebook.metadata, sort_keys=True)
    for cell in notebook.cells:
        yield f"---- {cell.id} {cell.cell_type} {json.dumps(cell.metadata, sort_keys=True)}"
        yield from cell.source.splitlines()
        for output in cell.get("outputs", []):
            label = output.get("name") or output.get("execution_count") or ""
            yield f"-- output of {cell.id} [{cell.execution_count}]: {output.output_type} {label}"
            yield from output.get("text", "").splitlines()
            for mime, data in sorted(output.get("data", {}).items()):
                yield f"{mime} {json.dumps(output.metadata.get(mime, {}), sort_keys=True)}"
                yield from picture(data) if mime == "image/png" else text(data)


def picture(data: str) -> Iterator[str]:
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")
    yield f"{image.width} x {image.height} pixels, sha256 {hashlib.sha256(image.tobytes()).hexdigest()}"


def text(data: object) -> list[str]:
    return (data if isinstance(data, str) else json.dumps(data, sort_keys=True)).splitlines()


def on_other_data(source: Path) -> str:
    """Says that a notebook ran on other data, if its own is not here; else nothing."""
    folder = DATA.get(source.stem)
    here = folder is None or folder.is_dir()
    return "" if here else f"it ran on other data, as there is no folder {folder}"


def build(source: Path) -> str:
    """Execute one notebook and write it; return what was done."""
    notebook = read_source(source)
    execute(notebook)
    nbformat.write(notebook, source.with_suffix(".ipynb"))
    other = on_other_data(source)
    return f"written; {other}" if other else "written"


def check(source: Path) -> str:
    """Execute one notebook and compare it with the written one, if its data is here; return what was done.

    Raises:
        BuildError: they differ, or there is none; the message shows the difference.
    """
    target = source.with_suffix(".ipynb")
    if not target.exists():
        raise BuildError(f"there is no {target.name}; build it first")
    notebook = read_source(source)
    execute(notebook)
    if other := on_other_data(source):
        return f"runs, not compared: {other}"
    old, new = lines(nbformat.read(target, as_version=4)), lines(notebook)
    difference = "\n".join(difflib.unified_diff([*old], [*new], "as written", "as executed now", lineterm=""))
    if difference:
        raise BuildError(f"differs from {target.name}\n{difference}")
    return "same"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks, such as 01_tour (default: all)")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args()

    names = [Path(name).stem for name in arguments.names]
    sources = [FOLDER / f"{name}.py" for name in names] or sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    failures = 0
    for source in sources:
        try:
            if not source.exists():
                raise BuildError("there is no such notebook")
            print(f"{source.stem}: {check(source) if arguments.check else build(source)}", flush=True)
        except BuildError as error:
            failures += 1
            print(f"{source.stem}: FAILED: {error}", flush=True)
    if not names:
        for built in sorted(FOLDER.glob("*.ipynb")):
            if not built.with_suffix(".py").exists():
                failures += 1
                print(f"{built.stem}: FAILED: {built.name} has no source {built.stem}.py")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
