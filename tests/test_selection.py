"""Selections with known answers: constant, random, latest, alternating; and those of a real engine.

Controls: what sees the future is told apart; random selections look like nothing; a wrong ratio is refused.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from goldenkv.config import Numerics, micro
from goldenkv.engine import Engine
from goldenkv.model.weights import Model
from goldenkv.selection import (
    Curve,
    Predictor,
    Recording,
    RecordingError,
    Table,
    Zone,
    batch_reuse,
    chance,
    hotness,
    in_order,
    oracle,
    predictors,
    random_recording,
    recall,
    record,
    record_turns,
    stability,
    turn_reuse,
)
from goldenkv.selection.predictors import Frequency, HeavyAndRecent, LastSteps, Recency

K, RATIO, QUERIES = 8, 4, 400
SHARES = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)


def made(choose, queries: int = QUERIES, tokens: np.ndarray | None = None) -> Recording:
    """One layer; `choose(query, visible)` gives up to K entries once there is a choice, before that all."""
    ids = np.full((1, queries, K), -1)
    for query in range(queries):
        visible = (query + 1) // RATIO
        chosen = np.arange(visible) if visible <= K else np.asarray(choose(query, visible))
        ids[0, query, : len(chosen)] = chosen
    return Recording(np.zeros(queries, np.int32) if tokens is None else tokens, (2,), RATIO, ids)


def constant() -> Recording:
    return made(lambda query, visible: np.arange(K))


def latest() -> Recording:
    return made(lambda query, visible: np.arange(visible - K, visible))


def noise(seed: int = 0, queries: int = 1200) -> Recording:
    return random_recording(made(lambda q, v: np.arange(K), queries), np.random.default_rng(seed))


# Recordings -------------------------------------------------------------------------------------------------


def test_what_a_recording_knows():
    r = constant()
    assert (r.top_k, r.entries, r.first_choice) == (K, QUERIES // RATIO, 35)
    assert r.visible[[2, 3, 34, 35]].tolist() == [0, 1, 8, 9]
    mask = r.mask(0)
    assert mask.shape == (QUERIES, 100)
    assert mask[2].sum() == 0 and mask[3].tolist() == [True] + [False] * 99
    assert mask[-1].nonzero()[0].tolist() == list(range(K))


@pytest.mark.parametrize(
    ("ids", "layers", "said"),
    [
        (np.zeros((1, 5, 2)), (2,), "integers"),
        (np.zeros((1, 4, 2), int), (2,), "5 queries"),
        (np.full((1, 5, 0), -1), (2,), "nothing selected"),
        (np.full((0, 5, 2), -1), (), "nothing selected"),
        (np.array([[[-1], [-1], [-1], [1], [-1]]]), (2,), "layer 2, query 3: an id outside -1 .. 0"),
        (np.array([[[-1], [-1], [-1], [-2], [-1]]]), (2,), "outside -1"),
        (np.array([[[0], [-1], [-1], [0], [-1]]]), (2,), "query 0"),
    ],
    ids=["floats", "queries", "no_k", "no_layer", "future", "below", "nothing_visible"],
)
def test_a_recording_that_cannot_be(ids, layers, said):
    with pytest.raises(RecordingError, match=said):
        Recording(np.zeros(5, np.int32), layers, RATIO, ids)


# Stability --------------------------------------------------------------------------------------------------


def test_a_constant_selection_is_stable():
    found = stability(constant(), 0, [1, 7, 64])
    assert found.overlap.tolist() == found.jaccard.tolist() == [1, 1, 1]


def test_the_latest_entries_are_their_own_baseline():
    found = stability(latest(), 0, [1, 3, 4, 31, 32, 64])
    assert found.overlap == pytest.approx(found.recent, abs=1e-12)
    assert found.overlap[2] == 7 / 8 and found.overlap[-1] == 0  # one entry later; 16 entries later
    assert found.jaccard[2] == 7 / 9


def test_random_selections_overlap_by_chance_alone():
    found = stability(noise(), 0, [1, 8, 64])
    assert found.overlap == pytest.approx(found.random, abs=0.01)
    assert constant().top_k / 100 <= stability(constant(), 0, [1]).random[0] < 1


@pytest.mark.parametrize("lags", [[], [0], [365]], ids=["none", "zero", "long"])
def test_lags_that_do_not_fit(lags):
    assert len(stability(constant(), 0, [364]).lags) == 1
    with pytest.raises(RecordingError, match=r"1 \.\. 364"):
        stability(constant(), 0, lags)


# Hotness ----------------------------------------------------------------------------------------------------


def test_classes_take_what_is_theirs():
    heats = hotness(constant(), 0, sinks=2, recent=0, prefix=6)
    assert {heat.zone: heat.share for heat in heats} == {
        Zone.SINK: 0.25, Zone.RECENT: 0, Zone.SHARED: 0.5, Zone.MIDDLE: 0.25
    }  # fmt: skip
    for total in ("share", "random", "recent"):
        assert sum(getattr(heat, total) for heat in heats) == pytest.approx(1)
    assert hotness(latest(), 0, sinks=1, recent=K)[1].share == pytest.approx(1)


def test_random_selections_have_no_hot_class():
    """Though their plain rates differ: the middle is there only when many entries are."""
    heats, draws = hotness(noise(), 0, sinks=4, recent=8, prefix=32), (1200 - 35) * K
    for heat in heats:  # four standard deviations
        assert heat.lift == pytest.approx(1, abs=4 / np.sqrt(heat.random * draws))
    assert hotness(latest(), 0, sinks=4, recent=8, prefix=32)[1].lift > 4
    rates = [heat.share / heat.entries for heat in heats]
    assert rates[3] < 0.8 * rates[0]


def test_the_order_is_that_of_lifts():
    def choose(query, visible):  # 4 of the sink, 3 of the window, 1 of the middle
        return np.concatenate([np.arange(4), np.arange(visible - 3, visible), [visible // 2]])

    heats = hotness(made(choose), 0, sinks=4, recent=8)
    assert in_order(heats) and heats[2].entries == 0
    assert not in_order(heats[::-1])


def test_no_choice_no_hotness():
    with pytest.raises(RecordingError, match="none sees more than 8"):
        hotness(made(lambda q, v: [], queries=35), 0, sinks=1, recent=1)


# Predictors -------------------------------------------------------------------------------------------------


def new(name: str) -> Predictor:
    return predictors(Table.fit([noise(1)], 0))[name]()


NAMES = list(predictors(Table(np.ones(1), np.ones(1))))


def reached(recording: Recording, predictor: Predictor) -> np.ndarray:
    return recall(recording, 0, predictor, SHARES).recall


@pytest.mark.parametrize("name", NAMES)
def test_a_ranking_is_a_permutation(name):
    predictor, rng = new(name), np.random.default_rng(0)
    for visible in (1, 2, 9, 9, 70):
        assert sorted(predictor.rank(visible)) == list(range(visible))
        predictor.tell(rng.permutation(visible)[:5])
        predictor.tell(np.zeros(0, int))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_foresees_noise(name):
    recording = noise()
    assert reached(recording, new(name)) == pytest.approx(chance(recording, SHARES).recall, abs=0.02)


@pytest.mark.parametrize("name", ["the step before", "last 16 steps", "frequency", "fading frequency"])
def test_memory_foresees_what_does_not_change(name):
    """With room for all of it; with less it is as good as the oracle."""
    assert reached(constant(), new(name)) == pytest.approx(oracle(constant(), 0, SHARES).recall, abs=1e-9)


def test_recency_foresees_the_latest_and_a_table_learns_it():
    best = oracle(latest(), 0, SHARES).recall
    assert reached(latest(), Recency()) == pytest.approx(best, abs=1e-9)
    assert reached(latest(), Table.fit([latest()], 0, starts=2)) == pytest.approx(best, abs=1e-9)
    assert reached(latest(), Table.fit([constant()], 0, starts=2))[2] < 0.2


def test_half_heavy_half_recent():
    """What it names first are the latest and the most frequent in turn, each once."""
    predictor = HeavyAndRecent()
    predictor.tell(np.array([2, 3]))
    predictor.tell(np.array([3]))
    assert predictor.rank(8).tolist() == [7, 3, 6, 2, 5, 4, 1, 0]


def test_steps_are_forgotten_after_so_many():
    short, long = LastSteps(1), LastSteps(2)
    for predictor in (short, long):
        predictor.tell(np.array([0]))
        predictor.tell(np.array([1]))
    assert short.rank(4).tolist() == [1, 3, 2, 0]
    assert long.rank(4).tolist() == [1, 0, 3, 2]


def test_frequency_fades():
    steps = [[0], [0], [1]]
    plain, fading = Frequency(), Frequency(half_life=0.5)
    for predictor in (plain, fading):
        for step in steps:
            predictor.tell(np.array(step))
    assert plain.rank(3).tolist() == [0, 1, 2] and fading.rank(3).tolist() == [1, 0, 2]


def test_control_who_is_told_before_being_asked_would_foresee_everything():
    """Two sets take turns: the step before is always wrong. Were it told first it would be right."""
    sets = np.arange(K), np.arange(K, 2 * K)
    recording = made(lambda query, visible: sets[query % 2] if visible >= 2 * K else sets[0])
    honest = recall(recording, 0, LastSteps(1), (K / 100,)).recall[0]

    class Leaking(LastSteps):
        def __init__(self) -> None:
            super().__init__(1)
            self.query = 0

        def rank(self, visible: int) -> np.ndarray:
            future = recording.ids[0, self.query]
            super().tell(future[future >= 0])
            return super().rank(visible)

        def tell(self, selected: np.ndarray) -> None:
            self.query += 1

    found = reached(recording, Leaking())
    assert honest < 0.1 and found == pytest.approx(oracle(recording, 0, SHARES).recall, abs=1e-9)
    assert (reached(recording, LastSteps(1)) < found)[1]


def test_the_edges_of_a_budget():
    for curve in (
        chance(noise(), SHARES),
        oracle(noise(), 0, SHARES),
        Curve(np.array(SHARES), reached(noise(), Recency())),
    ):
        assert curve.recall[0] == 0 and curve.recall[-1] == 1 and (np.diff(curve.recall) >= 0).all()
    for shares in ([], [-0.1], [1.1]):
        with pytest.raises(RecordingError, match="shares"):
            recall(constant(), 0, Recency(), shares)
    blank = Recording(np.zeros(60, np.int32), (2,), RATIO, np.full((1, 60, K), -1))
    with pytest.raises(RecordingError, match="no query with a choice has selected anything"):
        recall(blank, 0, Recency(), SHARES)
    with pytest.raises(RecordingError, match="none sees more"):
        recall(made(lambda q, v: [], queries=35), 0, Recency(), SHARES)


# Reuse ------------------------------------------------------------------------------------------------------


def test_requests_that_select_the_same_and_others():
    left = np.zeros(QUERIES, np.int32)
    right = left.copy()
    right[200:] = 1
    same = batch_reuse(
        made(lambda q, v: np.arange(K), tokens=left), made(lambda q, v: np.arange(K), tokens=right), 0
    )
    assert (same.share, same.kept) == (1, K) and same.random == pytest.approx(K / 50)
    other = batch_reuse(
        made(lambda q, v: np.arange(K), tokens=left),
        made(lambda q, v: np.arange(K) + (K if q >= 200 else 0), tokens=right),
        0,
    )
    assert other.share == 0 and other.random == pytest.approx(K / 50)
    for tokens in (left, np.ones(QUERIES, np.int32)):
        with pytest.raises(RecordingError, match="tokens are common"):
            batch_reuse(made(lambda q, v: [], tokens=left), made(lambda q, v: [], tokens=tokens), 0)


def test_a_longer_memory_holds_more():
    left, right = np.zeros(QUERIES, np.int32), np.r_[np.zeros(200, np.int32), np.ones(200, np.int32)]
    rng = np.random.default_rng(0)
    pair = [made(lambda q, v: rng.permutation(v)[:K], tokens=t) for t in (left, right)]
    short, long = (batch_reuse(*pair, 0, memory=m) for m in (1, 16))
    assert long.kept > 3 * short.kept and long.share > 3 * short.share
    for reuse in (short, long):
        assert reuse.share == pytest.approx(reuse.random, abs=0.05)


def test_turns():
    turns = (range(0, 200), range(200, 300), range(300, 400))
    found = turn_reuse(constant(), 0, turns, budget=K)
    assert [reuse.share for reuse in found] == [1, 1]
    assert [reuse.random for reuse in found] == [K / 50, K / 75]
    [first, second] = turn_reuse(noise(queries=400), 0, turns, budget=25)
    assert first.share == pytest.approx(0.5, abs=0.08) and second.share == pytest.approx(1 / 3, abs=0.08)


# A real engine ----------------------------------------------------------------------------------------------

NUMERICS = Numerics(tile=8, index_block=8, key_block=8)
TOKENS = np.random.default_rng(0).integers(0, 64, 60).astype(np.int32)


@functools.cache
def engine(ratios: tuple[int, ...] = (0, 4, 8)) -> Engine:
    config = replace(micro(), compress_ratios=ratios, num_hidden_layers=len(ratios))
    return Engine(Model(config, NUMERICS), config, NUMERICS, slots=1, max_length=96, page_size=16)


def test_a_recording_of_an_engine():
    found = record(engine(), TOKENS, reply=3)
    assert found.layers == (1,) and found.ids.shape == (1, 63, 2) and found.ratio == 4
    assert found.tokens[:60].tolist() == TOKENS.tolist()
    whole = record(engine(), found.tokens)
    assert (found.ids == whole.ids).all()  # decode steps select what one prefill selects
    assert (found.mask(0).sum(axis=1) == np.minimum(found.visible, 2)).all()
    assert engine().free_slots == 1


def test_a_conversation_of_an_engine():
    talk, turns = record_turns(engine(), [TOKENS[:20], TOKENS[20:41]], reply=4)
    assert turns == (range(0, 24), range(24, 49)) and len(talk.tokens) == 49
    assert talk.tokens[24:45].tolist() == TOKENS[20:41].tolist()
    assert (record(engine(), talk.tokens).ids == talk.ids).all()


def test_what_cannot_be_recorded():
    with pytest.raises(RecordingError, match="no CSA layer"):
        record(engine((0, 8)), TOKENS)
    with pytest.raises(RecordingError, match="at least one turn"):
        record_turns(engine(), [])
    with pytest.raises(ValueError, match="tokens"):
        record_turns(engine(), [TOKENS[:4], TOKENS[:0]])
    assert engine().free_slots == 1  # nothing is left behind
