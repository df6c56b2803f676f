"""Parity with other implementations: the published inference code (golden files) and transformers.

These are comparisons with a tolerance, of two programs that order their sums differently. Bit equality is
claimed only between runs of this project and tested elsewhere.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from .config import LayerKind, ModelConfig, Numerics, Yarn
from .engine.engine import Engine
from .errors import MissingExtra
from .model.checkpoint import CheckpointError, load_checkpoint, state_dict
from .model.tile import Probe
from .model.weights import Model
from .ops.compress import visible_entries
from .ops.index import index_scores
from .state.components import Span, cells
from .state.pool import Rows

QUANTISED_MEAN = 0.01
"""Largest mean difference of logits under fake quantisation, where one flipped rounding spreads."""


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One comparison.

    Attributes:
        name: what was compared.
        difference: the largest absolute difference, or what `note` says; None where nothing was compared.
        index: where it is.
        scale: the largest absolute value of the other implementation.
        tolerance: the largest difference that passes; None for information only.
        ok: False for a difference above the tolerance, for NaN and for other shapes.
        note: what a reader needs to know.
    """

    name: str
    difference: float | None
    index: tuple[int, ...] = ()
    scale: float | None = None
    tolerance: float | None = None
    ok: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """All comparisons with one other run."""

    name: str
    rows: tuple[ParityRow, ...]

    @property
    def ok(self) -> bool:
        """True where something was compared and everything passed."""
        return any(row.tolerance is not None for row in self.rows) and all(row.ok for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values; NaN and infinities as text, which JSON lacks."""

        def plain(value: Any) -> Any:
            return str(value) if isinstance(value, float) and not math.isfinite(value) else value

        rows = [{key: plain(value) for key, value in asdict(row).items()} for row in self.rows]
        return {"name": self.name, "ok": self.ok, "rows": rows}


def compare_arrays(
    name: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float | None, note: str = ""
) -> ParityRow:
    """The row for two arrays. Equal infinities differ by 0; a NaN on either side never passes."""
    if ours.shape != theirs.shape:
        return ParityRow(
            name, None, tolerance=tolerance, ok=False, note=f"shapes {ours.shape} and {theirs.shape} differ"
        )
    if not ours.size:
        return ParityRow(name, None, note="no rows at this length")
    left, right = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(left == right, 0.0, np.abs(left - right))
    index = tuple(int(i) for i in np.unravel_index(np.argmax(difference), difference.shape))
    worst = float(difference[index])  # argmax finds a NaN first
    ok = not math.isnan(worst) if tolerance is None else worst <= tolerance
    return ParityRow(name, worst, index, float(np.max(np.abs(right))), tolerance, ok, note)


def render(report: ParityReport, console: Console) -> None:
    """Prints a report as a table."""
    table = Table("compared", "difference", "at", "scale", "tolerance", "", "note", title=report.name)
    for row in report.rows:
        number = ["" if v is None else f"{v:.3g}" for v in (row.difference, row.scale, row.tolerance)]
        verdict = "" if row.ok and row.tolerance is None else "[green]ok" if row.ok else "[red]DIFFERS"
        at = ", ".join(map(str, row.index))
        table.add_row(row.name, number[0], at, number[1], number[2], verdict, row.note)
    console.print(table)


# The published inference code -------------------------------------------------------------------------------


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

    rows = [compare_arrays("logits", logits, expected["logits"], limit)]
    if numerics.fake_quantisation:
        mean = float(np.mean(np.abs(logits.astype(np.float64) - expected["logits"])))
        note = "mean absolute difference: one flipped rounding spreads"
        rows.append(
            ParityRow("logits, mean", mean, (), rows[0].scale, QUANTISED_MEAN, mean <= QUANTISED_MEAN, note)
        )
    else:
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
    if "mtp_logits" in expected:
        rows.append(ParityRow("mtp_logits", None, note="not compared: the model has no MTP layers yet"))
    return ParityReport(name, tuple(rows))


def golden_state(expected: Mapping[str, np.ndarray], config: ModelConfig, length: int) -> Rows:
    """The published code's buffers, cut to the rows and channels that the next step reads, by our names.

    The published CSA buffers hold 2 m rows: the last finished block, then the unfinished one. Its HCA buffers
    hold m rows by position in the block. Rows that the next step does not read are stale there.
    """
    state: Rows = {}
    for cell in cells(config):
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


# transformers -----------------------------------------------------------------------------------------------


def transformers_configs() -> dict[str, ModelConfig]:
    """Three small models in the layouts of Flash and Pro, and with HCA alone."""

    def small(ratios: tuple[int, ...], hash_layers: int, scale: float) -> ModelConfig:
        return ModelConfig(
            vocab_size=256, hidden_size=96, num_hidden_layers=len(ratios), compress_ratios=ratios,
            num_attention_heads=4, head_dim=64, qk_rope_head_dim=16, q_lora_rank=48,
            o_groups=2, o_lora_rank=32, index_n_heads=16, index_head_dim=32, index_topk=8,
            n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, num_hash_layers=hash_layers,
            routed_scaling_factor=scale, yarn=Yarn(factor=16.0, original_max_position_embeddings=256),
            max_position_embeddings=4096,
        )  # fmt: skip

    return {
        "Flash-like": small((0, 0, 4, 128, 4, 128), 3, 1.5),
        "Pro-like": small((128, 128, 4, 128, 4), 3, 2.5),
        "HCA only": small((128, 128), 0, 1.5),
    }


def compare_transformers(
    configs: Mapping[str, ModelConfig] | None = None,
    seed: int = 0,
    tolerance: float = 1e-4,
    length: int = 420,
    prefix: int = 260,
) -> list[ParityReport]:
    """Compares logits with transformers' `DeepseekV4ForCausalLM` on seeded random weights, in float32.

    Args:
        configs: by name; `transformers_configs` by default.
        seed: of weights and tokens.
        tolerance: largest absolute difference of logits.
        length: tokens of the sequence.
        prefix: tokens that are prefilled before the rest is decoded one by one.

    Raises:
        MissingExtra: torch or transformers is not installed.
    """
    reports = []
    for name, config in (transformers_configs() if configs is None else configs).items():
        model = Model(config, seed=seed)
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, length)
        theirs = transformers_logits(model, config, tokens, prefix)
        reports.append(transformers_report(model, config, tokens, prefix, theirs, tolerance, name))
    return reports


def transformers_report(
    model: Model,
    config: ModelConfig,
    tokens: np.ndarray,
    prefix: int,
    theirs: Mapping[str, np.ndarray],
    tolerance: float = 1e-4,
    name: str = "transformers",
) -> ParityReport:
    """Compares a model in memory with what `transformers_logits` returned."""
    engine = Engine(model, config, slots=2, max_length=len(tokens))
    whole = engine.prefill(engine.open(), tokens, all_logits=True)
    sequence = engine.open()
    start = engine.prefill(sequence, tokens[:prefix], all_logits=True)
    stepped = np.concatenate([start, *(engine.decode(sequence, int(t))[None] for t in tokens[prefix:])])
    rows = (
        compare_arrays("logits, one prefill", whole, theirs["prefill"], tolerance),
        compare_arrays(f"logits, {prefix} prefilled, then one by one", stepped, theirs["decode"], tolerance),
    )
    return ParityReport(f"transformers, {name}", rows)


def transformers_logits(
    model: Model, config: ModelConfig, tokens: np.ndarray, prefix: int
) -> dict[str, np.ndarray]:
    """Logits of the same weights in transformers: "prefill" in one call, "decode" one by one after `prefix`.

    Torch runs on one thread meanwhile: the matrices are small.
    """
    try:
        import torch
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
    except ImportError:
        raise MissingExtra("parity", "the comparison with transformers") from None
    theirs = DeepseekV4ForCausalLM(DeepseekV4Config(**_transformers_config(config))).float().eval()
    weights = {name: torch.from_numpy(value) for name, value in state_dict(model, "transformers").items()}
    theirs.load_state_dict(weights, strict=True)
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            whole = theirs(ids, use_cache=False).logits[0]
            cache = DynamicCache(config=theirs.config)
            parts = [theirs(ids[:, :prefix], cache=cache, use_cache=True).logits[0]]
            for t in range(prefix, ids.shape[1]):
                parts.append(theirs(ids[:, t : t + 1], cache=cache, use_cache=True).logits[0])
    finally:
        torch.set_num_threads(threads)
    return {"prefill": whole.numpy(), "decode": torch.cat(parts).numpy()}


def _transformers_config(config: ModelConfig) -> dict[str, Any]:
    """The arguments of transformers' configuration class, layer types included: its default fits no V4."""
    same = (
        "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
        "head_dim", "q_lora_rank", "num_experts_per_tok", "n_routed_experts", "n_shared_experts",
        "norm_topk_prob", "routed_scaling_factor", "max_position_embeddings", "rope_theta",
        "compress_rope_theta", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "swiglu_limit", "sliding_window",
        "o_groups", "o_lora_rank", "index_n_heads", "index_head_dim", "index_topk", "rms_norm_eps",
    )  # fmt: skip
    kinds = {
        LayerKind.WINDOW: "sliding_attention",
        LayerKind.CSA: "compressed_sparse_attention",
        LayerKind.HCA: "heavily_compressed_attention",
    }
    used = {kinds[config.kind(layer)]: config.compress_ratios[layer] for layer in config.layers}
    partial = config.qk_rope_head_dim / config.head_dim
    plain = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": partial}
    scaled = plain | {"rope_theta": config.compress_rope_theta}
    if config.yarn is not None:
        scaled |= {"rope_type": "yarn", "attention_factor": 1.0, **asdict(config.yarn)}
    hashed = config.num_hash_layers
    return {key: getattr(config, key) for key in same} | {
        "layer_types": [kinds[config.kind(layer)] for layer in config.layers],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128} | used,
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in config.layers],
        "partial_rotary_factor": partial,
        "rope_parameters": {"main": plain, "compress": scaled},
        "attn_implementation": "eager",
    }
