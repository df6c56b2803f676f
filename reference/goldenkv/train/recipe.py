"""How a model is trained, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained.

    Attributes:
        steps: optimiser steps.
        batch_tokens: tokens a step, about: as many whole sequences as fit.
        lengths: (share of the steps, tokens a sequence) for each stage, in order; shares add up to 1.
        dense: share of the steps in which CSA attends to all entries and the indexers only watch.
        rate: peak learning rate; of Adam as of Muon, whose steps are scaled to the size of Adam's.
        warm_up, decay: shares of the steps in which the rate rises from 0 and falls to 0.
        weight_decay: of matrices.
        index_weight: weight of the indexers' loss.
        index_stride: it is taken from every so-manieth query; a prime, so as to meet every place in a block.
        seed: of weights and batches.
        dtype: of large products.
    """

    steps: int
    batch_tokens: int = 4352
    lengths: tuple[tuple[float, int], ...] = ((0.85, 1024), (0.15, 2176))
    dense: float = 0.5
    rate: float = 6e-3
    warm_up: float = 0.04
    decay: float = 0.4
    weight_decay: float = 0.02
    index_weight: float = 1.0
    index_stride: int = 7
    seed: int = 0
    dtype: str = "bfloat16"

    def length(self, step: int) -> int:
        """Tokens a sequence at a step."""
        reached = 0.0
        for share, length in self.lengths:
            reached += share
            if step < reached * self.steps:
                return length
        return self.lengths[-1][1]

    def sequences(self, step: int) -> int:
        """Sequences in the batch of a step."""
        return max(1, self.batch_tokens // self.length(step))

    def tokens(self, steps: int) -> int:
        """Tokens that the first `steps` steps train on."""
        return sum(self.sequences(step) * self.length(step) for step in range(steps))

    def is_dense(self, step: int) -> bool:
        """Whether CSA attends to all entries at a step."""
        return step < self.dense * self.steps
