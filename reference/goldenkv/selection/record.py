"""Which CSA entries every query selected: recorded over a document, over decode steps, over a conversation.

A recording is what the indexer chose, nothing derived. A query at position p sees (p + 1) // ratio entries;
as long as these are no more than k it takes all of them, and there is nothing to learn from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import LayerKind, ModelConfig
from ..engine import Engine, greedy
from ..model.tile import Probe


class RecordingError(ValueError):
    """Selections that do not fit together, or a model that selects nothing."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The selections of one sequence.

    Attributes:
        tokens: [queries] ids; the first is at position 0.
        layers: numbers of the CSA layers.
        ratio: tokens an entry.
        ids: [layers, queries, k] selected entries, best first, -1 for none.
    """

    tokens: np.ndarray
    layers: tuple[int, ...]
    ratio: int
    ids: np.ndarray

    def __post_init__(self) -> None:
        shape = (len(self.layers), len(self.tokens))
        if self.ids.ndim != 3 or self.ids.shape[:2] != shape or not np.issubdtype(self.ids.dtype, np.integer):
            raise RecordingError(
                f"ids must be integers [{shape[0]} layers, {shape[1]} queries, k], got {self.ids.dtype} "
                f"{list(self.ids.shape)}"
            )
        if not self.layers or not len(self.tokens) or not self.ids.shape[2] or self.ratio < 1:
            raise RecordingError(
                f"nothing selected: {self.layers=}, {len(self.tokens)} queries, {self.ratio=}"
            )
        wrong = (self.ids < -1) | (self.ids >= self.visible[None, :, None])
        if wrong.any():
            layer, query, _ = (int(i) for i in np.argwhere(wrong)[0])
            raise RecordingError(
                f"layer {self.layers[layer]}, query {query}: an id outside -1 .. {self.visible[query] - 1} "
                f"(visible entries)"
            )

    @property
    def top_k(self) -> int:
        """The most entries that a query selects."""
        return int(self.ids.shape[2])

    @property
    def visible(self) -> np.ndarray:
        """[queries] how many entries each query sees."""
        return (np.arange(len(self.tokens)) + 1) // self.ratio

    @property
    def entries(self) -> int:
        """Entries that the last query sees."""
        return int(self.visible[-1])

    @property
    def first_choice(self) -> int:
        """The first query that sees more entries than it may select."""
        return (self.top_k + 1) * self.ratio - 1

    def mask(self, layer: int) -> np.ndarray:
        """[queries, entries] bool: who selected what. `layer` counts the CSA layers from 0."""
        out = np.zeros((len(self.tokens), self.entries + 1), bool)  # the last column takes the -1
        out[np.arange(len(self.tokens))[:, None], self.ids[layer]] = True
        return out[:, :-1]


def record(engine: Engine, tokens: np.ndarray, reply: int = 0) -> Recording:
    """Runs a document in a sequence of its own, then decodes greedily.

    Args:
        engine: has a free slot, and room for all of it.
        tokens: of the document, at least one.
        reply: tokens that the model appends, one decode step each.

    Raises:
        RecordingError: the model has no CSA layer.
    """
    return record_turns(engine, [tokens], reply)[0]


def record_turns(
    engine: Engine, said: Sequence[np.ndarray], reply: int = 0
) -> tuple[Recording, tuple[range, ...]]:
    """A conversation: what is said in each turn, then a greedy reply, all in one sequence.

    Args:
        engine: as in `record`.
        said: token ids, one array a turn, none empty.
        reply: tokens of each reply.

    Returns:
        The recording, and the queries of each turn.
    """
    if not said:
        raise RecordingError("a conversation needs at least one turn")
    csa_layers(engine.config)
    probes: list[Probe] = []
    tokens: list[np.ndarray] = []
    turns = []
    seq = engine.open()
    try:
        for words in said:
            start = seq.length
            fresh = np.asarray(words, np.int32)
            for step in range(reply + 1):
                logits, probe = engine.prefill_probed(seq, fresh)
                tokens.append(fresh)
                probes.append(probe._replace(streams=()))  # the largest part, and not needed
                if step < reply:
                    fresh = np.array([greedy(logits[-1])], np.int32)
            turns.append(range(start, seq.length))
    finally:
        engine.close(seq)
    return from_probes(engine.config, np.concatenate(tokens), probes), tuple(turns)


def from_probes(config: ModelConfig, tokens: np.ndarray, probes: Sequence[Probe]) -> Recording:
    """A recording from what `Engine.prefill_probed` gave, call after call, from position 0 on."""
    layers = csa_layers(config)
    ids = [np.concatenate([np.asarray(probe.selected[layer]) for probe in probes]) for layer in layers]
    return Recording(np.asarray(tokens, np.int32), layers, config.compress_ratios[layers[0]], np.stack(ids))


def random_recording(like: Recording, rng: np.random.Generator) -> Recording:
    """As many of the visible entries as each query of `like` selected, drawn without any pattern."""
    ids = np.full_like(like.ids, -1)
    for layer in range(len(like.layers)):
        for query, visible in enumerate(like.visible):
            count = int((like.ids[layer, query] >= 0).sum())
            ids[layer, query, :count] = rng.permutation(visible)[:count]
    return Recording(like.tokens, like.layers, like.ratio, ids)


def csa_layers(config: ModelConfig) -> tuple[int, ...]:
    """The layers that select.

    Raises:
        RecordingError: there is none.
    """
    layers = tuple(layer for layer in config.layers if config.kind(layer) is LayerKind.CSA)
    if not layers:
        raise RecordingError(
            f"compress_ratios={config.compress_ratios} have no CSA layer: nothing is selected"
        )
    return layers
