"""The study of replays: its numbers are those of the engine, and its eyes are open.

Controls: rows that a fault leaves behind show as wrong; a replay that would reuse an old slot's rows does not
look better than it is.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from goldenkv.config import Numerics, micro, with_mtp
from goldenkv.engine import Engine, replay_length
from goldenkv.model.weights import Model
from goldenkv.replay_study import exact_rows, replay_errors
from goldenkv.state import pool as pools

NUMERICS = Numerics(tile=8, index_block=8, key_block=8)
CONFIG = with_mtp(micro())  # window-only, CSA, HCA, MTP; window 8
W, LAYERS = CONFIG.sliding_window, CONFIG.num_hidden_layers
LENGTH, NEEDED = 64, 3 * 7 + 8
TOKENS = np.random.default_rng(0).integers(0, 64, LENGTH + 9).astype(np.int32)


@functools.cache
def engine() -> Engine:
    """One slot: a study that kept it would fail the next one."""
    sizes = dict(slots=1, max_length=96, page_size=16, pages=10)
    return Engine(Model(CONFIG, NUMERICS), CONFIG, NUMERICS, **sizes)


@functools.cache
def errors() -> dict[int, object]:
    return {e.count: e for e in replay_errors(engine(), TOKENS, LENGTH, range(1, NEEDED + 4))}


def test_each_layer_is_exact_where_its_windows_add_up_and_not_before():
    for layer, enough in enumerate([7, 14, 21, 29]):
        for count, error in errors().items():
            assert (error.wrong_rows[layer] == 0) == (count >= enough), (layer, count)
            assert (error.state_error[layer] == 0) == (count >= enough), (layer, count)
    assert replay_length(CONFIG, LENGTH) == NEEDED
    assert [e.exact for e in errors().values()] == [count >= NEEDED for count in errors()]


def test_logits_need_the_main_layers_only():
    for count, error in errors().items():
        assert error.logits_equal == (error.logit_error == 0) == (count >= LAYERS * (W - 1)), count


def test_a_row_is_exact_from_its_layers_reach_on():
    """And none of the MTP layer before the token after that."""
    for count in (1, W, NEEDED, NEEDED + 3):
        found = exact_rows(engine(), TOKENS, LENGTH, count)
        reach = [layer * (W - 1) for layer in range(LAYERS)] + [LAYERS * (W - 1) + 1]
        assert found.tolist() == [[at >= first for at in range(count)] for first in reach], count


def test_nothing_is_left_behind():
    replay_errors(engine(), TOKENS, LENGTH, [5])
    exact_rows(engine(), TOKENS, LENGTH, 5)
    assert (engine().free_slots, engine().free_pages) == (1, 10)


def test_a_slot_that_holds_the_right_rows_already_makes_nothing_exact():
    """The last replay left all of them; rows of tokens that did not run count as zeros."""
    first, _, again = replay_errors(engine(), TOKENS, LENGTH, [2, NEEDED, 2])
    assert first == again and first.wrong_rows[0] == W - 1 - 2


def test_control_a_fault_of_the_engine_shows(monkeypatch):
    """A replay that writes its entries over exact ones is never exact again."""
    monkeypatch.setattr(
        Engine, "replay", lambda self, seq, tokens: (setattr(seq, "kept", 0), self.prefill(seq, tokens))
    )
    long = replay_errors(engine(), TOKENS, LENGTH, [NEEDED])[0]
    assert not long.exact


def test_control_one_wrong_element_shows(monkeypatch):
    read = pools.read_rows
    calls = iter([False, True])

    def damaged(*args):
        rows = read(*args)
        if next(calls):
            rows["layers.1.window"][3, 0] += 1
        return rows

    monkeypatch.setattr(pools, "read_rows", damaged)
    (error,) = replay_errors(engine(), TOKENS, LENGTH, [NEEDED])
    assert error.wrong_rows == (0, 1, 0, 0) and error.state_error == pytest.approx((0, 1, 0, 0), abs=1e-6)
    assert error.logits_equal and not error.exact


def test_another_window():
    config = replace(micro(), num_hidden_layers=2, compress_ratios=(0, 4), sliding_window=6)
    e = Engine(Model(config, NUMERICS), config, NUMERICS, max_length=96, page_size=16, pages=10)
    found = replay_errors(e, TOKENS, LENGTH, [4, 5, 9, 10])
    assert [[n == 0 for n in error.wrong_rows] for error in found] == [
        [False, False], [True, False], [True, False], [True, True]
    ]  # fmt: skip
