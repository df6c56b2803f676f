"""Real stores under a small device: every token is counted once, every answer is that of a cold run.

Controls: an answer that is not that of the cold run is seen, and so is a bit that nobody verifies.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldenkv.config import Numerics, micro
from goldenkv.engine import Engine
from goldenkv.model.weights import Model
from goldenkv.prefix import Namespace, Tenant, TensorParallel
from goldenkv.tier_study import (
    Cold,
    Inline,
    cold,
    crossover,
    drill,
    growing,
    interleaved,
    read_sessions,
    serve,
)
from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.faults import Faulty, Flip, Lose
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.shelf import Tier, Write

CONFIG, NUMERICS = micro(), Numerics(tile=8, index_block=8, key_block=8)
PAGE, PAGES, PERIOD = 16, 40, 32


@functools.cache
def engine() -> Engine:
    sizes = dict(slots=2, max_length=288, page_size=PAGE, pages=PAGES, boundaries=40)
    return Engine(Model(CONFIG, NUMERICS), CONFIG, NUMERICS, **sizes)


@functools.cache
def space() -> Namespace:
    return Namespace(
        domain=Tenant("t", None), model=engine().fingerprint, tokenizer=None, chat_template=None,
        layout="pool", page_size=PAGE, dtype="float32", tensor_parallel=TensorParallel(1, 0, "none"),
        adapter=None, media=(), salt=None,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    assert engine().free_pages == PAGES and engine().free_slots == 2 and engine().free_boundaries == 40


def host(**options) -> HostStore:
    return HostStore(1 << 20, block=256, **options)


# Text -------------------------------------------------------------------------------------------------------


def test_requests_of_a_file_are_put_in_order(tmp_path):
    lines = [
        {"timestamp": 3, "input": "abc", "session_id": "x"},
        {"timestamp": 2, "input": "z", "session_id": "y"},
        {"timestamp": 1, "input": "ab", "session_id": "x", "output": "not used"},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "c.jsonl").write_text('{"input": "first"}\n{"input": "second"}\n')
    (tmp_path / "a.txt").write_text("12345678")
    (tmp_path / "README.md").write_text("not a session")
    assert read_sessions(tmp_path, turns=2) == [
        ["1234", "12345678"],
        ["ab", "abc"],
        ["z"],
        ["first", "second"],
    ]


@pytest.mark.parametrize("line", ["{", "[1]", '{"output": "x"}', '{"input": "x", "timestamp": "noon"}'])
def test_what_is_no_request_is_refused(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"input": "x"}\n' + line)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not a request with an input"):
        read_sessions(tmp_path)


def test_a_folder_without_sessions_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must have \.jsonl or \.txt files"):
        read_sessions(tmp_path)


def test_a_text_grows_to_its_whole():
    assert growing("abcdefg", 3) == ["ab", "abcd", "abcdefg"]


@given(lengths=st.lists(st.integers(0, 5), max_size=5), seed=st.integers(0, 3))
def test_mixed_sessions_keep_their_order(lengths, seed):
    sessions = [[np.array([s, turn]) for turn in range(n)] for s, n in enumerate(lengths)]
    mixed = interleaved(sessions, seed)
    assert len(mixed) == sum(lengths)
    for number, session in enumerate(sessions):
        assert [prompt[1] for prompt in mixed if prompt[0] == number] == list(range(len(session)))
    assert [p.tolist() for p in mixed] == [p.tolist() for p in interleaved(sessions, seed)]


# Running ----------------------------------------------------------------------------------------------------


def test_an_inline_worker_has_run_when_it_returns():
    workers = Inline()
    assert workers.submit(divmod, 7, 2).result(0) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 1, 0).result(0)
    workers.left = 1
    assert workers.submit(divmod, 7, 2).done()
    hung = workers.submit(divmod, 7, 2)
    assert not hung.done() and hung.cancel()


def talk() -> list[np.ndarray]:
    """Two sessions in turn, three prompts each; they part after a page."""
    rng = np.random.default_rng(1)
    start = rng.integers(0, CONFIG.vocab_size, PAGE)
    texts = [np.concatenate([start, rng.integers(0, CONFIG.vocab_size, 200)]) for _ in range(2)]
    return [text[:length] for length in (70, 150, 200) for text in texts]


@functools.cache
def expected() -> list[Cold]:
    return [cold(engine(), prompt) for prompt in talk()]


def served(tiers=(), pages=PAGES, answers=None):
    return serve(
        engine(), space(), talk(), answers or expected(), tiers, pages=pages, period=PERIOD
    )  # fmt: skip


def test_tokens_by_source(tmp_path):
    """By hand: of prompts of 70, 150, 200 a second one finds 64, a third one 144 tokens; states are at 32s.

    The second session's first prompt finds one page, too little to replay. Of 144 tokens 16 run again.
    """
    alone = served()
    assert alone.sources == {"device": 2 * (64 + 128), "replayed": 2 * 16, "computed": 2 * (70 + 86 + 56)}
    assert (alone.requests, alone.hits, alone.equal) == (6, 4, 6)
    assert (alone.tokens, alone.reused) == (840, 384)

    small = served(pages=14)
    assert small.tokens == 840 and small.equal == 6 and small.reused < alone.reused

    for make in (host, lambda: DiskStore(tmp_path / "tier")):
        below = served([Tier(store=make(), write=Write.BACK)], pages=14)
        assert below.reused == alone.reused and below.equal == 6 and below.hits == 4
        assert set(below.sources) <= {"device", "host", "disk", "replayed", "computed"}
        assert below.sources.get("host", 0) + below.sources.get("disk", 0) > 0


@settings(max_examples=12)
@given(
    pages=st.sampled_from([13, 14, 16, 20, 40]),
    size=st.sampled_from([1, 4_000, 12_000, 20_000, 60_000]),
    write=st.sampled_from([Write.BACK, Write.THROUGH]),
)
def test_whatever_the_capacity_nothing_changes_but_the_sources(pages, size, write):
    found = served([Tier(store=HostStore(size, block=256), write=write)], pages=pages)
    assert found.tokens == 840 and found.equal == 6
    assert found.sources["computed"] >= 6 and min(found.sources.values()) > 0


def test_control_an_answer_with_other_bits_is_seen():
    """One bit of one logit, and one of the state."""
    first = expected()[0]
    logits, rows = first.logits.copy(), {name: rows.copy() for name, rows in first.rows.items()}
    logits.view(np.uint32)[5] ^= 1
    name = max(rows, key=lambda name: rows[name].size)
    rows[name].view(np.uint32)[0, 0] ^= 1
    for wrong in (Cold(logits, first.rows), Cold(first.logits, rows)):
        assert served(answers=[wrong, *expected()[1:]]).equal == 5


# Faults -----------------------------------------------------------------------------------------------------


def prompt() -> np.ndarray:
    return np.random.default_rng(2).integers(0, CONFIG.vocab_size, 101)


@functools.cache
def answer() -> Cold:
    return cold(engine(), prompt())


def after(store, **broken):
    """reused, run again, computed, reasons; and the bits are those of a cold run."""
    found = drill(engine(), space(), prompt(), answer(), store, stored=96, page=3, **broken)
    assert found.equal and found.logit_error == 0
    return found.reused, found.replayed, found.computed, found.reasons


def lost() -> Faulty:
    store = Faulty(host())
    store.add(Lose(), nth=5)
    return store


def flip_in_file(store: DiskStore, page) -> None:
    path = Path(store.places.object(page))
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x80
    path.write_bytes(data)


def test_without_a_fault_everything_is_reused(tmp_path):
    assert after(host()) == (96, 0, 5, ())
    assert after(DiskStore(tmp_path)) == (96, 0, 5, ())


@pytest.mark.parametrize(
    ("make", "broken", "outcome"),
    [
        (lambda: Faulty(host()), {"before": lambda s, p: s.down()}, (0, 0, 101, ("unavailable",))),
        (lambda: Faulty(host()), {"during": lambda s, p: s.down()}, (27, 21, 53, ("unavailable",))),
        (lost, {}, (32, 16, 53, ())),
        (host, {"before": lambda s, p: s.delete([p])}, (32, 16, 53, ())),
        (host, {"during": lambda s, p: s.delete([p])}, (32, 16, 53, ("missing",))),
        (lambda: Faulty(host()), {"during": lambda s, p: s.add(Flip(bit=-1))}, (32, 16, 53, ("corrupt",))),
        (host, {"comes": 3}, (27, 21, 53, ("late",))),
        (host, {"comes": 0}, (0, 0, 101, ("late",))),
    ],
    ids=[
        "down", "dies", "put lost", "evicted", "evicted after look-up", "flipped", "late", "all late"
    ],
)  # fmt: skip
def test_what_a_fault_costs(make, broken, outcome):
    assert after(make(), **broken) == outcome


def test_a_damaged_file(tmp_path):
    assert after(DiskStore(tmp_path), during=flip_in_file) == (32, 16, 53, ("corrupt",))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_control_a_bit_that_nobody_verifies(tmp_path, kind, verify):
    """Store and mover both verify. The mover alone finds the bit too; without both the answer is another."""
    if kind == "host":
        store, hurt = Faulty(host(verify=False)), lambda store, page: store.add(Flip(bit=-1))
    else:
        store, hurt = DiskStore(tmp_path, verify=False), flip_in_file
    found = drill(
        engine(), space(), prompt(), answer(), store, stored=96, page=3, during=hurt, verify=verify
    )  # fmt: skip
    assert found.equal is verify
    assert found.reasons == (("corrupt",) if verify else ())
    assert found.reused == (32 if verify else 96)
    assert (found.logit_error > 0) is not verify


# Reload against recompute -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reload", "at"),
    [
        ([1, 1, 1], 100),
        ([2, 2, 2], 100),
        ([3, 3, 3], 150),
        ([8, 2, 4], 100 * 2 ** (2 / 3)),
        ([1, 9, 1], 200 * 2 ** (np.log(9 / 4) / np.log(8 * 9 / 4))),
        ([9, 9, 9], None),
        ([1, 1, 8], None),
    ],
    ids=["always", "equal at first", "between", "falling", "twice", "never", "equal at last"],
)
def test_crossover(reload, at):
    """Computing takes a second for 50 tokens. Between two lengths a curve is a line between logarithms."""
    found = crossover([100, 200, 400], reload, [2, 4, 8])
    assert found == (None if at is None else pytest.approx(at))
