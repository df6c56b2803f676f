"""The gates of the GPU kernels: each lets sound kernels pass and catches what it is there for."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from typer.testing import CliRunner

from goldenkv.ops import attend, compress, index, quant
from goldenkv_kernels import command
from goldenkv_kernels.gates import (
    bounds,
    cases,
    compilation,
    expected,
    inputs,
    lowering,
    machine,
    roofline,
    run,
    table,
)
from goldenkv_kernels.gates.case import Case, Tolerance, distance
from goldenkv_kernels.gates.compilation import Compiled, Kernel, compile_cases
from goldenkv_kernels.gates.controls import BLOCK, CHANNELS, CONTROLS, ROWS, double, sum_rows, sums
from goldenkv_kernels.gates.environment import PACKAGES, PLUGINS, Environment, Unavailable, find

ROOT = Path(__file__).resolve().parents[2]
BY_ID = {case.id: case for case in cases.CASES}
SMALL = [case for case in cases.CASES if not case.compiled]


# Addresses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.id.replace(": ", "-"))
def test_no_kernel_leaves_its_arrays(case: Case) -> None:
    arrays = case.arrays(seed=1)
    found = bounds.check(case, arrays, case.expected(**arrays))
    assert found.problems == () and found.kernels


@pytest.mark.parametrize("control", [c for c in CONTROLS if c.gate == "bounds"], ids=lambda c: c.case.name)
def test_only_the_last_gate_catches_a_wrong_address(control) -> None:
    """Interpreted, its result is right; it is lowered without a word."""
    case = control.case
    arrays = case.arrays()
    want = case.expected(**arrays)
    assert not distance(case.bound(interpret=True)(arrays), want, case.tolerance).problem
    assert lowering.lowered(case.bound(interpret=False), arrays) == 1
    assert bounds.check(case, arrays, want).problems


def test_the_controls_pass_where_they_are_not_wrong() -> None:
    x = np.random.default_rng(0).normal(size=(2 * BLOCK, CHANNELS)).astype(np.float32)
    found = machine.run(partial(double, interpret=False), x)
    assert found.problems == () and np.array_equal(found.outputs, 2 * x) and found.kernels == ("_double",)
    x = np.random.default_rng(0).normal(size=(ROWS, CHANNELS)).astype(np.float32)
    found = machine.run(partial(sum_rows, interpret=False), x)
    assert found.problems == () and np.allclose(found.outputs, sums(x), atol=1e-5)


def test_a_fault_is_named() -> None:
    x = np.zeros((ROWS, CHANNELS), np.float32)
    found = machine.run(partial(sum_rows, how="masked too late", interpret=False), x)
    assert found.problems[0] == (
        "_sum, program [0]: reads 16 elements outside input 0 (args[0]) [10, 8], the first at 10 of axis 0"
    )


def launch(kernel, *args, shape, grid=(1,), dtype=jnp.float32, **options):
    out = jax.ShapeDtypeStruct(shape, dtype)
    return pl.pallas_call(kernel, out_shape=out, grid=grid, interpret=False, **options)(*args)


def problems(kernel, *args, **options) -> str:
    return "; ".join(machine.run(lambda *a: launch(kernel, *a, **options), *args).problems)


@pytest.mark.parametrize(("step", "wrong"), [(1, False), (2, True)])
def test_two_lanes_of_one_store_must_not_meet(step: int, wrong: bool) -> None:
    def kernel(x_ref, out_ref):
        plt.store(out_ref.at[jnp.arange(4) // step], x_ref[...])

    found = problems(kernel, np.arange(4, dtype=np.float32), shape=(4,))
    assert ("twice at once" in found) == wrong


@pytest.mark.parametrize(("shift", "wrong"), [(0, False), (1, True)])
def test_writing_in_place_where_another_program_reads_is_a_race(shift: int, wrong: bool) -> None:
    def kernel(x_ref, out_ref):
        i = pl.program_id(0)
        out_ref[i] = x_ref[(i + shift) % 3] + 1

    x = np.arange(3, dtype=np.float32)
    found = problems(kernel, x, shape=(3,), grid=(3,), input_output_aliases={0: 0})
    assert ("another program" in found) == wrong
    assert problems(kernel, x, shape=(3,), grid=(3,)) == ""  # into another array


def test_what_nothing_wrote_is_poison() -> None:
    def kernel(x_ref, out_ref):
        plt.store(out_ref.at[jnp.arange(4)], x_ref[...], mask=jnp.arange(4) < 3)

    found = machine.run(lambda x: launch(kernel, x, shape=(4,)), np.ones(4, np.float32))
    assert found.problems == () and list(np.isnan(found.outputs)) == [False, False, False, True]


def test_an_input_must_not_be_written() -> None:
    def kernel(x_ref, out_ref):
        x_ref[0] = 1.0
        out_ref[...] = x_ref[...]

    assert "which is an input" in problems(kernel, np.zeros(4, np.float32), shape=(4,))


def test_an_index_that_triton_would_take_apart_differently_is_refused() -> None:
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[:, jnp.arange(4)]

    with pytest.raises(NotImplementedError, match="behind a slice"):
        problems(kernel, np.zeros((4, 4), np.float32), shape=(4, 4))


def test_without_a_kernel_there_is_nothing_to_check() -> None:
    with pytest.raises(ValueError, match="calls no Pallas kernel"):
        machine.run(lambda x: x + 1, np.zeros(3))
    with pytest.raises(ValueError, match="holds no Triton kernel"):
        lowering.lowered(lambda x: x + 1, np.zeros(3, np.float32))


@pytest.mark.parametrize("n", [0, 1, 5])
def test_control_flow_and_blocks_run_as_interpreted(n: int) -> None:
    """Loops with fixed and with traced bounds, branches, squeezed axes, a scan around the call."""

    def kernel(n_ref, x_ref, out_ref):
        i, last = pl.program_id(1), pl.num_programs(1) - 1
        fixed = jax.lax.fori_loop(0, 3, lambda j, a: a + x_ref[j], jnp.float32(0))
        traced = jax.lax.fori_loop(0, n_ref[0], lambda j, a: a * 2 + x_ref[j % 4], fixed)
        branch = jax.lax.cond(i == last, lambda: traced, lambda: x_ref[i])

        @pl.when(i > 0)
        def _() -> None:
            out_ref[...] = jnp.full((2,), branch)

        @pl.when(i == 0)
        def _() -> None:
            out_ref[...] = jnp.zeros((2,))

    def call(counts, x, *, interpret):
        def step(carry, row):
            out = pl.pallas_call(
                kernel,
                out_shape=jax.ShapeDtypeStruct((2, 6), jnp.float32),
                grid=(2, 3),
                in_specs=[
                    pl.BlockSpec((1,), lambda b, i: (0,)),
                    pl.BlockSpec((None, 4), lambda b, i: (b, 0)),
                ],
                out_specs=pl.BlockSpec((None, 2), lambda b, i: (b, i)),
                interpret=interpret,
            )(counts, row)
            return carry + out[0, 5], out

        return jax.lax.scan(step, jnp.float32(0), x)

    x = np.random.default_rng(n).normal(size=(2, 2, 4)).astype(np.float32)
    counts = np.array([n], np.int32)
    found = machine.run(partial(call, interpret=False), counts, x)
    want = call(counts, x, interpret=True)
    assert found.problems == () and len(found.kernels) == 2
    for a, b in zip(found.outputs, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# Poison -----------------------------------------------------------------------------------------------------


def seeing_more(arrays: inputs.Arrays) -> inputs.Arrays:
    """One query sees two entries more, or has another id: rows of a page it holds, behind its last entry."""
    arrays = {name: array.copy() for name, array in arrays.items()}
    if "ids" in arrays:
        arrays["ids"][1, 0, 1] = 11
    else:
        arrays["counts"][1, 1] += 2
    return arrays


@pytest.mark.parametrize("kernel", ["sparse_attention", "dense_attention", "index_scores"])
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_whoever_looks_further_meets_poison(kernel: str, implementation: str) -> None:
    case = BY_ID[f"{kernel}: small f32"]
    arrays = case.arrays()
    result = case.bound(implementation)(seeing_more(arrays))
    assert "nan" in distance(result, case.expected(**arrays), case.tolerance).problem


def test_poison_is_on_all_sides() -> None:
    arrays = BY_ID["dense_attention: small f32"].arrays()
    pages, table = arrays["pages"], arrays["table"]
    assert np.isnan(pages[0]).all() and np.isnan(pages[-1]).all()
    assert (table[:, -1] == inputs.NO_PAGE).all() and table[:, 0].min() > 0
    last = pages[table[1, 2]]  # entries 8 to 11, of which queries see those below 10
    assert np.isnan(last[2:]).all() and not np.isnan(last[:2]).any()
    native = BY_ID["sparse_attention: small fp8"].arrays()["pages"]
    assert (native[0] == 0xFF).all() and np.isnan(expected.native_rows(native[:1], 4, 80, 16)).all()


# References and tolerances ----------------------------------------------------------------------------------


def test_float64_attention_is_the_op() -> None:
    arrays = BY_ID["sparse_attention: small f32"].arrays()
    want = BY_ID["sparse_attention: small f32"].expected(**arrays)
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    for b in range(2):
        entries = arrays["pages"][arrays["table"][b]].reshape(-1, 40)
        window = (arrays["window"][b], arrays["window_visible"][b])
        out = attend.csa_attention(arrays["q"][b], *window, entries, arrays["ids"][b], arrays["sinks"])
        np.testing.assert_allclose(out, want[b], atol=2e-6)


def test_float64_scores_and_selection_are_the_op() -> None:
    arrays = inputs.index(np.random.default_rng(3), inputs.Index(1, 3, 3, 20, 11, 4, "float32", True))
    keys = np.nan_to_num(arrays["pages"][arrays["table"][0, :3]].reshape(-1, 20))
    scores = index.index_scores(*map(jnp.asarray, (arrays["q"][0], keys, arrays["weight"][0])))
    visible = jnp.arange(12) < jnp.asarray(arrays["counts"][0])[:, None]
    want = expected.index_scores(**arrays)[0, :, :12]
    assert np.array_equal(np.where(visible, scores, -np.inf), want)
    for k in (1, 5, 11):
        assert np.array_equal(index.top_k_entries(scores, visible, k), expected.select(**arrays, top_k=k)[0])


@pytest.mark.parametrize(
    ("overlap", "quantise"), [(False, None), (True, None), (False, "e4m3"), (True, "hadamard_e2m1")]
)
def test_float64_entries_are_the_op(overlap: bool, quantise: str | None) -> None:
    size = inputs.Compress(5, 4, 128, 64, overlap)
    arrays = {
        n: np.nan_to_num(a, neginf=-np.inf)
        for n, a in inputs.compress(np.random.default_rng(4), size).items()
    }
    rows = (arrays[name][int(overlap) :] for name in ("kv", "score"))
    kv, score = (jnp.asarray(blocks.reshape(-1, blocks.shape[2])) for blocks in rows)
    weight, frequency = jnp.asarray(arrays["norm_weight"]), arrays["frequency"]
    rows = compress.compress(kv, score, weight, frequency, compress_rate=4, overlap=overlap)
    if quantise == "e4m3":
        rows = jnp.concatenate([quant.fake_quantise_e4m3(rows[:, :-64]), rows[:, -64:]], axis=1)
    elif quantise:
        rows = quant.fake_quantise_e2m1(quant.hadamard(rows))
    want = expected.compress(**arrays, overlap=overlap, eps=1e-6, quantise=quantise)
    np.testing.assert_allclose(rows, want, atol=2e-6)


def test_distance_counts_everything() -> None:
    near = Tolerance("near", "a test", absolute=0.1, relative=0.01)
    want = np.array([1.0, 100.0, -np.inf, np.nan])
    good = distance(np.array([1.05, 101.0, -np.inf, np.nan], np.float32), want, near)
    assert not good.problem and good.error == pytest.approx(0.05, rel=1e-4) and good.allowed == 0.11
    for place, value in itertools.product(range(4), (1.2, np.nan, np.inf)):
        got = np.array([1.05, 101.0, -np.inf, np.nan])
        if not np.array_equal(got[place], value, equal_nan=True):
            got[place] = value
            assert distance(got, want, near).problem, (place, value)
    assert "shape" in distance(want[:3], want, near).problem
    assert "arrays" in distance((want, want), want, near).problem
    assert not distance(np.zeros((0, 3)), np.zeros((0, 3)), near).problem


def test_a_share_may_be_further_off() -> None:
    rare = Tolerance("rare", "a test", absolute=0.1, share=0.25)
    assert not distance(np.array([0, 0, 0, 5.0]), np.zeros(4), rare).problem
    assert distance(np.array([0, 0, 5.0, 5.0]), np.zeros(4), rare).problem
    assert distance(np.array([0, 0, 0, np.nan]), np.zeros(4), rare).problem


def test_exact_means_bits() -> None:
    exact = Tolerance("exact", "a test")
    quiet, other = (np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert not distance(quiet, quiet, exact).problem
    assert distance(other, quiet, exact).problem
    assert distance(np.float32([-0.0]), np.float32([0.0]), exact).problem
    assert "dtype" in distance(np.float64([1]), np.float32([1]), exact).problem


# Lowering and compiling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [c for c in cases.CASES if c.compiled], ids=lambda c: c.id.replace(": ", "-")
)
def test_every_kernel_is_lowered_for_cuda(case: Case) -> None:
    assert lowering.lowered(case.bound(interpret=False), case.arrays()) >= 1


def test_a_block_that_is_no_power_of_two_is_not_lowered() -> None:
    (control,) = (c for c in CONTROLS if c.gate == "lowering")
    with pytest.raises(ValueError, match="power of 2"):
        lowering.lowered(control.case.bound(interpret=False), control.case.arrays())


SOUND = Compiled(
    "1",
    "2",
    {
        "f: a": (Kernel("k", 100, 0, 5000, 128),),
        "f: b": (Kernel("k", 9, 0, 0, 128), Kernel("m", 9, 0, 0, 128)),
    },
)


@pytest.mark.parametrize(
    ("kernels", "problem"),
    [
        ((Kernel("k", 108, 0, 6024, 128),), ""),
        ((Kernel("k", 10, 0, 0, 128),), ""),
        ((Kernel("k", 109, 0, 5000, 128),), "k grew from 100 to 109 registers"),
        ((Kernel("k", 100, 0, 6025, 128),), "k grew from 5,000 to 6,025 shared"),
        ((Kernel("k", 100, 4, 5000, 128),), "k spills 4 bytes"),
        ((Kernel("k", 100, 0, 5000, 256),), "k has 256 threads and 128 in the table"),
        ((Kernel("k", 100, 0, 5000, 128), Kernel("n", 1, 0, 0, 128)), "n is not in the table"),
        ((), "k is in the table and no longer compiled"),
        ("ValueError: no", "ValueError: no"),
    ],
    ids=["slack", "less", "registers", "shared", "spill", "threads", "new", "gone", "fails"],
)
def test_the_budget(kernels, problem: str) -> None:
    found = "; ".join(table.problems(Compiled("1", "2", {"f: a": kernels}), SOUND, "f: a"))
    assert found.startswith(problem) and bool(found) == bool(problem)


def test_a_case_that_is_gone_is_missed() -> None:
    assert table.missing(Compiled("1", "2", {"f: a": ()}), SOUND) == [
        "f: b is in the table and not a case any more"
    ]


def test_the_table_is_written_and_read(tmp_path: Path) -> None:
    path, readme = tmp_path / "table.json", tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    spills = {"f: c": (Kernel("k", 255, 8, 0, 128),), "f: d": "ValueError: no"}
    table.write_table(path, Compiled("1", "2", SOUND.cases | spills))
    assert table.read_table(path) == SOUND
    text = readme.read_text()
    assert "| f | a | k | 128 | 100 | 5,000 | 4 |" in text and "old" not in text and text.endswith("after\n")
    path.write_text("{}")
    with pytest.raises(ValueError, match="no table of kernels"):
        table.read_table(path)
    with pytest.raises(ValueError, match="one line"):
        table.with_table("nothing", SOUND)


def test_the_committed_table_is_complete_and_in_the_readme() -> None:
    committed = table.read_table(ROOT / "kernels" / "table.json")
    assert list(committed.cases) == [case.id for case in cases.CASES if case.compiled]
    text = (ROOT / "kernels" / "README.md").read_text()
    assert table.with_table(text, committed) == text


def test_kernels_are_compiled_for_a_gpu() -> None:
    """Two cheap cases and the control that spills; `goldenkv kernels check` compiles all."""
    try:
        environment = find(run.ENVIRONMENT, install=False)
    except Unavailable as reason:
        pytest.skip(str(reason))
    wanted = ["gather_pages: flash", "compress_blocks: flash index"]
    (control,) = (c.case.id for c in CONTROLS if c.gate == "compiling")
    made = compile_cases(environment, [*wanted, control])
    committed = table.read_table(run.TABLE)
    for name in wanted:
        assert table.problems(made, committed, name) == []
    assert "spills" in table.problems_alone(made, control)[0]


@pytest.mark.parametrize("interpreter", ["none", "slow"])
def test_an_interpreter_that_cannot_answer_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: str
) -> None:
    """One that is gone, and one that takes longer than it may."""
    python = Path(sys.executable)
    if interpreter == "none":
        python = tmp_path / "python"
    else:
        monkeypatch.setattr(compilation, "LIMIT_SECONDS", 0.01)
    with pytest.raises(
        compilation.CompilingFailed, match="did not start" if interpreter == "none" else "took over 0.01 s"
    ):
        compile_cases(Environment(python, tmp_path), [])


def test_an_environment_without_its_interpreter_is_none(tmp_path: Path) -> None:
    """The Python that it was made from is gone: its link leads nowhere. The stamp alone proves nothing."""
    (tmp_path / "installed.txt").write_text("\n".join((*PACKAGES, *PLUGINS)) + "\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "gone")
    with pytest.raises(Unavailable, match="no environment"):
        find(tmp_path, install=False)


def test_an_environment_that_is_not_there_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="--install"):
        find(tmp_path / "none", install=False)


# The command and the benchmark ------------------------------------------------------------------------------


def check(*arguments: str):
    return CliRunner().invoke(command.app, ["check", *arguments], env={"COLUMNS": "80", "TERM": "dumb"})


def test_the_command_passes_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = check("gather_pages", "--no-compile", "--json", str(file))
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "skipped: compiling for sm_90a" in said
    assert "2 cases; 7 kernels that are wrong on purpose were refused; no speed was measured" in said
    assert max(map(len, done.output.splitlines())) <= 80
    data = json.loads(file.read_text())
    assert data["ok"] and [c["case"] for c in data["cases"]] == ["flash", "small"]
    assert all(c["caught"] for c in data["controls"])


def test_the_command_fails_with_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    (wrong,) = (c.case for c in CONTROLS if c.gate == "numerics")
    monkeypatch.setattr(cases, "CASES", (wrong,))
    monkeypatch.setattr(run, "CONTROLS", ())
    done = check("--no-compile")
    assert done.exit_code == 1 and "failed: control: leaves a row out, pallas" in " ".join(
        done.output.split()
    )


def test_the_command_fails_if_a_control_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(CONTROLS[0], case=replace(CONTROLS[0].case, options={}))
    monkeypatch.setattr(run, "CONTROLS", (harmless,))
    done = check("gather_pages", "--no-compile")
    assert done.exit_code == 1 and "a wrong kernel passed numerics" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "expected sparse_attention"),
        (["select", "--update"], "all functions"),
        (["--json", "no/x"], "no folder"),
    ],
)
def test_the_command_refuses(arguments: list[str], message: str) -> None:
    done = check(*arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_bench", ROOT / "kernels" / "bench.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_says_that_there_is_no_gpu(bench: ModuleType, capsys: pytest.CaptureFixture) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    assert bench.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_the_benchmark_runs_dry(bench: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    only = [a for name in ("gather", "scatter", "copy", "compress_blocks index") for a in ("--only", name)]
    assert bench.main(["--dry-run", "--json", str(file), "--seed", "5", *only]) == 0
    data = json.loads(file.read_text())
    timed = [(p["name"], p["implementation"]) for p in data["points"]]
    assert ("scatter_pages", "pallas") in timed and ("copy", "xla") in timed and len(timed) == 7
    assert all(p["seconds"] is None and p["floor"] > 0 for p in data["points"])
    assert data["numerics"] and data["targets"] == {} and data["not_measured"] == []


def test_the_benchmark_lists_what_it_had_no_time_for(bench: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert bench.main(["--dry-run", "--json", str(file), "--only", "copy", "--seconds", "0"]) == 0
    data = json.loads(file.read_text())
    assert data["points"] == [] and [p["name"] for p in data["not_measured"]] == ["copy"]


def test_floors() -> None:
    """512 selected and 128 window rows of 1,024 bytes; 64 heads of 512 channels, bfloat16 in, float32 out."""
    work = roofline.attention(2, 512, native=False)
    assert work.nbytes == 2 * (640 * 1024 + 64 * 512 * 6) and work.operations == 2 * 4 * 64 * 512 * 640
    assert work.bound == "bytes" and work.seconds == work.nbytes / 4.3e12
    assert roofline.Work(1.0, 1e6).bound == "operations"
    assert roofline.attention(1, 512, native=True).nbytes == 128 * 1024 + 512 * 584 + 64 * 512 * 6


def test_the_command_is_a_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "goldenkv_kernels.command", "check", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "address by address" in " ".join(done.stdout.split())
