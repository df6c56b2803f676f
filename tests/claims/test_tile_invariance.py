"""Claim: a token's bits depend on the tokens before it and on nothing else.

Not on how the prompt was cut, nor on the batch, the slot, the pages, the size of the pool, the maximum length
or what the pool held before. Everything is compared as unsigned integers: every component and the logits.

The controls at the end are the smallest changes that must break the claim. A comparison that accepted them
would prove nothing.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldenkv import engine as engines
from goldenkv.config import Numerics, micro, tiny, with_mtp
from goldenkv.engine import Engine, FreeShapeEngine
from goldenkv.model.tile import run_tile
from goldenkv.model.weights import Model
from goldenkv.ops import attend
from goldenkv.state import Snapshot, compare
from goldenkv.state import pool as pools

# Small blocks, so that a hundred tokens already fill several of each kind.
SMALL = Numerics(tile=8, index_block=8, key_block=8)
SETUPS = {
    "float32": (micro(), SMALL),
    "bfloat16": (with_mtp(micro()), replace(SMALL, dtype="bfloat16")),
    "quantised": (with_mtp(micro()), replace(SMALL, fake_quantisation=True)),
    "quantised bfloat16": (with_mtp(micro()), replace(SMALL, dtype="bfloat16", fake_quantisation=True)),
    "tile 4": (micro(), replace(SMALL, tile=4, index_block=16)),
    "tile 16": (micro(), replace(SMALL, tile=16, key_block=16)),
    "tiny": (with_mtp(tiny()), Numerics(tile=32, index_block=32, key_block=4)),
    "one CSA layer": (replace(micro(), num_hidden_layers=1, compress_ratios=(4,)), SMALL),
}

# The first place gives the expected bits; the others differ from it in every size that must not matter.
PLACES = [
    dict(slots=1, max_length=256),
    dict(slots=2, max_length=256, page_size=16, fill=np.nan),
    dict(slots=3, max_length=512, pages=200, fill=1e30),
    dict(slots=5, max_length=208, page_size=24, fill=-np.inf),
    dict(slots=8, max_length=4096, page_size=64, pages=40, fill=np.nan),
]
TINY_PLACES = [
    dict(slots=1, max_length=640),
    dict(slots=3, max_length=1024, page_size=256, fill=np.nan),
]

# Around every edge of the micro model: window 8, ratios 4 and 8, tiles of 4, 8 and 16, pages of 8 to 64, key
# and index blocks of 32 and more tokens.
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33]
LENGTHS += [47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 200]
TINY_LENGTHS = [126, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513]
CHUNKS = [1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 40, 64]

EXAMPLES = settings.default.max_examples


@dataclass(frozen=True)
class Plan:
    """One way to arrive at `length` tokens.

    Attributes:
        seed, length: the tokens.
        chunks: chunk lengths, repeated until the tokens are used up.
        tail: tokens of the end that run in a batch with strangers instead.
        before: strangers that ran first: their length, and whether they stay.
        partners: lengths of the strangers in the batch.
    """

    seed: int
    length: int
    chunks: list[int]
    tail: int
    before: list[tuple[int, bool]]
    partners: list[int]


def plans(lengths: list[int]) -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        seed=st.integers(0, 2**16),
        length=st.sampled_from(lengths),
        chunks=st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=6),
        tail=st.sampled_from([0, 0, 1, 3, 8, 9, 30]),
        before=st.lists(st.tuples(st.sampled_from([1, 9, 30, 64]), st.booleans()), max_size=4),
        partners=st.lists(st.sampled_from([1, 4, 7, 8, 9, 33]), max_size=4),
    )


@functools.cache
def model(name: str) -> Model:
    return Model(*SETUPS[name])


@functools.cache
def engine(name: str, place: int) -> Engine:
    sizes = (TINY_PLACES if name == "tiny" else PLACES)[place]
    return Engine(model(name), *SETUPS[name], **sizes)


def tokens_of(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length)


def cut(length: int, chunks: Sequence[int]) -> list[int]:
    """Chunk lengths that sum to `length`, from a list that is repeated."""
    plan: list[int] = []
    while sum(plan) < length:
        plan.append(min(chunks[len(plan) % len(chunks)], length - sum(plan)))
    return plan


def run(e: Engine, tokens: np.ndarray, plan: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """Every component and the logits of every token, from a sequence of its own."""
    seq = e.open()
    try:
        logits = e.prefill(seq, tokens, plan, all_logits=True)
        return {**e.rows(seq), "logits": logits}
    finally:
        e.close(seq)


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: object) -> None:
    d = compare(found, expected)
    assert d.same, f"{d.rows - d.equal} of {d.rows} rows differ, first {d.first}: {what}"


def check(name: str, place: int, plan: Plan) -> None:
    """Runs a plan among strangers; its sequence and every stranger must have the bits of a run alone."""
    e, slots = engine(name, place), engine(name, place).geometry.slots
    live: list[tuple[engines.Sequence, np.ndarray, np.ndarray | None]] = []
    opened: list[engines.Sequence] = []

    def start(seed: int, length: int) -> tuple[engines.Sequence, np.ndarray]:
        opened.append(e.open())
        return opened[-1], tokens_of(seed, length)

    try:
        for i, (length, stays) in enumerate(plan.before):
            stranger, ids = start(plan.seed + 1 + i, length)
            e.prefill(stranger, ids)
            if stays and len(live) < slots - 1:
                live.append((stranger, ids, None))
            else:
                e.close(stranger)
        target, ids = start(plan.seed, plan.length)
        head = max(plan.length - plan.tail, 0)
        logits = np.zeros((0, e.config.vocab_size), np.float32)
        if head:
            logits = e.prefill(target, ids[:head], cut(head, plan.chunks), all_logits=True)
        if head < plan.length:
            partners = plan.partners[: slots - 1 - len(live)]
            work = [start(plan.seed + 100 + i, length) for i, length in enumerate(partners)]
            work.insert(plan.seed % (len(work) + 1), (target, ids[head:]))
            last = e.prefill_batch(work)
            for (seq, new), row in zip(work, last, strict=True):
                if seq is target:
                    logits = np.concatenate([logits, row[None]])
                else:
                    live.append((seq, new, row[None]))
        live.append((target, ids, logits))
        for seq, all_ids, found in live:
            expected = run(engine(name, 0), all_ids)
            whole = expected.pop("logits")
            assert_same(e.rows(seq), expected, plan)
            if found is not None:  # logits of the head's tokens, then of the last token
                rows = [*range(len(found) - 1), len(whole) - 1]
                assert_same({"logits": found}, {"logits": whole[rows]}, plan)
    finally:
        for seq in opened:
            e.close(seq)


@given(plan=plans(LENGTHS), place=st.integers(1, len(PLACES) - 1))
def test_no_plan_changes_a_bit(plan: Plan, place: int) -> None:
    check("float32", place, plan)


@pytest.mark.parametrize("name", ["bfloat16", "quantised", "quantised bfloat16", "tile 4", "tile 16"])
@settings(max_examples=max(EXAMPLES // 5, 5))
@given(plan=plans(LENGTHS))
def test_no_plan_changes_a_bit_under_other_numerics(name: str, plan: Plan) -> None:
    """Each numerics against itself."""
    check(name, 2, plan)


@settings(max_examples=max(EXAMPLES // 15, 5))
@given(plan=plans(TINY_LENGTHS))
def test_no_plan_changes_a_bit_at_the_published_window_and_ratios(plan: Plan) -> None:
    check("tiny", 1, plan)


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "quantised", "quantised bfloat16", "tile 4", "tile 16"]
)
def test_one_step_of_any_size_from_any_state(name: str) -> None:
    """The induction step: any plan is a chain of such steps, so none of its length is left to chance.

    From the state at every length, restored into pages that others used, one tile runs to every end that it
    can have. It must arrive at the state and the logits of the straight run.
    """
    length = 72
    ids = tokens_of(7, length)
    straight = run(engine(name, 0), ids)["logits"]
    seq, states = engine(name, 0).open(), []
    for token in [None, *ids]:
        if token is not None:
            engine(name, 0).decode(seq, token)
        states.append(engine(name, 0).snapshot(seq))
    engine(name, 0).close(seq)

    e = engine(name, 2)
    for begin in range(length):
        tile = e.numerics.tile
        for end in range(begin + 1, min(begin // tile * tile + tile, length) + 1):
            seq = e.restore(states[begin])
            try:
                logits = e.prefill(seq, ids[begin:end], all_logits=True)
                found = {**e.rows(seq), "logits": logits}
            finally:
                e.close(seq)
            expected = {**states[end].rows, "logits": straight[begin:end]}
            assert_same(found, expected, f"from {begin} to {end}")


# Controls: each must be found -----------------------------------------------------------------------------


def retraced() -> Callable:
    """The tile program, to be traced again: what was traced before a monkeypatch does not have it."""

    @functools.wraps(run_tile.__wrapped__)
    def again(*args, **options):
        return run_tile.__wrapped__(*args, **options)

    names = ("structure", "config", "numerics", "aligned", "probe")
    return jax.jit(again, static_argnames=names, donate_argnames="pool")


def test_control_free_shapes_change_bits() -> None:
    """One chunk of 24 against 24 single tokens: the same model, other shapes."""
    e = FreeShapeEngine(model("one CSA layer"), *SETUPS["one CSA layer"], max_length=256)
    ids = tokens_of(0, 24)
    difference = compare(run(e, ids), run(e, ids, [1] * 24))
    assert not difference.same
    assert not difference.by_name["logits"].all()


def test_control_another_tile_changes_bits() -> None:
    """So the tile size belongs to the fingerprint, and each size is compared with itself.

    Neighbouring sizes can agree: the compiler often computes 8 rows as it computes 4 or 16.
    """
    (config, numerics), ids = SETUPS["one CSA layer"], tokens_of(0, 64)
    made = [
        Engine(model("one CSA layer"), config, replace(numerics, tile=tile), max_length=256)
        for tile in (8, 64)
    ]
    difference = compare(*(run(e, ids) for e in made))
    assert not difference.same
    assert not difference.by_name["logits"].all()
    assert made[0].fingerprint != made[1].fingerprint


def test_control_reads_fused_with_arithmetic_depend_on_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the branch around each pool read, XLA compiles reads into the arithmetic that uses them.

    What is shown: with 2 slots and with 4 the same tokens then have other CSA entries. That is a choice of
    this compiler for these sizes; another may need other sizes to show it.
    """

    monkeypatch.setattr(pools, "apart", lambda when, compute: compute())
    monkeypatch.setattr(engines.engine, "run_tile", retraced())
    name, ids = "one CSA layer", tokens_of(0, 24)
    few, many = (run(Engine(model(name), *SETUPS[name], slots=n, max_length=256), ids) for n in (2, 4))
    difference = compare(few, many)
    assert not difference.same
    assert not difference.by_name["layers.0.entries"].all()


