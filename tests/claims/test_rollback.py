"""Claim: drafts change no bit. After any rejected suffix a sequence is as if it had never drafted.

Whatever was guessed and however many guesses were wrong, wherever that falls between the boundaries of the
blocks, every component, the logits that follow and the next drafts are those of a run without drafts.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldenkv.config import Numerics, micro, tiny, with_mtp
from goldenkv.engine import Engine, Sequence, generate, sample, speculate
from goldenkv.model.weights import Model
from goldenkv.state import Rows, compare

SMALL = Numerics(tile=8, index_block=8, key_block=8)
MOST = 5
SETUPS = {
    "float32": (with_mtp(micro()), SMALL),
    "smallest tile": (with_mtp(micro()), replace(SMALL, tile=4)),
    "quantised bfloat16": (with_mtp(micro()), replace(SMALL, dtype="bfloat16", fake_quantisation=True)),
    "tiny": (with_mtp(tiny()), Numerics(tile=32, index_block=32, key_block=4)),
}
each_setup = pytest.mark.parametrize("name", SETUPS)
EDGES = [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 39, 40, 41]


@functools.cache
def model(name: str) -> Model:
    return Model(*SETUPS[name])


@functools.cache
def engine(name: str) -> Engine:
    longest = 640 if name == "tiny" else 128
    return Engine(model(name), *SETUPS[name], slots=3, max_length=longest, rollback=MOST, fill=np.nan)


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length)


def differing(found: Rows, expected: Rows) -> set[str]:
    """The names whose bits differ."""
    return {name for name, ok in compare(found, expected).by_name.items() if not ok.all()}


LATER = tokens_of(12, seed=99)


def from_here(e: Engine, seq: Sequence) -> Rows:
    """Everything now, the next drafts, and everything after further tokens, some of them one at a time."""
    now = {f"now {name}": rows for name, rows in e.rows(seq).items()}
    drafts = np.array([e.draft(seq, 7, MOST)])
    logits = e.prefill(seq, LATER, [1, 1, 1, 9], all_logits=True)
    return now | {"drafts": drafts, "logits": logits} | e.rows(seq)


@functools.cache
def never_drafted(name: str, length: int) -> Rows:
    e = engine(name)
    seq = e.open()
    e.prefill(seq, tokens_of(length))
    found = from_here(e, seq)
    e.close(seq)
    return found


def drafted(e: Engine, length: int, guesses: int, accepted: int, at: str = "prefill") -> Rows:
    """The same tokens; the last of them came as guesses, `accepted` right ones, then wrong ones."""
    ids = tokens_of(length)
    before = length - 1 - accepted
    seq = e.open()
    if before and at == "prefill":
        e.prefill(seq, ids[:before])
    elif before:
        e.prefill(seq, ids[:before])
        snapshot = e.snapshot(seq)
        e.close(seq)
        seq = e.restore(snapshot)
    wrong = (tokens_of(length + MOST)[length : length + guesses - accepted] + 1) % 64
    e.prefill(seq, [*ids[before:], *wrong])
    e.rollback(seq, length)
    found = from_here(e, seq)
    e.close(seq)
    return found


@each_setup
def test_every_rejected_suffix(name: str) -> None:
    """d = 1 .. 5 guesses of which 0 .. d are right, at every position around the ends of blocks and tiles."""
    if name == "tiny":
        lengths = [6, 127, 128, 129, 130, 131, 133, 256, 257, 384, 512]
    else:
        lengths = list(range(6, 31)) if name == "float32" else [6, 7, 8, 9, 15, 16, 17, 23, 24, 25]
    tried = 0
    for length in lengths:
        expected = never_drafted(name, length)
        for guesses in (1, MOST) if name == "tiny" else range(1, MOST + 1):
            for accepted in range(guesses + 1):
                at = ("prefill", "restore")[tried % 2]
                found = drafted(engine(name), length, guesses, accepted, at)
                assert not differing(found, expected), (length, guesses, accepted, at)
                tried += 1
    assert engine(name).free_slots == 3


@pytest.mark.parametrize("name", ["float32", "smallest tile", "quantised bfloat16"])
@given(data=st.data())
def test_speculation_is_generation(name: str, data: st.DataObject) -> None:
    """Any mixture of right and wrong guesses, passes of any size, greedy or sampled: the same bits."""
    e = engine(name)
    length, steps = data.draw(st.sampled_from(EDGES)), data.draw(st.integers(0, 24))
    drafts, seed = data.draw(st.integers(1, MOST)), data.draw(st.sampled_from([None, 1, 2]))
    right = data.draw(st.lists(st.integers(0, MOST), min_size=1, max_size=6))

    def choose(logits: np.ndarray, position: int) -> int:
        return int(np.argmax(logits)) if seed is None else sample(logits, seed, position)

    seq = e.open()
    logits = e.prefill(seq, tokens_of(length))
    snapshot = e.snapshot(seq)
    tokens, rows = generate(e, seq, logits, steps, choose)
    expected = from_here(e, seq)
    e.close(seq)

    calls = iter(range(10_000))

    def propose(seq: Sequence, token: int, count: int) -> list[int]:
        """The truth for a drawn number of tokens, then something else."""
        ahead = tokens[seq.length + 1 - length :][:count]
        good = right[next(calls) % len(right)]
        return [t if i < good else (t + 1) % 64 for i, t in enumerate(ahead)]

    seq = e.restore(snapshot)
    found = speculate(e, seq, logits, steps, drafts, choose=choose, propose=propose)
    assert found.tokens == tokens
    assert not differing({"logits": found.logits}, {"logits": rows})
    assert found.accepted + found.passes == steps and found.accepted <= found.drafted
    assert not differing(from_here(e, seq), expected)
    e.close(seq)


@pytest.mark.parametrize("drafts", range(1, MOST + 1))
def test_the_mtp_layer_as_the_source_of_guesses(drafts: int) -> None:
    e = engine("tiny")
    seq = e.open()
    logits = e.prefill(seq, tokens_of(126))
    snapshot = e.snapshot(seq)
    tokens, rows = generate(e, seq, logits, 12)
    expected = from_here(e, seq)
    e.close(seq)
    seq = e.restore(snapshot)
    found = speculate(e, seq, logits, 12, drafts)
    assert found.tokens == tokens and found.drafted >= 10
    assert not differing({"logits": found.logits}, {"logits": rows})
    assert not differing(from_here(e, seq), expected)
    e.close(seq)


def test_guesses_save_passes_when_they_are_right() -> None:
    e = engine("float32")
    seq = e.open()
    logits = e.prefill(seq, tokens_of(9))
    snapshot = e.snapshot(seq)
    tokens, _ = generate(e, seq, logits, 24)
    e.close(seq)
    seq = e.restore(snapshot)

    def oracle(seq: Sequence, token: int, count: int) -> list[int]:
        return tokens[seq.length + 1 - 9 :][:count]

    found = speculate(e, seq, logits, 24, 5, propose=oracle)
    assert (found.passes, found.accepted, found.drafted) == (4, 20, 20)
    e.close(seq)


# Controls: rollbacks that leave something behind -----------------------------------------------------------


def suffixes() -> list[tuple[int, int, int]]:
    return [(length, d, a) for length in range(9, 25) for d in (1, 3, 5) for a in range(d)]


def wrong_ones(e: Engine, name: str) -> set[str]:
    """What differs over many rejected suffixes."""
    found: set[str] = set()
    for length, guesses, accepted in suffixes():
        found |= differing(drafted(e, length, guesses, accepted), never_drafted(name, length))
    return found


def test_control_rings_without_room_to_roll_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that a tile reads are not enough: wrong guesses overwrite rows of the last finished block."""
    name = "smallest tile"
    e = Engine(model(name), *SETUPS[name], slots=3, max_length=128, rollback=0, fill=np.nan)
    assert all(ring.shape[1] == 8 for key, ring in e._pool[1].items() if "rows" in key)  # 2 blocks of 4
    roomy = type(e.geometry)(**{f: getattr(e.geometry, f) for f in e.geometry.__slots__} | {"rollback": MOST})
    e._slots._geometry = e.geometry = roomy  # it may roll back, but has no room for that
    found = wrong_ones(e, name)
    assert {"layers.1.entries", "layers.1.index_keys", "logits"} <= found


