"""Controls: damage that real systems did. Each must be caught, or the gate fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from ..engine import ApproximateState, FreeShapeEngine, OneWindow, PrefixCache
from ..engine.policies import replay_length
from ..state import CorruptSnapshot, Rows, Snapshot, compare
from .cold import AT_PROMPT, ColdRun
from .paths import served_again
from .report import Result

Damage = Callable[[ColdRun, Rows], Rows]


def lines(gate: ColdRun) -> dict[str, Callable[[ColdRun], Result]]:
    """The controls that the model and the prompt allow.

    A model without CSA layers has no overlap, a short prompt may have no entries, and one window may be
    enough for one layer.
    """
    found: dict[str, Callable[[ColdRun], Result]] = {}
    if any("overlap" in name for name in gate.snapshot.rows):
        found["overlap dropped"] = partial(_damaged, "overlap dropped", _drop_overlap)
    found["stale window rows"] = partial(_damaged, "stale window rows", _stale_window)
    if _entries(gate) is not None:
        found["two entries swapped"] = partial(_damaged, "two entries swapped", _swap_entries)
    pages = len(gate.tokens) // gate.engine.geometry.page_size * gate.engine.geometry.page_size
    if gate.config.sliding_window < replay_length(gate.config, pages) <= pages:
        found["one window replayed"] = _one_window
    return found | {
        "bit flipped": _flipped_bit,
        "bit flipped, unverified": _flipped_bit_unverified,
        "free-shape chunks": _free_shape,
    }


def _damaged(name: str, damage: Damage, gate: ColdRun) -> Result:
    rows = damage(gate, dict(gate.snapshot.rows))
    return _control(name, replace(gate.snapshot, rows=rows), gate)


def _control(name: str, snapshot: Snapshot, gate: ColdRun) -> Result:
    began = time.perf_counter()
    seq = gate.engine.restore(snapshot)
    seconds = gate.ready(began)
    return _judged(name, gate.finish(seq), seconds, gate, nbytes=snapshot.nbytes)


def _judged(
    name: str, found: Rows, seconds: float, gate: ColdRun, *, reused: int | None = None, nbytes: int = 0
) -> Result:
    """What damage at the prompt's end does later: the damaged rows themselves are not compared."""
    later = {name: rows for name, rows in gate.expected.items() if not name.startswith(AT_PROMPT)}
    difference = compare(later, {name: found[name] for name in later})
    wrong = np.flatnonzero(~difference.by_name["logits"])
    if difference.same:
        caught = ""
    elif len(wrong):
        caught = f"logits: from decode step {wrong[0] + 1}"
    else:
        caught = "state: no logits differ yet"
    length = gate.snapshot.length if reused is None else reused
    return Result(name, True, length, nbytes, difference, seconds, caught)


def _drop_overlap(gate: ColdRun, rows: Rows) -> Rows:
    """The first half of the last finished block's rows, which looks empty at a block boundary."""
    return rows | {name: np.zeros_like(r) for name, r in rows.items() if "overlap" in name}


def _stale_window(gate: ColdRun, rows: Rows) -> Rows:
    """The window of a stranger of the same length: a slot's ring that was not restored."""
    seq = gate.engine.open()
    gate.engine.prefill(seq, gate.stranger(gate.snapshot.length))
    stale = gate.engine.rows(seq)
    gate.engine.close(seq)
    return rows | {name: stale[name] for name in rows if name.endswith(".window")}


def _entries(gate: ColdRun) -> str | None:
    """The first cell with two entries to swap."""
    rows = gate.snapshot.rows
    return next((n for n, r in rows.items() if n.endswith(".entries") and len(r) > 1), None)


def _swap_entries(gate: ColdRun, rows: Rows) -> Rows:
    """The first two entries of the first layer that has two."""
    name = _entries(gate)
    assert name is not None
    order = np.arange(len(rows[name]))
    order[:2] = 1, 0
    return rows | {name: rows[name][order]}


def _one_window(gate: ColdRun) -> Result:
    """A prefix cache that replays one window only: what it makes differs, and is not let into the cache."""
    cache = PrefixCache(gate.engine, OneWindow())
    again, seconds = served_again(gate, cache, len(gate.tokens))
    assert again.plan is not None
    try:
        cache.publish(again)
        published = True
    except ApproximateState:
        published = False
    found = gate.finish(again.seq, partial(cache.decode, again), close=False)
    cache.cancel(again)
    cache.forget(again.namespace)
    result = _judged("one window replayed", found, seconds, gate, reused=again.plan.start)
    return replace(result, caught="") if published else result


def _flipped_file(gate: ColdRun) -> bytes:
    """The snapshot's file with one bit flipped: the lowest of the newest entry, or window row if none."""
    data = bytearray(gate.snapshot.to_bytes(gate.config))
    name = _entries(gate) or next(n for n in gate.snapshot.rows if n.endswith(".window"))
    rows = gate.snapshot.rows[name]
    data[data.index(rows.tobytes()) + rows[:-1].nbytes] ^= 1
    return bytes(data)


def _flipped_bit(gate: ColdRun) -> Result:
    began = time.perf_counter()
    caught = ""
    try:
        Snapshot.from_bytes(_flipped_file(gate))
    except CorruptSnapshot as error:
        caught = f"checksum: {error}"
    seconds = time.perf_counter() - began
    length, nbytes = gate.snapshot.length, gate.snapshot.nbytes
    return Result("bit flipped", True, length, nbytes, None, seconds, caught)


def _flipped_bit_unverified(gate: ColdRun) -> Result:
    snapshot = Snapshot.from_bytes(_flipped_file(gate), verify=False)
    return _control("bit flipped, unverified", snapshot, gate)


def _free_shape(gate: ColdRun) -> Result:
    """The same prompt in two chunk plans, each chunk computed in its own shape."""
    tokens = gate.tokens[:576]
    engine = FreeShapeEngine(gate.model, gate.config, gate.source.numerics, max_length=len(tokens))
    found = []
    began = time.perf_counter()
    for size in (64, 96):
        plan = [min(size, len(tokens) - done) for done in range(0, len(tokens), size)]
        seq = engine.open()
        logits = engine.prefill(seq, tokens, plan)
        found.append(engine.rows(seq) | {"logits": logits[None]})
        engine.close(seq)
    seconds = time.perf_counter() - began
    difference = compare(*found)
    caught = "" if difference.same else "comparison: two chunk plans differ"
    return Result("free-shape chunks", True, 0, 0, difference, seconds, caught)
