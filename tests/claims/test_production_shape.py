"""Claim: tile invariance holds in the shapes of V4-Flash: hidden 4096, 64 heads of 512, indexer 64 x 128.

One CSA and one HCA layer, whole and with every expert as large as published; 8 of the 256 routed experts, of
which a token passes through 6 (256 take 26 GB in float32), and a small vocabulary. Weights are random.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from goldenkv.config import ModelConfig, Numerics, flash
from goldenkv.engine import Engine, FreeShapeEngine
from goldenkv.model.weights import Model
from goldenkv.state import compare

KINDS = {"CSA": 4, "HCA": 128}
RAGGED = [1, 30, 33, 3, 60, 5]
"""Chunk lengths whose sums meet neither the tiles of 32 nor the blocks of 128."""


def one_layer(kind: str, index_topk: int = 512) -> ModelConfig:
    return replace(
        flash(), num_hidden_layers=1, compress_ratios=(KINDS[kind],), num_nextn_predict_layers=0,
        n_routed_experts=8, num_hash_layers=0, vocab_size=512, index_topk=index_topk,
    )  # fmt: skip


def cheap_model(config: ModelConfig) -> Model:
    """Random weights from one pool of a prime number of values, so that no two rows are alike."""
    model, start = Model(config, seed=None), 0
    pool = np.random.default_rng(0).standard_normal(1_000_003, np.float32)
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            scale = node.shape[-2] ** -0.5 if node.ndim > 1 and path != ("embed",) else 0.1
            values = np.resize(np.roll(pool, -start), node.shape)
            values *= np.float32(scale)
            values += np.float32(node.ndim == 1)  # gains and the like lie around 1
            node.set_value(jax.numpy.array(values, node.dtype))
            start += values.size
    return model


def cut(length: int, single: int) -> list[int]:
    """A ragged plan for `length` tokens that ends in `single` decode steps."""
    plan: list[int] = []
    while sum(plan) < length - single:
        plan.append(min(RAGGED[len(plan) % len(RAGGED)], length - single - sum(plan)))
    return plan + [1] * single


def run(engine: Engine, tokens: np.ndarray, plan: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """Every component and the logits of every token."""
    seq = engine.open()
    try:
        logits = engine.prefill(seq, tokens, plan, all_logits=True)
        return {**engine.rows(seq), "logits": logits}
    finally:
        engine.close(seq)


def check(config: ModelConfig, length: int, plan: list[int]) -> None:
    """Whole against `plan`: the same bits. Control: the same weights in the shapes of the chunks differ."""
    assert sum(plan) == length and any(end % 32 and end % 128 for end in np.cumsum(plan)[:-1])
    model = cheap_model(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, length)
    engine = Engine(model, config, Numerics(), slots=2, max_length=length, fill=np.nan)
    engine.open()  # so that the sequence does not have the first slot
    whole = run(engine, tokens)
    assert all(np.isfinite(rows).all() for rows in whole.values())
    assert len(np.unique(whole["logits"], axis=0)) == length  # no two tokens alike: the comparison sees each
    difference = compare(run(engine, tokens, plan), whole)
    assert difference.same, f"{difference.rows - difference.equal} rows differ, first {difference.first}"

    free = FreeShapeEngine(model, config, Numerics(), max_length=128)
    difference = compare(run(free, tokens[:8]), run(free, tokens[:8], [1] * 8))
    assert not difference.same
    assert not difference.by_name["logits"].all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_prompt(kind: str) -> None:
    """160 tokens; the indexer takes 16 of up to 40 entries, so that it leaves some out."""
    check(one_layer(kind, index_topk=16), 160, cut(160, single=4))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_published_top_k(kind: str) -> None:
    """2,048 tokens and 160 more, so that the 512 of the indexer leave some of the 552 entries out."""
    check(one_layer(kind), 2208, cut(2208, single=8))