@pytest.mark.parametrize("off", [1, -1])
def test_control_a_rollback_to_another_length(monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    e = engine("float32")
    real = e.rollback
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(e, "rollback", lambda seq, length: real(seq, length + off))
        assert "logits" in differing(drafted(e, 18, 3, 1), never_drafted("float32", 18))
    assert not differing(drafted(e, 18, 3, 1), never_drafted("float32", 18))


@pytest.mark.parametrize("cell", ["layers.3.draft_window", "layers.3.draft_streams"])
def test_control_draft_state_that_is_not_restored(cell: str) -> None:
    """The main model does not notice; drafts do, and so does the comparison of state."""
    e = engine("float32")
    seq = e.open()
    e.prefill(seq, tokens_of(18))
    snapshot = e.snapshot(seq)
    e.close(seq)
    seq = e.restore(replace(snapshot, rows=snapshot.rows | {cell: np.zeros_like(snapshot.rows[cell])}))
    found = differing(from_here(e, seq), never_drafted("float32", 18))
    e.close(seq)
    assert f"now {cell}" in found and "drafts" in found
    assert not {"logits", "layers.0.window", "layers.2.entries"} & found


# Bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "restored"), [(19, False), (14, False), (-1, False), (17, True)], ids=str
)  # fmt: skip
def test_a_rollback_that_cannot_be_exact_is_refused(length: int, restored: bool) -> None:
    e = engine("float32")
    seq = e.open()
    e.prefill(seq, tokens_of(18))
    e.prefill(seq, [1, 2])
    e.rollback(seq, 18)  # 20 is the most it had
    if restored:
        snapshot = e.snapshot(seq)
        e.close(seq)
        seq = e.restore(snapshot)
    lowest = 18 if restored else 15
    with pytest.raises(ValueError, match=rf"to {length} tokens must stay within {lowest} \.\. 18"):
        e.rollback(seq, length)
    assert not differing(from_here(e, seq), never_drafted("float32", 18))
    e.close(seq)
    with pytest.raises(ValueError, match="closed"):
        e.rollback(seq, 18)


