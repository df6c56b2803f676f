"""The radix tree at scale, and against SGLang's radix cache in the same run.

    python tests/bench/radix.py [--repeat N] [--most PAGES]

Pages of 256 tokens. A tree is filled with conversations of 100 pages that share their first 20 with nine
others. Then, at each size: a prompt of 128,000 tokens (500 pages) is matched and used, coarse (inserted at
once) and fine (another sequence branches off behind every page), and 1,000 new pages are inserted into memory
that 1,000 evicted pages have just left. What an insert costs while the tree grows is measured while it is
filled: there the memory is new, and most of the time is that of touching it for the first time. Memory is
what the process grew by while a tree was filled, in a process of its own; `tracemalloc` says how much of it
Python knows of, `estimated` is the tree's own count.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import seconds

from goldenkv.prefix import RadixTree

sys.path.append(str(Path(__file__).parents[1] / "parity"))
from sglang_tree import NoSGLang, SGLangTree

P, NS = 256, b"namespace"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
THEIR_MOST = 50_000
"""Pages of SGLang's tree: it takes several kB for each."""
PROMPT, NEW, VOCABULARY = 500, 1_000, 129_280


def conversations(pages: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Token ids of conversations, until so many different pages are there."""
    rng, made, number = np.random.default_rng(seed), 0, 0
    shared = np.zeros(0, np.int32)
    while made < pages:
        if number % 10 == 0:
            shared = rng.integers(0, VOCABULARY, 20 * P).astype(np.int32)
            made += 20
        own = rng.integers(0, VOCABULARY, min(80, max(pages - made, 1)) * P).astype(np.int32)
        made, number = made + len(own) // P, number + 1
        yield np.concatenate([shared, own])


class Ours:
    """This project's tree."""

    def __init__(self) -> None:
        self.tree, self.ids = RadixTree(P), itertools.count()

    def add(self, tokens: np.ndarray) -> Callable[[], object]:
        """What inserts a prompt; all that the caller would have at hand is made before."""
        known = self.tree.match(NS, tokens).pages.tolist()
        pages = [*known, *itertools.islice(self.ids, len(tokens) // P - len(known))]
        return lambda: self.tree.insert(NS, tokens, pages)

    def find(self, tokens: np.ndarray) -> Callable[[], object]:
        """What matches a prompt and says that it is used."""

        def work() -> None:
            found = self.tree.match(NS, tokens)
            assert found.length == len(tokens)
            self.tree.touch(found, found.length)

        return work

    def look(self, tokens: np.ndarray) -> Callable[[], object]:
        """What matches a prompt, no more."""
        return lambda: self.tree.match(NS, tokens)

    def evict(self, pages: int) -> Callable[[], object]:
        """What frees so many pages."""
        return lambda: self.tree.evict(pages=pages)


class Theirs:
    """SGLang's; a match is a use."""

    def __init__(self) -> None:
        self.tree = SGLangTree(P)

    def add(self, tokens: np.ndarray) -> Callable[[], object]:
        import torch

        key, slots = self.tree.key(tokens), torch.arange(len(tokens))
        return lambda: self.tree.insert(key, slots)

    def find(self, tokens: np.ndarray) -> Callable[[], object]:
        key = self.tree.key(tokens)

        def work() -> None:
            assert self.tree.match(key) == len(tokens)

        return work

    def evict(self, pages: int) -> Callable[[], object]:
        return lambda: self.tree.evict(pages * P)


def fill(tree: Any, pages: int) -> float:
    """Microseconds an inserted page."""
    return 1e6 * sum(seconds(tree.add(tokens)) for tokens in conversations(pages)) / pages


def prompts(seed: int) -> dict[str, np.ndarray]:
    """Two of 500 pages, and one of 1,000."""
    rng = np.random.default_rng(1_000 + seed)
    sizes = {"coarse": PROMPT, "fine": PROMPT, "insert": NEW}
    return {name: rng.integers(0, VOCABULARY, n * P).astype(np.int32) for name, n in sizes.items()}


def timings(tree: Any, seed: int) -> dict[str, float]:
    """Microseconds a page, once; the tree is as large afterwards as before."""
    given = prompts(seed)
    tree.add(given["coarse"])()
    tree.add(given["fine"])()
    for page in range(1, PROMPT + 1):  # a sequence of one page more branches off
        tree.add(np.append(given["fine"][: page * P], np.full(P, 7, np.int32)))()
    found = {}
    for name in ("coarse", "fine"):
        work = tree.find(given[name])
        work()
        found[f"match {name}"] = statistics.median(seconds(work) for _ in range(7)) / PROMPT
    if hasattr(tree, "look"):
        work = tree.look(given["coarse"])
        found["match coarse, without use"] = statistics.median(seconds(work) for _ in range(7)) / PROMPT
    inserts, evictions = [], []
    for turn in range(5):
        inserts.append(seconds(tree.add(np.roll(given["insert"], turn))))
        evictions.append(seconds(tree.evict(NEW)))
    found["insert, memory used again"] = statistics.median(inserts[1:]) / NEW
    found["evict"] = statistics.median(evictions) / NEW
    tree.evict(3 * PROMPT)()
    return {name: 1e6 * value for name, value in found.items()}


def resident() -> int:
    """Bytes of this process in memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) * 1024


def memory(kind: str, pages: int) -> dict[str, float]:
    """Bytes a page of a tree that is filled here."""
    tree: Any = Ours() if kind == "ours" else Theirs()
    fill(tree, 200)
    gc.collect()
    before = resident()
    for tokens in conversations(pages, seed=1):
        tree.add(tokens)()
    gc.collect()
    out = {"resident": (resident() - before) / pages}
    if kind == "ours":
        out["estimated"] = tree.tree.stats().host_bytes / (pages + 200)
        del tree
        gc.collect()
        tracemalloc.start()
        tree = Ours()
        fill(tree, pages)
        gc.collect()
        out["tracemalloc"] = tracemalloc.get_traced_memory()[0] / pages
    return out


def memory_apart(kind: str, pages: int) -> dict[str, float]:
    """As `memory`, in a process of its own."""
    command = [sys.executable, __file__, "--memory", kind, str(pages)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def radix(repeat: int, most: int = SIZES[-1]) -> dict:
    """Microseconds and bytes a page by the size of the tree; the two trees in turn where SGLang is there."""
    out: dict[str, Any] = {"microseconds_a_page": {}, "bytes_a_page": {}}
    try:
        theirs: Theirs | None = Theirs()
    except NoSGLang as missing:
        theirs, out["sglang"] = None, str(missing)
    for size in [size for size in SIZES if size <= most]:
        ours = Ours()
        growing = fill(ours, size)
        gc.collect()
        gc.freeze()
        rows = [timings(ours, seed) for seed in range(repeat)]
        out["microseconds_a_page"][f"{size:,} pages"] = median(rows) | {"insert, growing": growing}
        del ours
        gc.unfreeze()
        gc.collect()
    out["bytes_a_page"]["50,000 pages"] = memory_apart("ours", THEIR_MOST)
    if theirs is not None:
        ours = Ours()
        growing = fill(ours, THEIR_MOST), fill(theirs, THEIR_MOST)
        gc.collect()
        gc.freeze()
        pairs = [(timings(ours, seed), timings(theirs, seed)) for seed in range(repeat)]
        gc.unfreeze()
        out["sglang"] = {
            "pages": THEIR_MOST,
            "microseconds_a_page": median([theirs for _, theirs in pairs]),
            "ours": median([ours for ours, _ in pairs]),
            "theirs_times_ours": median([{n: b[n] / a[n] for n in b} for a, b in pairs]),
            "insert, growing": {"ours": growing[0], "theirs": growing[1], "ratio": growing[1] / growing[0]},
            "bytes_a_page": memory_apart("theirs", THEIR_MOST),
        }
    return out


def main() -> None:
    """Prints JSON."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--repeat", type=int, default=5)
    arguments.add_argument("--most", type=int, default=SIZES[-1], help="pages of the largest tree")
    arguments.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.memory:
        print(json.dumps(memory(chosen.memory[0], int(chosen.memory[1]))))
    else:
        print(json.dumps(radix(chosen.repeat, chosen.most), indent=1))


if __name__ == "__main__":
    main()
