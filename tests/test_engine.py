"""The engine at its edges: lengths at every boundary, misuse, lack of room, and what failed calls leave."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldenkv.config import ModelConfig, Numerics, micro, tiny
from goldenkv.engine import CapacityError, Engine, Sequence, generate, greedy, sample
from goldenkv.model.weights import Model
from goldenkv.state import ForeignSnapshot, Snapshot, compare

SMALL = Numerics(tile=8, index_block=8, key_block=8)


def one_layer(ratio: int) -> ModelConfig:
    return replace(micro(), num_hidden_layers=1, compress_ratios=(ratio,))


SETUPS = {
    "micro": (micro(), SMALL, dict(slots=3, max_length=512, pages=200, fill=np.nan)),
    "window": (one_layer(0), SMALL, dict(slots=3, max_length=64, page_size=8, fill=np.nan)),
    "csa": (one_layer(4), SMALL, dict(slots=3, max_length=64, fill=np.nan)),
    "hca": (one_layer(8), SMALL, dict(slots=3, max_length=64, fill=np.nan)),
    "tiny": (
        tiny(),
        Numerics(tile=32, index_block=32, key_block=4),
        dict(slots=3, max_length=1024, page_size=256, fill=np.nan),
    ),
}


@functools.cache
def engine_model(name: str) -> Model:
    return Model(*SETUPS[name][:2])


@functools.cache
def engine(name: str = "micro") -> Engine:
    config, numerics, sizes = SETUPS[name]
    return Engine(engine_model(name), config, numerics, **sizes)


@pytest.fixture
def micro_engine() -> Iterator[Engine]:
    """The shared one; every test gives back what it took."""
    e = engine()
    before = e.free_slots, e.free_pages
    opened: list[Sequence] = []
    originals = e.open, e.restore

    def tracked(make: Callable[..., Sequence]) -> Callable[..., Sequence]:
        def call(*args: object) -> Sequence:
            opened.append(make(*args))
            return opened[-1]

        return call

    e.open, e.restore = (tracked(make) for make in originals)
    yield e
    del e.open, e.restore
    for seq in opened:
        e.close(seq)
    assert (e.free_slots, e.free_pages) == before


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length)


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    difference = compare(found, expected)
    assert difference.same, f"{difference.first} differs"


# Lengths --------------------------------------------------------------------------------------------------

EDGES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33]
TINY_EDGES = [1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 511, 512, 513]


@pytest.mark.parametrize(
    ("name", "length"),
    [(name, length) for name in ("window", "csa", "hca", "micro") for length in EDGES]
    + [("tiny", length) for length in TINY_EDGES],
)
def test_lengths_at_every_edge(name: str, length: int) -> None:
    """In one call, token by token at the end, and restored at the end: the same state and logits, and finite.

    Edges of the window (8), of blocks of 4 and 8, of tiles (8) and pages; 128 and 32 in the tiny model.
    """
    e, ids = engine(name), tokens_of(length + 10)
    seqs = [e.open()]
    logits = e.prefill(seqs[0], ids, all_logits=True)
    expected = {**e.rows(seqs[0]), "logits": logits[length - 1 :]}
    assert seqs[0].length == length + 10
    assert np.isfinite(logits).all() and logits.shape == (length + 10, e.config.vocab_size)
    assert all(np.isfinite(rows).all() for rows in expected.values())

    seqs.append(e.open())
    steps = [e.prefill(seqs[1], ids[:length])]
    seqs.append(e.restore(e.snapshot(seqs[1])))
    again = [steps[0]]
    for token in ids[length:]:
        steps.append(e.decode(seqs[1], token))
        again.append(e.decode(seqs[2], token))
    assert_same({**e.rows(seqs[1]), "logits": np.array(steps)}, expected)
    assert_same({**e.rows(seqs[2]), "logits": np.array(again)}, expected)
    for seq in seqs:
        e.close(seq)


@pytest.mark.parametrize("name", SETUPS)
def test_an_empty_sequence_is_saved_and_restored(name: str) -> None:
    e, ids = engine(name), tokens_of(9)
    cold = e.open()
    logits = e.prefill(cold, ids)
    expected = {**e.rows(cold), "logits": logits[None]}
    e.close(cold)

    empty = e.open()
    state = Snapshot.from_bytes(e.snapshot(empty).to_bytes(e.config))
    e.close(empty)
    assert state.length == 0 and state.nbytes == 0 and all(len(rows) == 0 for rows in state.rows.values())
    seq = e.restore(state)
    assert seq.length == 0 and seq.pages == []
    logits = e.prefill(seq, ids)
    assert_same({**e.rows(seq), "logits": logits[None]}, expected)
    e.close(seq)


def test_up_to_the_maximum_length() -> None:
    """To the last token, where the maximum ends inside a page and inside a tile."""
    config, ids = one_layer(8), tokens_of(45)
    e = Engine(engine_model("hca"), config, SMALL, max_length=45, fill=np.nan)
    seq = e.open()
    logits = e.prefill(seq, ids, all_logits=True)
    found = {**e.rows(seq), "logits": logits}
    with pytest.raises(CapacityError, match="46 tokens exceed"):
        e.decode(seq, 1)

    wide = engine("hca")
    cold = wide.open()
    logits = wide.prefill(cold, ids, all_logits=True)
    assert_same(found, {**wide.rows(cold), "logits": logits})
    wide.close(cold)


# Arguments ------------------------------------------------------------------------------------------------


def test_an_empty_batch(micro_engine: Engine) -> None:
    assert micro_engine.prefill_batch([]) == []
    assert micro_engine.decode_batch([]) == []


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        np.zeros(0, np.int32),
        np.zeros((2, 2), np.int32),
        [0.5, 1.0],
        [True, False],
        "text",
        3,
        np.int32(3),
    ],
    ids=["list", "array", "matrix", "floats", "bools", "text", "number", "scalar"],
)
def test_tokens_that_are_no_list_of_integers(micro_engine: Engine, tokens: object) -> None:
    seq = micro_engine.open()
    for call in (micro_engine.prefill, micro_engine.prefill_probed):
        with pytest.raises(ValueError, match="tokens must be a non-empty list of integers"):
            call(seq, tokens)
    with pytest.raises(ValueError, match="tokens must be a non-empty list of integers"):
        micro_engine.prefill_batch([(seq, tokens)])
    assert seq.length == 0 and seq.pages == []


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_tokens_of_any_integer_type(micro_engine: Engine, dtype: type) -> None:
    ids = tokens_of(9)
    expected = micro_engine.prefill(micro_engine.open(), ids.tolist())
    found = micro_engine.prefill(micro_engine.open(), ids.astype(dtype))
    assert_same({"logits": found[None]}, {"logits": expected[None]})


@pytest.mark.parametrize("bad", [-1, -64, 64, 65, 2**31, 2**40])
def test_a_token_outside_the_vocabulary(micro_engine: Engine, bad: int) -> None:
    """The error names the token and where it is. Nothing ran: an id of -1 would read the last row."""
    seq = micro_engine.open()
    micro_engine.prefill(seq, tokens_of(9))
    before = micro_engine.rows(seq)
    with pytest.raises(ValueError, match=rf"token {bad} at index 2 is outside the vocabulary 0 \.\. 63"):
        micro_engine.prefill(seq, [0, 63, bad, 5])
    with pytest.raises(ValueError, match=rf"token {bad} at index 0"):
        micro_engine.decode(seq, bad)
    with pytest.raises(ValueError, match=rf"token {bad} at index 1"):
        micro_engine.prefill_batch([(micro_engine.open(), [3]), (seq, [1, bad])])
    assert seq.length == 9
    assert_same(micro_engine.rows(seq), before)


@pytest.mark.parametrize("plan", [[], [4], [4, 6], [9, 0], [0, 9], [10, -1], [-1, 10]])
def test_chunk_plans_that_do_not_sum_up(micro_engine: Engine, plan: list[int]) -> None:
    seq = micro_engine.open()
    with pytest.raises(ValueError, match="chunk_plan must hold positive lengths that sum to 9"):
        micro_engine.prefill(seq, tokens_of(9), plan)
    assert seq.length == 0 and seq.pages == []


def test_a_sequence_twice_in_a_batch(micro_engine: Engine) -> None:
    seq = micro_engine.open()
    with pytest.raises(ValueError, match="a sequence appears twice in the batch"):
        micro_engine.prefill_batch([(seq, [1]), (micro_engine.open(), [2]), (seq, [3])])
    assert seq.length == 0


def test_a_closed_sequence(micro_engine: Engine) -> None:
    """Every use is refused, also within a batch, whose other sequences then stay as they are."""
    seq, other = micro_engine.open(), micro_engine.open()
    micro_engine.prefill(seq, tokens_of(9))
    micro_engine.close(seq)
    micro_engine.close(seq)
    free = micro_engine.free_slots, micro_engine.free_pages
    uses: list[Callable[[], object]] = [
        lambda: micro_engine.prefill(seq, [1]),
        lambda: micro_engine.prefill_probed(seq, [1]),
        lambda: micro_engine.decode(seq, 1),
        lambda: micro_engine.prefill_batch([(other, [1] * 30), (seq, [1])]),
        lambda: micro_engine.decode_batch([(other, 1), (seq, 1)]),
        lambda: micro_engine.rows(seq),
        lambda: micro_engine.snapshot(seq),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="the sequence is closed"):
            use()
    assert (other.length, other.pages) == (0, [])
    assert (micro_engine.free_slots, micro_engine.free_pages) == free


def test_a_sequence_of_another_engine(micro_engine: Engine) -> None:
    """Its slot and pages would be those of a stranger here."""
    other = made(max_length=64)
    seq = other.open()
    uses: list[Callable[[], object]] = [
        lambda: micro_engine.prefill(seq, [1]),
        lambda: micro_engine.rows(seq),
        lambda: micro_engine.close(seq),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="belongs to another engine"):
            use()
    assert seq.open


# Sizes ----------------------------------------------------------------------------------------------------


def made(**sizes: int) -> Engine:
    return Engine(engine_model("csa"), one_layer(4), SMALL, **sizes)


@pytest.mark.parametrize("page_size", [-8, -1, 0, 1, 2, 6, 12, 20])
def test_pages_that_would_split_blocks(page_size: int) -> None:
    """Blocks of 4 and 8 end together every 8 tokens; the error says so."""
    with pytest.raises(
        ValueError, match=rf"page_size={page_size} must be a positive multiple of 8, .* blocks of every layer"
    ):
        Engine(engine_model("micro"), micro(), SMALL, max_length=64, page_size=page_size)


@pytest.mark.parametrize("max_length", [-1, 0, 4097, 10**9])
def test_lengths_that_the_model_does_not_have(max_length: int) -> None:
    with pytest.raises(ValueError, match=rf"max_length={max_length} must lie in 1 \.\. 4096"):
        made(max_length=max_length)


@pytest.mark.parametrize("sizes", [dict(slots=0), dict(slots=-1), dict(pages=0), dict(pages=-3)])
def test_pools_without_room(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        made(max_length=64, **sizes)


@pytest.mark.parametrize("tile", [12, 20])
def test_tiles_that_do_not_fit_a_ratio(tile: int) -> None:
    """Multiples of 4, but a block of 8 would begin in one tile and end inside another."""
    with pytest.raises(ValueError, match=f"tile={tile} must divide the compression ratio 8"):
        Engine(engine_model("micro"), micro(), replace(SMALL, tile=tile), max_length=64)


# Room -----------------------------------------------------------------------------------------------------


def test_past_the_maximum_length(micro_engine: Engine) -> None:
    seq, other = micro_engine.open(), micro_engine.open()
    micro_engine.prefill(seq, tokens_of(45))
    before, pages, free = micro_engine.rows(seq), list(seq.pages), micro_engine.free_pages
    calls: list[Callable[[], object]] = [
        lambda: micro_engine.prefill(seq, tokens_of(468)),
        lambda: micro_engine.prefill(seq, tokens_of(468), [234, 234]),
        lambda: micro_engine.prefill_probed(seq, tokens_of(468)),
        lambda: micro_engine.prefill_batch([(other, [1, 2]), (seq, tokens_of(468))]),
    ]
    for call in calls:
        with pytest.raises(CapacityError, match="513 tokens exceed"):
            call()
    assert (seq.length, seq.pages, other.length, other.pages) == (45, pages, 0, [])
    assert micro_engine.free_pages == free
    assert_same(micro_engine.rows(seq), before)


def test_out_of_slots(micro_engine: Engine) -> None:
    seqs = [micro_engine.open() for _ in range(3)]
    state = micro_engine.snapshot(seqs[0])
    for call in (micro_engine.open, lambda: micro_engine.restore(state)):
        with pytest.raises(CapacityError, match="all 3 slots are taken"):
            call()
    micro_engine.close(seqs[1])
    assert micro_engine.restore(state).slot == seqs[1].slot


def test_out_of_pages() -> None:
    """The pages of all slots together; who fails keeps what it had, and a close makes room."""
    e = Engine(engine_model("csa"), one_layer(4), SMALL, slots=3, max_length=64, pages=10, page_size=8)
    first, second = e.open(), e.open()
    e.prefill(first, tokens_of(41))
    e.prefill(second, tokens_of(17))
    assert (len(first.pages), len(second.pages), e.free_pages) == (6, 3, 1)
    before = e.rows(second)
    with pytest.raises(CapacityError, match="2 pages needed, 1 free of 10"):
        e.prefill(second, tokens_of(16))
    with pytest.raises(CapacityError, match="2 pages needed, 1 free of 10"):
        e.prefill_batch([(first, tokens_of(8)), (second, tokens_of(8))])  # each alone would fit
    with pytest.raises(CapacityError, match="3 pages needed, 1 free of 10"):
        e.restore(e.snapshot(second))
    assert (first.length, second.length, e.free_pages, e.free_slots) == (41, 17, 1, 1)
    assert_same(e.rows(second), before)
    e.prefill(second, tokens_of(7))  # to 24: fits in the pages it has
    assert e.free_pages == 1
    e.close(first)
    e.prefill(second, tokens_of(40))
    assert (second.length, e.free_pages) == (64, 2)


ACTIONS = ["open", "prefill", "decode", "batch", "restore", "close"]
ACTIONS += ["bad token", "bad plan", "too long", "foreign", "twice"]


@settings(max_examples=max(settings.default.max_examples // 4, 5))
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.sampled_from([1, 7, 8, 9, 30, 57])),
        max_size=16,
    )
)
def test_no_slot_and_no_page_leaks(actions: list[tuple[str, int, int]]) -> None:
    """Any calls in any order, many of which fail by misuse or for want of room.

    After each: what is free and what is owned are all there is, no page has two owners, and a sequence owns
    exactly the pages of its length. At the end every live sequence has the state of its tokens.
    """
    e = tight_engine()
    live: list[tuple[Sequence, list[int]]] = []
    saved: list[tuple[Snapshot, list[int]]] = []
    try:
        for action, which, length in actions:
            seq, ids = live[which % len(live)] if live else (None, [])
            new = tokens_of(length, seed=which).tolist()
            try:
                if action == "open":
                    live.append((e.open(), []))
                elif action == "restore" and saved:
                    snapshot, its_ids = saved[which % len(saved)]
                    live.append((e.restore(snapshot), list(its_ids)))
                elif action == "foreign" and saved:
                    e.restore(replace(saved[-1][0], fingerprint="0" * 64))
                elif seq is None:
                    continue
                elif action == "prefill":
                    e.prefill(seq, new)
                    ids += new
                    saved.append((e.snapshot(seq), list(ids)))
                elif action == "decode":
                    e.decode(seq, new[0])
                    ids.append(new[0])
                elif action == "batch":
                    e.prefill_batch([(other, new) for other, _ in live])
                    for _, its_ids in live:
                        its_ids += new
                elif action == "close":
                    e.close(seq)
                    live = [pair for pair in live if pair[0] is not seq]
                elif action == "bad token":
                    e.prefill(seq, [*new, -1])
                elif action == "bad plan":
                    e.prefill(seq, new, [length, 1])
                elif action == "too long":
                    e.prefill(seq, new * 129)
                elif action == "twice":
                    e.prefill_batch([*((other, new) for other, _ in live), (seq, new)])
            except (CapacityError, ForeignSnapshot, ValueError):
                pass
            owned = [page for other, _ in live for page in other.pages]
            assert len(set(owned)) == len(owned) and e.free_pages + len(owned) == 20
            assert len({other.slot for other, _ in live}) == len(live) == 3 - e.free_slots
            for other, its_ids in live:
                assert other.length == len(its_ids) and len(other.pages) == -(-other.length // 8)
        found = [(e.rows(other), its_ids) for other, its_ids in live]
    finally:
        for other, _ in live:
            e.close(other)
    assert (e.free_slots, e.free_pages) == (3, 20)
    for rows, its_ids in found:
        seq = e.open()
        if its_ids:
            e.prefill(seq, its_ids)
        expected = e.rows(seq)
        e.close(seq)
        assert_same(rows, expected)


@functools.cache
def tight_engine() -> Engine:
    return Engine(engine_model("csa"), one_layer(4), SMALL, slots=3, max_length=128, pages=20, page_size=8)


# Generating -----------------------------------------------------------------------------------------------


def test_generate_greedily(micro_engine: Engine) -> None:
    """As decoding by hand; restored from a snapshot in between, the same tokens and logits."""
    seq = micro_engine.open()
    logits = micro_engine.prefill(seq, tokens_of(20))
    state = micro_engine.snapshot(seq)
    tokens, rows = generate(micro_engine, seq, logits, 12)
    assert seq.length == 32 and rows.shape == (12, 64) and rows.dtype == np.float32

    by_hand, now = micro_engine.restore(state), logits
    for token, row in zip(tokens, rows, strict=True):
        assert token == greedy(now) == int(np.argmax(now))
        now = micro_engine.decode(by_hand, token)
        assert_same({"logits": now[None]}, {"logits": row[None]})

    micro_engine.close(by_hand)
    again = micro_engine.restore(state)
    first, half = generate(micro_engine, again, logits, 5)
    again = micro_engine.restore(micro_engine.snapshot(again))
    second, rest = generate(micro_engine, again, half[-1], 7)
    assert first + second == tokens
    assert_same({"logits": np.concatenate([half, rest])}, {"logits": rows})


def test_generate_nothing(micro_engine: Engine) -> None:
    seq = micro_engine.open()
    logits = micro_engine.prefill(seq, tokens_of(5))
    tokens, rows = generate(micro_engine, seq, logits, 0)
    assert tokens == [] and rows.shape == (0, 64) and seq.length == 5


def test_generate_by_seeded_sampling(micro_engine: Engine) -> None:
    """The same seed gives the same tokens, also from a restored sequence; another seed others."""
    seq = micro_engine.open()
    logits = micro_engine.prefill(seq, tokens_of(20))
    state = micro_engine.snapshot(seq)

    def drawn(seed: int, temperature: float = 1.0) -> list[int]:
        again = micro_engine.restore(state)
        choose = functools.partial(sample, seed=seed, temperature=temperature)
        tokens, _ = generate(
            micro_engine, again, logits, 16, lambda row, position: choose(row, position=position)
        )
        micro_engine.close(again)
        return tokens

    assert drawn(1) == drawn(1)
    assert len({tuple(drawn(seed)) for seed in range(4)}) == 4
    assert drawn(1, temperature=1e-6) == generate(micro_engine, micro_engine.restore(state), logits, 16)[0]


def test_sampling_follows_the_softmax() -> None:
    logits = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))
    drawn = np.array([sample(logits, seed=3, position=position) for position in range(20000)])
    np.testing.assert_allclose(np.bincount(drawn) / len(drawn), [0.5, 0.3, 0.15, 0.05], atol=0.012)
    hot = np.array([sample(logits, seed=3, position=position, temperature=2.0) for position in range(20000)])
    expected = np.sqrt([0.5, 0.3, 0.15, 0.05]) / np.sqrt([0.5, 0.3, 0.15, 0.05]).sum()
    np.testing.assert_allclose(np.bincount(hot) / len(hot), expected, atol=0.012)


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert greedy(np.float32([1, 3, 3, 2])) == 1
    assert greedy(np.zeros(5, np.float32)) == 0


@pytest.mark.parametrize("temperature", [0.0, -0.0, -1.0, float("nan"), float("-inf")])
def test_temperatures_that_mean_nothing(temperature: float) -> None:
    with pytest.raises(ValueError, match="must be above 0; use greedy"):
        sample(np.zeros(4, np.float32), 0, 0, temperature)