def test_control_rows_not_zeroed_before_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked score is no shield: weight 0 times NaN is NaN. A pool filled with zeros would hide it."""

    def absorb(state, q, keys, visible):
        def values(weight):
            return attend.contract("thn,nd->thd", weight, keys)

        return attend._fold(state, attend.contract("thd,nd->thn", q, keys), visible, values)

    monkeypatch.setattr(attend, "absorb", absorb)
    monkeypatch.setattr(engines.engine, "run_tile", retraced())
    name, ids = "one CSA layer", tokens_of(0, 13)
    e = Engine(model(name), *SETUPS[name], max_length=256)
    seq = e.open()
    e.prefill(seq, ids[:12])
    state = e.snapshot(seq)

    def next_logits(fill: float) -> np.ndarray:
        """The window rows before the live ones hold `fill`: nothing wrote them, and no query may see them."""
        e = Engine(model(name), *SETUPS[name], max_length=256, fill=fill)
        return e.decode(e.restore(state), ids[12])

    assert np.isfinite(next_logits(0.0)).all()
    assert np.isnan(next_logits(np.nan)).all()


def test_control_one_bit_is_found() -> None:
    """The comparison itself: the lowest bit of one channel, and a zero that changes its sign."""
    seq = engine("float32", 0).open()
    engine("float32", 0).prefill(seq, tokens_of(0, 45))
    state: Snapshot = engine("float32", 0).snapshot(seq)
    engine("float32", 0).close(seq)
    for name, rows in state.rows.items():
        changed = rows.copy()
        changed.view(np.uint32)[-1, -1] ^= 1
        difference = compare(state.rows, {**state.rows, name: changed})
        assert (difference.rows - difference.equal, difference.first) == (1, (name, len(rows) - 1))
    zero = {"x": np.zeros((2, 3), np.float32)}
    assert not compare(zero, {"x": -zero["x"]}).same
