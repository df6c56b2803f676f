"""The rules of the tree: who may import whom, what an import costs, and what no file may contain."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import goldenkv
from goldenkv import ops

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "reference"
PACKAGE = REFERENCE / "goldenkv"

FLOORS = [
    {"config", "ops", "errors"},
    {"state", "text"},
    {"model", "prefix", "capacity", "delta"},
    {"tiers", "trained"},
    {"engine"},
    {"cluster"},
    {"sim", "conform"},
    {"knockout", "parity", "precision", "replay_study", "conversation", "tier_study", "train"},
    {"delta_study", "selection"},
    {"gate"},
    {"figures"},
    {"cli"},
    {"__main__"},
]
"""A package may import from lower floors and from itself, never from its own floor or from above."""

MOST_LINES = 330

HEAVY = ["torch", "transformers", "matplotlib", "jupyter", "datasets", "hypothesis", "pytest"]
"""What a user of the core need not have, and need not wait for."""

TENSOR_NAMES = (
    r"\b(wq_[ab]|wkv|wgate|wo_[ab]|attn_sink|attn_norm|ffn_norm|hc_(attn|ffn|head)_\w+|tid2eid"
    r"|(q_[ab]|kv|o_[ab]|gate_up|down|weights)_proj|attn_hc|ffn_hc|self_attn|e_score_correction_bias"
    r"|input_layernorm|post_attention_layernorm|embed_tokens|lm_head)\b"
)
"""Of checkpoints, published or of transformers."""


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REFERENCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """The modules that `name` imports anywhere in its text, also within functions and for types alone."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from package import module` names the module, `from module import function` the module.
            yield from {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}


def floor(name: str) -> int | None:
    """The floor of a module; None for `goldenkv/__init__.py`, which holds the version alone."""
    part = name.split(".")[1] if "." in name else None
    if part is None:
        return None
    found = [number for number, parts in enumerate(FLOORS) if part in parts]
    assert found, f"{name} has no floor: give goldenkv.{part} one in FLOORS"
    return found[0]


def own(name: str) -> list[str]:
    return sorted({n for n in imports(name) if n == "goldenkv" or n.startswith("goldenkv.")})


# Imports ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_imports_lead_down(name: str) -> None:
    here = floor(name)
    for other in own(name):
        there = floor(other)
        if here is None or there is None or other.split(".")[1] == name.split(".")[1]:
            continue
        assert there < here, f"{name} (floor {here}) imports {other} (floor {there})"


def test_no_module_imports_itself_through_others() -> None:
    graph = {name: {n for n in own(name) if n != name and n != "goldenkv"} for name in MODULES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a cycle: {' -> '.join(error.args[1])}")


def test_ops_and_config_know_nothing_of_the_project() -> None:
    for part in ("ops", "config", "errors"):
        for name in MODULES:
            if name.split(".")[1:2] == [part]:
                assert all(n.startswith(f"goldenkv.{part}") for n in own(name)), name


def test_the_reference_never_imports_kernels() -> None:
    for name, path in MODULES.items():
        assert "goldenkv_kernels" not in path.read_text(), name


def test_the_reader_of_imports_sees_every_form() -> None:
    """The checks above rest on it."""
    assert set(own("goldenkv.ops.rope")) == {"goldenkv.ops.apart", "goldenkv.ops.typed"}
    assert {"goldenkv.ops.attend", "goldenkv.ops.norm", "goldenkv.config"} <= {
        n for name in MODULES if name.startswith("goldenkv.model") for n in own(name)
    }
    assert "goldenkv.engine.engine" in own("goldenkv.engine")
    assert "goldenkv.gate" in own("goldenkv.cli.reload")  # within a function


def test_private_names_are_not_imported() -> None:
    """A leading underscore means this file alone."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (
                node.level or (node.module or "").startswith("goldenkv")
            ):
                private = [a.name for a in node.names if re.match("_[^_]", a.name)]
                assert not private, f"{name} imports {private}"


@pytest.mark.parametrize("module", ["goldenkv", "goldenkv.engine", "goldenkv.cli"])
def test_the_core_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REFERENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_package_itself_imports_nothing() -> None:
    """`import goldenkv` takes no time: the parts are imported by name."""
    code = "import sys, goldenkv; print('jax' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REFERENCE)
    assert done.stdout.split() == ["False", "False"], done.stderr


# Files ------------------------------------------------------------------------------------------------------


def texts() -> dict[str, str]:
    """Every text file that is in version control, or would be after `git add`."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no git")
    if done.returncode:
        pytest.skip("not a git checkout")
    found = {}
    for name in filter(None, done.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            try:
                found[name] = path.read_text()
            except UnicodeDecodeError:
                continue
    return found


@pytest.mark.parametrize("path", list(MODULES.values()), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_no_file_names_a_machine() -> None:
    """Neither folders of the machine it was written on, nor where that machine gets its packages."""
    folders = r"(?<![\w./~-])/(?:root|work|home/\w+)(?=/|\b(?!\.))"
    hosts = r"--(?:extra-)?index-url|--trusted-host|find-links|pythonhosted|pypi\.org/simple"
    pattern = re.compile(f"{folders}|{hosts}")
    assert pattern.search("cd /" + "work/x") and pattern.search("'/" + "root'")
    assert not pattern.search("tests/" + "work/x") and not pattern.search("https://a.b/" + "root/")
    ours = str(Path(__file__).relative_to(ROOT))
    for name, text in texts().items():
        for number, line in enumerate(text.splitlines(), 1):
            assert name == ours or not pattern.search(line), f"{name}:{number}: {line[:200]}"


def test_names_of_checkpoint_tensors_stay_in_one_place() -> None:
    assert re.search(TENSOR_NAMES, (PACKAGE / "model" / "checkpoint_names.py").read_text())
    for name, path in MODULES.items():
        if not name.startswith(("goldenkv.model.checkpoint", "goldenkv.parity")):
            found = re.search(TENSOR_NAMES, path.read_text())
            assert not found, f"{name} names the tensor {found[0]}"


# Documentation ----------------------------------------------------------------------------------------------


def test_every_public_operation_says_what_it_does() -> None:
    for name in ops.__all__:
        module = getattr(ops, name)
        assert module.__doc__, name
        public = [
            (n, f)
            for n, f in vars(module).items()
            if not n.startswith("_") and callable(f) and getattr(f, "__module__", None) == module.__name__
        ]
        assert public, name
        for function_name, function in public:
            assert inspect.getdoc(function), f"{name}.{function_name}"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_what_it_is(name: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[name].read_text())), name


def test_every_name_in_all_exists() -> None:
    found = [goldenkv.__name__, *(m.name for m in pkgutil.walk_packages(goldenkv.__path__, "goldenkv."))]
    with_all = 0
    for name in found:
        if name.endswith("__main__") or "__all__" not in MODULES[name].read_text():
            continue
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            assert (error.name or "").partition(".")[0] in HEAVY, error  # an extra that is not installed
            continue
        with_all += 1
        missing = [n for n in module.__all__ if not hasattr(module, n)]
        assert not missing, f"{name}.__all__ names {missing}"
        assert sorted(set(module.__all__)) == sorted(module.__all__), f"{name}.__all__ names one twice"
    assert with_all >= 4


def test_readme_snippets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's ```python blocks with prompts, one after the other in one namespace."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    snippets = [block for block in blocks if ">>> " in block]
    if not snippets:
        pytest.skip("README.md has no ```python block with >>>")
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest("\n".join(snippets), {}, "README", "README.md", 0)
    out: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(
        test, out=out.append
    )
    assert result.attempted and not result.failed, "".join(out)
