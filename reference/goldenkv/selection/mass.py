"""How attention is shared out: the learned sink, window rows, entries. Recomputed from what a probe saw.

The engine keeps no attention weights. They follow from the streams that a layer read, its weights, and the
entries in the pages; all sums are those of `ops.attend`, written out over whole arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ..config import LayerKind
from ..engine import Engine
from ..model.attention import layer_frequencies
from ..model.layer import mixing_of
from ..model.tile import Probe
from ..model.weights import Layer, Model
from ..ops import mhc
from ..ops.linear import project
from ..ops.norm import rms_norm
from ..ops.rope import rotate
from ..state import Rows
from .record import Recording, from_probes
from .ties import decided_by_id, scores_of

QUERIES = 256
"""Queries at a time: scores are [queries, heads, keys]."""


@dataclass(frozen=True, slots=True)
class Mass:
    """Attention weights of one layer, the mean over its heads. Over all three, each query's sum is 1.

    Attributes:
        kind: of the layer.
        sink: [queries] on the learned sink, which has no value: this share of the output is 0.
        tokens: [queries, queries] on window rows, by the token that made the row.
        entries: [queries, entries] on compressed entries; no columns in a layer without.
    """

    kind: LayerKind
    sink: np.ndarray
    tokens: np.ndarray
    entries: np.ndarray


@dataclass(frozen=True, slots=True)
class Attended:
    """One run of a document: what was selected, and what each layer's attention made of it.

    Attributes:
        recording: the selections.
        mass: of every layer of the model.
        by_id: [CSA layers, queries, k] where no score decided what was selected (see `ties`).
    """

    recording: Recording
    mass: tuple[Mass, ...]
    by_id: np.ndarray

    @property
    def scored(self) -> Recording:
        """Only what scores decided: a query may have fewer entries than it selected, or none."""
        r = self.recording
        return Recording(r.tokens, r.layers, r.ratio, np.where(self.by_id, -1, r.ids))

    def share_by_id(self, layer: int) -> float:
        """Of the selections that were a choice, how many no score decided. `layer` counts the CSA layers."""
        start = self.recording.first_choice
        return float(self.by_id[layer, start:].sum() / (self.recording.ids[layer, start:] >= 0).sum())


def attend_to(engine: Engine, model: Model, tokens: np.ndarray) -> Attended:
    """Runs a document and recomputes the attention weights of every layer.

    Args:
        engine: of this model; has a free slot and room for the document.
        model: its weights.
        tokens: of the document.

    Raises:
        ValueError: an engine with fake quantisation: its window rows are rounded, those here are not.
        RecordingError: the model has no CSA layer.
    """
    if engine.numerics.fake_quantisation:
        raise ValueError(
            "attention weights are recomputed from unrounded rows: fake_quantisation must be off"
        )
    seq = engine.open()
    try:
        _, probe = engine.prefill_probed(seq, tokens)
        rows = engine.rows(seq)
    finally:
        engine.close(seq)
    config = engine.config
    recording = from_probes(config, tokens, [probe])
    masses = tuple(_layer_mass(engine, model, tokens, probe, rows, i) for i in config.layers)
    by_id = [
        decided_by_id(scores_of(probe, rows, layer), recording.visible, recording.ids[number])
        for number, layer in enumerate(recording.layers)
    ]
    return Attended(recording, masses, np.stack(by_id))


def layer_input(engine: Engine, model: Model, tokens: np.ndarray, probe: Probe, number: int) -> jnp.ndarray:
    """[queries, hidden]: the normalised input of a layer's attention, from the streams that it read."""
    config, layer = engine.config, model.layers[number]
    if number:
        streams = jnp.asarray(probe.streams[number - 1])
    else:
        streams = jnp.repeat(model.embed[...][jnp.asarray(tokens)][:, None, :], config.hc_mult, axis=1)
    pre, _, _ = mixing_of(layer.attention_mixing, streams, config)
    return rms_norm(mhc.collapse(streams, pre), layer.attention_norm[...], config.rms_norm_eps)


def query_and_row(
    engine: Engine, layer: Layer, x: jnp.ndarray, number: int
) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Queries [n, heads, d] and window rows [n, d] of a layer with input `x`, as `model.attention` does."""
    config, a = engine.config, layer.attention
    eps, frequency = config.rms_norm_eps, layer_frequencies(config, number)
    positions = jnp.arange(len(x), dtype=jnp.int32)
    latent = rms_norm(project(x, a.q_down[...]), a.q_norm[...], eps)
    q = project(latent, a.q_up[...]).reshape(-1, config.num_attention_heads, config.head_dim)
    q = rotate(rms_norm(q, None, eps), positions, frequency)
    return q, rotate(rms_norm(project(x, a.kv[...]), a.kv_norm[...], eps), positions, frequency)


def _layer_mass(
    engine: Engine, model: Model, tokens: np.ndarray, probe: Probe, rows: Rows, number: int
) -> Mass:
    config, layer = engine.config, model.layers[number]
    x = layer_input(engine, model, tokens, probe, number)
    q, row = (np.asarray(a, np.float32) for a in query_and_row(engine, layer, x, number))
    none = np.zeros((0, config.head_dim))
    entries = np.asarray(rows.get(f"layers.{number}.entries", none), np.float32)
    count, window = len(tokens), config.sliding_window
    chosen = np.zeros((count, len(entries)), bool)
    selected = probe.selected[number]
    if selected is not None:
        query, place = np.nonzero(selected >= 0)
        chosen[query, np.asarray(selected)[query, place]] = True
    elif len(entries):  # HCA: all that are finished
        finished = (np.arange(count) + 1) // config.compress_ratios[number]
        chosen[:] = np.arange(len(entries)) < finished[:, None]

    sinks = np.asarray(layer.attention.sinks[...], np.float32)
    shares = Mass(config.kind(number), np.zeros(count), np.zeros((count, count)), np.zeros(chosen.shape))
    for first in range(0, count, QUERIES):
        block, near = slice(first, first + QUERIES), slice(max(0, first - window + 1), first + QUERIES)
        keys = np.concatenate([row[near], entries])
        scores = np.matmul(q[block], keys.T) * np.float32(config.head_dim**-0.5)
        distance = np.arange(count)[block, None] - np.arange(count)[near]
        visible = np.concatenate([(distance >= 0) & (distance < window), chosen[block]], axis=1)
        scores = np.where(visible[:, None, :], scores, np.float32(-np.inf))
        peak = np.maximum(scores.max(axis=2), sinks)
        weight, sink = np.exp(scores - peak[:, :, None]), np.exp(sinks - peak)
        total = weight.sum(axis=2) + sink
        mean = np.mean(weight / total[:, :, None], axis=1)
        shares.sink[block] = np.mean(sink / total, axis=1)
        shares.tokens[block, near] = mean[:, : distance.shape[1]]
        shares.entries[block] = mean[:, distance.shape[1] :]
    return shares
