"""The MTP layer: what its rows are made of, and drafts that change nothing. Parity with published values is
in `parity/test_golden.py`, exactness in `claims/test_rollback.py`.
"""

import functools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from goldenkv.config import ConfigError, LayerKind, Numerics, flash, micro, with_mtp
from goldenkv.engine import Engine, Sequence, greedy
from goldenkv.knockout import each_cell, knock_out
from goldenkv.model.weights import Model
from goldenkv.state import Rows, cells, compare

CONFIG, SMALL = with_mtp(micro()), Numerics(tile=8, index_block=8, key_block=8)
MTP = CONFIG.num_hidden_layers
LENGTHS = [1, 2, 7, 8, 9, 10, 16, 17, 40]


@functools.cache
def engine() -> Engine:
    return Engine(Model(CONFIG, SMALL), CONFIG, SMALL, slots=4, max_length=64, fill=np.nan)


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length)


def prefilled(ids: np.ndarray) -> Sequence:
    seq = engine().open()
    engine().prefill(seq, ids)
    return seq


def same(left: Rows, right: Rows) -> bool:
    return compare(left, right).same


def test_the_layer_comes_last_and_is_a_kind_of_its_own() -> None:
    assert list(CONFIG.state_layers) == [0, 1, 2, 3] and list(CONFIG.layers) == [0, 1, 2]
    assert CONFIG.kind(MTP) is LayerKind.MTP
    assert [c.component.name for c in cells(CONFIG) if c.layer == MTP] == ["draft_window", "draft_streams"]
    assert not [c for c in cells(micro()) if c.component.name.startswith("draft")]
    assert with_mtp(CONFIG) == CONFIG and len(flash().state_layers) == 44
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=2 must be 0 or 1"):
        replace(CONFIG, num_nextn_predict_layers=2, compress_ratios=(0, 4, 8, 0, 0))


@pytest.mark.parametrize("length", [0, *LENGTHS])
def test_it_is_one_token_behind(length: int) -> None:
    """Window rows length - W .. length - 2, and the streams of the last token."""
    rows = {c.component.name: c.live(CONFIG, length) for c in cells(CONFIG) if c.layer == MTP}
    assert rows["draft_window"] == range(max(0, length - 8), max(0, length - 1))
    assert rows["draft_streams"] == range(max(0, length - 1), length)


def test_the_streams_kept_are_those_of_the_last_token() -> None:
    seq = engine().open()
    _, probe = engine().prefill_probed(seq, tokens_of(21))
    kept = engine().rows(seq)[f"layers.{MTP}.draft_streams"]
    last = np.asarray(probe.streams[-1][-1]).reshape(1, -1)
    np.testing.assert_allclose(kept, last, rtol=0, atol=1e-5)  # a probed program and its own state: rounding
    before = np.asarray(probe.streams[-1][-2]).reshape(1, -1)
    assert np.abs(kept - before).max() > 0.1
    engine().close(seq)


def test_weights_of_a_seed_do_not_depend_on_it() -> None:
    """A model with the layer and one without agree in everything else."""
    ids = tokens_of(30)
    bare = Engine(Model(micro(), SMALL), micro(), SMALL, max_length=64)
    np.testing.assert_allclose(
        bare.prefill(bare.open(), ids), engine().prefill(seq := engine().open(), ids), rtol=0, atol=1e-5
    )  # two programs: rounding
    engine().close(seq)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_first_draft_is_the_choice_of_the_layer(length: int) -> None:
    """As the logits that the layer gives once the token is there."""
    seq = prefilled(tokens_of(length, seed=length))
    for token in (3, 44):
        (guess,) = engine().draft(seq, token, 1)
        again = engine().open()
        _, probe = engine().prefill_probed(again, [*tokens_of(length, seed=length), token])
        assert probe.draft_logits is not None and guess == greedy(probe.draft_logits[-1])
        engine().close(again)
    engine().close(seq)


def test_fewer_drafts_are_the_first_of_more() -> None:
    seq = prefilled(tokens_of(19))
    most = engine().draft(seq, 5, 8)
    assert len(set(most)) > 1
    for count in range(8):
        assert engine().draft(seq, 5, count) == most[:count]
    engine().close(seq)


def test_drafting_writes_nothing() -> None:
    seq, other = prefilled(tokens_of(19)), prefilled(tokens_of(30, seed=1))
    before = engine().rows(seq), engine().rows(other)
    pool = [np.asarray(buffer).copy() for layer in engine()._pool for buffer in layer.values()]
    engine().draft(seq, 5, 8)
    after = [np.asarray(buffer) for layer in engine()._pool for buffer in layer.values()]
    assert all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(pool, after, strict=True))
    assert same(engine().rows(seq), before[0]) and same(engine().rows(other), before[1])
    engine().close(seq)
    engine().close(other)


def test_drafts_depend_on_token_and_prefix_and_not_on_the_slot() -> None:
    ids = tokens_of(23)
    seqs = [prefilled(tokens_of(9, seed=5)), prefilled(ids), prefilled(ids)]
    one, two = (engine().draft(seq, 5, 6) for seq in seqs[1:])
    assert one == two
    assert engine().draft(seqs[0], 5, 6) != one and engine().draft(seqs[1], 6, 6) != one
    for seq in seqs:
        engine().close(seq)


def test_a_missing_row_shows_in_the_draft_state_alone() -> None:
    """The knock-out of the state of this layer changes no logit of the main model."""
    e = engine()
    seq = prefilled(tokens_of(21))
    snapshot = e.snapshot(seq)
    e.close(seq)
    damages = knock_out(e, snapshot, list(tokens_of(7, seed=2)), each_cell(CONFIG))
    for part in ("draft_window", "draft_streams"):
        damage = damages[f"layers.{MTP}.{part}"]
        assert damage.lost and not damage.logits.any() and not damage.entries.any()
        assert not damage.token_rows[:MTP].any()
    # The streams make the next row; window rows are in no later row of the only MTP layer, but in its drafts.
    assert damages[f"layers.{MTP}.draft_streams"].token_rows[MTP].any()
    assert damages["layers.0.window"].logits.any()


def test_streams_in_bfloat16_are_kept_as_they_are() -> None:
    numerics = replace(SMALL, dtype="bfloat16")
    e = Engine(Model(CONFIG, numerics), CONFIG, numerics, max_length=64)
    seq = e.open()
    e.prefill(seq, tokens_of(9))
    rows = e.rows(seq)[f"layers.{MTP}.draft_streams"]
    assert rows.dtype == jnp.bfloat16 and rows.shape == (1, 4 * CONFIG.hidden_size)
