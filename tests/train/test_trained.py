"""The checkpoint that comes with the package."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from goldenkv import trained
from goldenkv.config import Numerics
from goldenkv.model.checkpoint import layout
from goldenkv.model.weights import Model
from goldenkv.train import held_out_losses, small
from goldenkv.train.shapes import count
from goldenkv.train.study import POSITIONS

MB = 1_000_000


def loss(model: Model) -> float:
    """On the first held-out tokens, nats a token."""
    return float(held_out_losses(model, small(), trained.held_out(), 1024, 4).mean())


def test_it_is_small_and_has_published_names() -> None:
    assert (trained.FOLDER / "model.safetensors").stat().st_size <= 16 * MB
    config, model = trained.load()
    assert config == small() and 2e6 <= count(config) <= 6e6
    assert "layers.1.attn.indexer.wq_b.weight" in layout(model)


def test_it_predicts_text_that_it_never_saw() -> None:
    _, model = trained.load()
    ours = loss(model)
    assert ours < 3.0
    broken = jax.tree.map(lambda leaf: leaf, model)
    layer = broken.layers[1].attention
    layer.kv.set_value(-layer.kv[...])
    assert loss(broken) > ours + 0.1
    assert loss(Model(small(), Numerics())) > 7


def test_its_card_says_what_it_does() -> None:
    """Losses of the first sequences again; float32 sums in another order move them in the sixth digit."""
    found, (_, model) = trained.training()["measured"], trained.load()
    again = held_out_losses(model, small(), trained.held_out()[: found["starts"][1] + 2048], 2048, 2)
    assert np.allclose(again.mean(axis=1), found["sequence_losses"][:2], rtol=1e-4)
    assert not np.allclose(again.mean(axis=1)[::-1], found["sequence_losses"][:2], rtol=1e-4)


def test_it_beats_counting() -> None:
    found = trained.training()
    assert found["measured"]["loss"] < min(found["ngrams"].values()) - 0.1
    assert len(found["measured"]["by_position"]) == len(POSITIONS) - 1


def test_held_out_text_reads_as_text() -> None:
    tokens = trained.held_out()
    assert tokens.dtype == np.int32 and len(tokens) == 32768 and tokens.max() < 2048
    text = trained.decode(tokens)
    assert "def " in text and "import " in text and text.count("\ufffd") <= 1
    pytest.importorskip("tokenizers", reason="the extra 'train' is not installed")
    from goldenkv.text import tokenizer_tokens

    again = tokenizer_tokens(text.split("<|end|>")[0], trained.FOLDER / "tokenizer.json")
    assert np.array_equal(again, tokens[: len(again)])
