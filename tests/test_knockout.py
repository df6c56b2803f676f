"""The knock-out experiment: what each missing piece of state corrupts, and when it shows."""

import functools

import numpy as np
import pytest

from goldenkv.config import Numerics, micro
from goldenkv.engine import Engine
from goldenkv.knockout import Damage, each_cell, each_component, knock_out
from goldenkv.model.weights import Model
from goldenkv.state import Snapshot, cells

CONFIG = micro()  # window-only, CSA, HCA; window 8, ratios 4 and 8
NUMERICS = Numerics(tile=8, index_block=8, key_block=8)
STEPS = 7
ALIGNED, UNALIGNED = 40, 45  # 45: one row of an unfinished CSA block, five of an HCA block
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, UNALIGNED + STEPS).astype(np.int32)
CSA, HCA = 1, 2


@functools.cache
def engine() -> Engine:
    """One slot: an experiment that kept it would fail the next one."""
    return Engine(Model(CONFIG, NUMERICS), CONFIG, NUMERICS, slots=1, max_length=64)


@functools.cache
def snapshot(length: int) -> Snapshot:
    seq = engine().open()
    engine().prefill(seq, TOKENS[:length])
    taken = engine().snapshot(seq)
    engine().close(seq)
    return taken


@functools.cache
def damage(length: int) -> dict[str, Damage]:
    return knock_out(engine(), snapshot(length), TOKENS[length : length + STEPS], each_cell(CONFIG))


@pytest.mark.parametrize("length", [ALIGNED, UNALIGNED])
def test_every_cell_that_holds_rows_matters_and_no_empty_one_does(length):
    for cell in cells(CONFIG):
        found = damage(length)[cell.name]
        assert found.lost == len(cell.live(CONFIG, length)), cell.name
        assert found.same == (found.lost == 0), cell.name


def test_nothing_lost_nothing_differs():
    found = knock_out(engine(), snapshot(UNALIGNED), TOKENS[UNALIGNED:][:STEPS], {"nothing": []})
    assert found["nothing"].lost == 0
    assert found["nothing"].same
    assert not found["nothing"].error.any()


@pytest.mark.parametrize("length", [ALIGNED, UNALIGNED])
def test_damage_never_reaches_an_earlier_layer(length):
    for cell in cells(CONFIG):
        found = damage(length)[cell.name]
        assert not found.token_rows[: cell.layer + 1].any(), (
            cell.name
        )  # a layer's own input is made before it
        assert not found.entries[: cell.layer].any(), cell.name


def test_overlap_shows_when_the_next_block_ends_and_not_before():
    for name in ("overlap_kv", "overlap_score"):
        found = damage(ALIGNED)[f"layers.{CSA}.{name}"]
        assert np.flatnonzero(found.entries[CSA]).tolist() == [3]  # the next entry; the one after is sound
        assert not found.logits[:3].any()
        assert not found.token_rows[:, :3].any()


def test_hca_rows_show_when_their_block_ends_and_not_before():
    end = 8 - UNALIGNED % 8 - 1
    for name in ("rows_kv", "rows_score"):
        found = damage(UNALIGNED)[f"layers.{HCA}.{name}"]
        assert np.flatnonzero(found.entries[HCA]).tolist() == [end]
        assert found.logits.tolist() == [step >= end for step in range(STEPS)]


def test_steps_are_those_of_single_decodes():
    """The tokens run in one call; decoding them one at a time finds the same errors."""
    length, name = UNALIGNED, f"layers.{CSA}.entries"
    taken = snapshot(length)
    rows = taken.rows | {name: np.zeros_like(taken.rows[name])}
    runs = []
    for state in (taken, Snapshot(taken.fingerprint, length, rows)):
        seq = engine().restore(state)
        runs.append(np.array([engine().decode(seq, token) for token in TOKENS[length : length + STEPS]]))
        engine().close(seq)
    assert np.array_equal(damage(length)[name].error, np.abs(runs[0] - runs[1]).max(axis=1))


def test_a_component_is_lost_in_all_its_layers():
    groups = each_component(CONFIG)
    assert groups["window"] == [f"layers.{layer}.window" for layer in CONFIG.layers]
    assert sorted(name for names in groups.values() for name in names) == sorted(each_cell(CONFIG))
    found = knock_out(engine(), snapshot(ALIGNED), TOKENS[ALIGNED:][:STEPS], groups)
    assert found["window"].lost == 3 * (CONFIG.sliding_window - 1)


def test_what_is_asked_wrongly_is_refused():
    taken = snapshot(ALIGNED)
    with pytest.raises(ValueError, match=r"no layers\.0\.entries"):
        knock_out(engine(), taken, [1], {"wrong": ["layers.0.entries"]})
    for tokens in ([], [1] * CONFIG.sliding_window):
        with pytest.raises(ValueError, match=r"1 \.\. 7"):
            knock_out(engine(), taken, tokens, {})