def test_a_rollback_gives_pages_back() -> None:
    config, numerics = SETUPS["float32"]
    e = Engine(model("float32"), config, numerics, max_length=64, page_size=8, rollback=9)
    seq = e.open()
    e.prefill(seq, tokens_of(15))
    assert e.free_pages == 6
    e.prefill(seq, tokens_of(9))
    assert e.free_pages == 5
    for length, free in ((17, 5), (16, 6), (15, 6)):
        e.rollback(seq, length)
        assert e.free_pages == free
    e.close(seq)
    assert e.free_pages == 8


@pytest.mark.parametrize("call", ["draft", "speculate"])
def test_bad_drafts(call: str) -> None:
    e = engine("float32")
    seq = e.open()
    calls: dict[str, Callable[[int], object]] = {
        "draft": lambda n: e.draft(seq, 3, n),
        "speculate": lambda n: speculate(e, seq, np.zeros(64, np.float32), 9, n),
    }
    with pytest.raises(
        ValueError, match=r"after at least one token" if call == "draft" else r"after at least"
    ):
        calls[call](2)
    logits = e.prefill(seq, tokens_of(5))
    for count in (-1, MOST + 1):
        with pytest.raises(ValueError, match=r"must lie in [01] \.\. 5"):
            calls[call](count)
    assert e.draft(seq, 3, 0) == []
    with pytest.raises(ValueError, match="outside the vocabulary"):
        e.draft(seq, 64, 1)
    with pytest.raises(ValueError, match="propose gave 4 guesses, at most 3"):
        speculate(e, seq, logits, 9, 3, propose=lambda seq, token, count: [1] * (count + 1))
    assert seq.length == 5
    e.close(seq)
    bare = Engine(Model(micro(), SMALL), micro(), SMALL, max_length=64)
    other = bare.open()
    bare.prefill(other, [1])
    with pytest.raises(ValueError, match="no MTP layer"):
        bare.draft(other, 1, 1)


def test_drafts_at_the_end_of_the_room() -> None:
    """Guesses never need more than `max_length`, and the last tokens come without any."""
    config, numerics = SETUPS["float32"]
    e = Engine(model("float32"), config, numerics, slots=2, max_length=24, rollback=MOST)
    seq = e.open()
    logits = e.prefill(seq, tokens_of(16))
    found = speculate(e, seq, logits, 8, 5, propose=lambda seq, token, count: [0] * count)
    other = e.open()
    e.prefill(other, tokens_of(16))
    assert seq.length == 24 and found.tokens == generate(e, other, logits, 8)[0]
