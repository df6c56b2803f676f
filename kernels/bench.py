"""Measures the kernels on a GPU: right first, then how fast, against XLA and the floors of an H200.

    python kernels/bench.py --json bench.json      on a machine with a GPU, under 6 minutes
    python kernels/bench.py --dry-run              anywhere: every step once at small sizes, nothing is timed

Everything is compiled first, on all cores. When time runs out, the rest is listed as not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax

from goldenkv_kernels.gates.case import Case, distance
from goldenkv_kernels.gates.cases import CASES
from goldenkv_kernels.gates.points import TURNS, Point, copy, points

REPEATS = 9
"""How often a loop is timed; the median counts."""

TARGETS = {"sparse_attention bf16": 0.6, "gather_pages": 0.8, "scatter_pages": 0.8, "index_scores": 0.5}
"""Share of the floor to reach at the usual size, with Pallas."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not options.dry_run and jax.default_backend() != "gpu":
        found = f"JAX {jax.__version__} finds {jax.default_backend()} devices only"
        print(f"nothing was measured: this needs a GPU, and {found} (--dry-run needs none)", file=sys.stderr)
        return 2
    end = time.monotonic() + options.seconds
    cases = [c for c in CASES if _chosen(options, c.kernel) and not (options.dry_run and c.compiled)]
    sizes = (
        ((2,), (1024,), (3,))
        if options.dry_run
        else ((32, 1, 8, 64), (65536, 4096, 262144), (1024, 64, 4096))
    )
    wanted = [
        p for p in [copy(2**12 if options.dry_run else 2**30), *points(*sizes)] if _chosen(options, p.name)
    ]
    result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "dry_run": options.dry_run}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        result |= {"seed": options.seed, "numerics": numerics(pool, cases, options.seed)}
        result |= measured(pool, wanted, end, turns=2 if options.dry_run else TURNS, dry=options.dry_run)
    result["targets"] = dict(targets(result["points"]))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [n for n in result["numerics"] if n["problem"]] + [p for p in result["points"] if p["problem"]]
    for item in wrong:
        print(f"FAILED {item}")
    print(f"{len(result['numerics'])} results compared with float64, {len(wrong)} failures in all")
    for name, target in result["targets"].items():
        print(f"{name}: {target['share']:.0%} of the floor, target {target['target']:.0%}")
    return 1 if wrong else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write the results to this file")
    made.add_argument("--dry-run", action="store_true", help="run every step once, at small sizes")
    made.add_argument("--only", action="append", default=[], help="functions whose name holds this")
    made.add_argument("--seconds", type=float, default=330.0, help="after which no further point is begun")
    made.add_argument(
        "--seed", type=int, default=time.time_ns() % 2**31, help="of the inputs; the clock's by default"
    )
    return made


def _chosen(options: argparse.Namespace, name: str) -> bool:
    return not options.only or any(part in name for part in options.only)


def numerics(pool: ThreadPoolExecutor, cases: Sequence[Case], seed: int) -> list[dict[str, Any]]:
    """Every case under both implementations, as they run on this machine, against float64."""

    def one(case: Case, implementation: str) -> dict[str, Any]:
        found = {"case": case.id, "implementation": implementation, "error": None, "allowed": None}
        try:
            arrays = case.arrays(seed)
            off = distance(case.bound(implementation)(arrays), case.expected(**arrays), case.tolerance)
            return found | {"error": off.error, "allowed": off.allowed, "problem": off.problem}
        except Exception as error:
            return found | {"problem": f"{type(error).__name__}: {error}"[:300]}

    waiting = [pool.submit(one, case, name) for case in cases for name in ("pallas", "xla")]
    return [future.result() for future in waiting]


def measured(
    pool: ThreadPoolExecutor, wanted: Sequence[Point], end: float, *, turns: int, dry: bool
) -> dict[str, Any]:
    """Compiles all points side by side, for 55% of the time at most, then times one after the other."""
    key = jax.random.key(0)
    last = time.monotonic() + 0.55 * (end - time.monotonic())

    def compiled(point: Point, implementation: str) -> Any:
        if time.monotonic() > last:
            return None
        function = jax.jit(point.loop(implementation, turns), donate_argnums=0)
        return function.lower(*jax.eval_shape(point.split, key)).compile()

    waiting = [(p, name, pool.submit(compiled, p, name)) for p in wanted for name in p.implementations]
    wait([future for _, _, future in waiting])  # compiling beside a kernel that is timed would slow it down
    done, left = [], []
    for point, name, future in waiting:
        about = {"name": point.name, "size": point.size, "usual": point.usual, "implementation": name}
        try:
            run = future.result()
            if run is None or time.monotonic() > end:
                left.append(about)
                continue
            arrays = jax.jit(point.split)(key)
            seconds = statistics.median(timings(run, point, arrays, 1 if dry else REPEATS)) / turns
            share, problem = point.work.seconds / seconds, ""
            del arrays
        except Exception as error:
            seconds, share, problem = None, None, f"{type(error).__name__}: {error}"[:300]
        if dry:
            seconds = share = None  # an interpreter's times mean nothing
        work = {"floor": point.work.seconds, "bound": point.work.bound, "intensity": point.work.intensity}
        done.append(about | work | {"seconds": seconds, "share": share, "problem": problem})
        if seconds is not None:
            print(f"{point.name}, {point.size}, {name}: {seconds * 1e6:.1f} us, {share:.0%} of the floor")
    return {"points": done, "not_measured": left}


def timings(run: Any, point: Point, arrays: Any, repeats: int) -> Iterator[float]:
    """Seconds of a loop, without the first time."""
    carried, others = arrays
    for repeat in range(repeats + 1):
        begin = time.perf_counter()
        result = jax.block_until_ready(run(carried, others))
        if repeat:
            yield time.perf_counter() - begin
        carried = result if point.carried else None


def targets(found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    """What was reached where a target is set."""
    for point in found:
        if (
            point["usual"]
            and point["implementation"] == "pallas"
            and point["share"]
            and point["name"] in TARGETS
        ):
            share = point["share"]
            yield point["name"], {"share": share, "target": TARGETS[point["name"]]}


if __name__ == "__main__":
    sys.exit(main())
