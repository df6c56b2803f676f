"""Parity with the published inference code, on golden files that it computed from random weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from ..config import LayerKind, ModelConfig, Numerics
from ..engine.engine import Engine
from ..model.checkpoint import CheckpointError, load_checkpoint
from ..model.tile import Probe
from ..model.weights import Model
from ..ops.compress import visible_entries
from ..ops.index import index_scores
from ..state.components import Span, cells
from ..state.pool import Rows
from .report import ParityReport, ParityRow, compare_arrays

QUANTISED_MEAN = 0.01
"""Largest mean difference of logits under fake quantisation, where one flipped rounding spreads."""


def compare_golden(
    directory: str | os.PathLike[str],
    which: str = "plain",
    tolerance: float = 1e-4,
) -> ParityReport:
    """Compares this project with values that the published inference code computed from the same weights.

    Plain: logits, streams, selections and every component of the state, within `tolerance`, once prefilled
    and once token by token. Quantised: the mean difference of the logits, at most 0.01; all else is
    information.

    Args:
        directory: `config.json`, `model.safetensors` and `expected_plain.safetensors` or
            `expected_quantised.safetensors`.
        which: "plain" or "quantised", without or with fake quantisation.
        tolerance: largest absolute difference.

    Raises:
        CheckpointError: a file is missing.
        ValueError: another `which`.
    """
    if which not in ("plain", "quantised"):
        raise ValueError(f"{which=} must be 'plain' or 'quantised'")
    path = Path(directory) / f"expected_{which}.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{os.fspath(directory)!r} holds no {path.name}")
    numerics = Numerics(fake_quantisation=which == "quantised")
    config, model = load_checkpoint(directory, numerics=numerics)
    return golden_report(model, config, numerics, load_file(path), tolerance, f"published code, {which}")


def golden_report(
    model: Model,
    config: ModelConfig,
    numerics: Numerics,
    expected: Mapping[str, np.ndarray],
    tolerance: float = 1e-4,
    name: str = "published code",
) -> ParityReport:
    """As `compare_golden`, for a model and expected values in memory."""
    tokens = expected["input_ids"]
    length = len(tokens)
    limit = None if numerics.fake_quantisation else tolerance
    engine = Engine(model, config, numerics, slots=2, max_length=length)
    sequence = engine.open()
    logits, probe = engine.prefill_probed(sequence, tokens)
    ours = engine.rows(sequence)
    theirs = golden_state(expected, config, length)

    rows = _logits("logits", logits, expected["logits"], limit)
    if not numerics.fake_quantisation:
        other = engine.open()
        steps = np.stack([engine.decode(other, int(token)) for token in tokens])
        rows.append(compare_arrays("logits, token by token", steps, expected["logits"], limit))
        stepped = engine.rows(other)
    rows.append(
        compare_arrays("streams_last", np.asarray(probe.streams[-1]), expected["streams_last"], limit)
    )
    for layer in config.layers:
        tail = expected[f"layer{layer}.streams_tail"]
        part = np.asarray(probe.streams[layer][length - len(tail) :])
        rows.append(compare_arrays(f"layer{layer}.streams_tail", part, tail, limit))
        if config.kind(layer) is LayerKind.CSA:
            rows.append(_selection(layer, config, probe, ours, expected[f"layer{layer}.selected"], limit))
    for cell, values in theirs.items():
        note = f"the last {len(values)} of the file's 128 rows" if cell.endswith(".window") else ""
        rows.append(compare_arrays(cell, ours[cell], values, limit, note))
    if not numerics.fake_quantisation:
        rows.append(_worst("state, token by token", stepped, theirs, limit))
    if probe.draft_logits is not None and "mtp_logits" in expected:  # position i there is row i + 1 here
        rows += _logits("mtp_logits", np.asarray(probe.draft_logits)[1:], expected["mtp_logits"], limit)
    return ParityReport(name, tuple(rows))


def golden_state(expected: Mapping[str, np.ndarray], config: ModelConfig, length: int) -> Rows:
    """The published code's buffers, cut to the rows and channels that the next step reads, by our names.

    The published CSA buffers hold 2 m rows: the last finished block, then the unfinished one. Its HCA buffers
    hold m rows by position in the block. Rows that the next step does not read are stale there.
    """
    state: Rows = {}
    for cell in cells(config):
        if cell.layer >= config.num_hidden_layers:
            continue  # the files hold no state of the MTP layer, only what it predicts
        component, prefix = cell.component, f"layer{cell.layer}."
        count, channels = cell.shape(config, length)
        kind = "kv" if component.name.endswith("_kv") else "score"
        buffer = f"{prefix}state.{'index_' if component.name.startswith('index_') else ''}{kind}"
        match component.span:
            case Span.WINDOW:
                found = expected[f"{prefix}window"]
                state[cell.name] = found[len(found) - count :]
            case Span.ENTRIES:
                state[cell.name] = expected[prefix + component.name.replace("entries", "compressed")]
            case Span.LAST_BLOCK:
                state[cell.name] = expected[buffer][:count, :channels]
            case Span.UNFINISHED:
                ratio = config.compress_ratios[cell.layer]
                start = ratio if config.kind(cell.layer) is LayerKind.CSA else 0
                state[cell.name] = expected[buffer][start : start + count]
    return state


def _logits(name: str, ours: np.ndarray, theirs: np.ndarray, limit: float | None) -> list[ParityRow]:
    """The largest difference; without a limit for it, also the mean one, which has one."""
    rows = [compare_arrays(name, ours, theirs, limit)]
    if limit is None:
        mean = float(np.mean(np.abs(ours.astype(np.float64) - theirs)))
        ok, note = mean <= QUANTISED_MEAN, "mean absolute difference: one flipped rounding spreads"
        rows.append(ParityRow(f"{name}, mean", mean, (), rows[0].scale, QUANTISED_MEAN, ok, note))
    return rows


def _worst(name: str, ours: Rows, theirs: Rows, tolerance: float | None) -> ParityRow:
    """One row for all components: the worst of them."""
    rows = [compare_arrays(cell, ours[cell], values, tolerance) for cell, values in theirs.items()]
    worst = max(rows, key=lambda row: (not row.ok, row.difference or 0.0))
    return replace(worst, name=name, note=f"the worst of {len(rows)}: {worst.name} {worst.note}".rstrip())


def _selection(
    layer: int, config: ModelConfig, probe: Probe, rows: Rows, expected: np.ndarray, tolerance: float | None
) -> ParityRow:
    """How many queries selected other entries than expected.

    An entry may be on one side only where its score ties with the k-th best to within the tolerance.
    """
    q, weight, chosen = probe.index_q[layer], probe.index_weight[layer], probe.selected[layer]
    assert q is not None and weight is not None and chosen is not None
    keys = rows[f"layers.{layer}.index_keys"]
    scores = np.asarray(index_scores(jnp.asarray(q), jnp.asarray(keys), jnp.asarray(weight)))
    positions = jnp.arange(len(scores), dtype=jnp.int32)
    counts = np.asarray(visible_entries(positions, config.compress_ratios[layer]))
    near = 1e-4 if tolerance is None else tolerance
    wrong, close = 0, 0
    first: tuple[int, ...] = ()
    for t, count in enumerate(counts):
        ours, theirs = (set(ids[t][ids[t] >= 0].tolist()) for ids in (np.asarray(chosen), expected))
        seen = scores[t, :count]
        ranked = np.sort(seen)[::-1]
        k = min(config.index_topk, count)
        close += bool(k < count and ranked[k - 1] - ranked[k] <= near)
        moved = [e for e in ours ^ theirs if e >= count or abs(seen[e] - ranked[k - 1]) > near]
        if moved or len(ours) != len(theirs):
            wrong += 1
            first = first or (t,)
    note = (
        f"queries with other entries; {close} of {len(scores)} have a tie within {near:g} at the last place"
    )
    ok = tolerance is None or wrong == 0
    limit = None if tolerance is None else 0.0
    return ParityRow(f"layer{layer}.selected", float(wrong), first, None, limit, ok, note)
