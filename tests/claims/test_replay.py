"""Claim: without any boundary state, replaying the receptive field restores a sequence exactly.

Its entries are at hand; what must run again is `replay_length` tokens: L (W - 1) at the end of whole blocks.
Controls: one token fewer, and one window, which is what some engines replay.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldenkv.config import ModelConfig, Numerics, flash, micro, pro, tiny, with_mtp
from goldenkv.engine import ApproximateState, Engine, Sequence
from goldenkv.engine.policies import replay_length
from goldenkv.model.weights import Model
from goldenkv.state import Rows, compare

SMALL = Numerics(tile=8, index_block=8, key_block=8)


def shaped(ratios: tuple[int, ...], window: int) -> ModelConfig:
    return replace(micro(), num_hidden_layers=len(ratios), compress_ratios=ratios, sliding_window=window)


CONFIGS = {
    "micro": micro(),
    "with MTP": with_mtp(micro()),
    "window smaller than the ratio": shaped((0, 4, 16), 5),
    "ends with CSA": shaped((8, 0, 4), 8),
    "ends with a window": shaped((4, 8, 0), 6),
    "one CSA layer, tiny window": shaped((4,), 2),
    "one HCA layer, tiny window": shaped((8,), 3),
    "five layers": shaped((0, 4, 8, 4, 8), 8),
}
NUMERICS = {
    "float32": SMALL,
    "quantised bfloat16": replace(SMALL, dtype="bfloat16", fake_quantisation=True),
}


@functools.cache
def engine(name: str, numerics: str = "float32") -> Engine:
    config = CONFIGS[name]
    sizes = dict(slots=3, max_length=256, fill=np.nan, poison=True)
    return Engine(Model(config, NUMERICS[numerics]), config, NUMERICS[numerics], **sizes)


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length)


LATER = tokens_of(20, seed=9)


def everything(e: Engine, seq: Sequence) -> Rows:
    """The state now, and state and logits after further tokens."""
    now = {f"now {name}": rows for name, rows in e.rows(seq).items()}
    logits = e.prefill(seq, LATER, [1, 1, 1, 17], all_logits=True)
    return now | e.rows(seq) | {"logits": logits}


def differing(found: Rows, expected: Rows) -> set[str]:
    return {name for name, ok in compare(found, expected).by_name.items() if not ok.all()}


def replayed(e: Engine, length: int, counts: list[int], *, seed: int = 0) -> list[set[str]]:
    """What differs from the cold run after replaying each number of tokens, in a slot that was used."""
    ids = tokens_of(length, seed)
    donor = e.open()
    e.prefill(donor, ids)
    pages = list(donor.pages)
    e.hold_pages(pages)
    expected = everything(e, donor)
    e.close(donor)
    out = []
    for count in counts:
        stranger = e.open()
        e.prefill(stranger, tokens_of(60, seed=77))
        e.close(stranger)
        seq = e.adopt(pages, length, since=length - count)
        e.replay(seq, ids[length - count :])
        out.append(differing(everything(e, seq), expected))
        e.close(seq)
    e.drop_pages(pages)
    assert (e.free_slots, e.free_pages) == (3, e.geometry.pages)
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_the_receptive_field_is_enough_and_a_token_fewer_is_not(name: str) -> None:
    """At every place within a block, whether or not it ends a page; what is more than enough is exact too."""
    e, config = engine(name), CONFIGS[name]
    size = config.alignment
    for length in [5 * 16, *range(6 * 16 - 3, 6 * 16 + size, 3)]:
        enough = replay_length(config, length)
        exact, more, fewer = replayed(e, length, [enough, enough + 5, enough - 1])
        assert not exact and not more, (length, enough)
        assert fewer, (length, enough)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**16), length=st.integers(1, 150), more=st.integers(0, 40))
def test_any_length(seed: int, length: int, more: int) -> None:
    e, config = engine("with MTP"), CONFIGS["with MTP"]
    count = min(length, replay_length(config, length) + more)
    assert replayed(e, length, [count], seed=seed) == [set()]


@pytest.mark.parametrize("name", ["micro", "with MTP"])
def test_under_other_numerics(name: str) -> None:
    e, config = engine(name, "quantised bfloat16"), CONFIGS[name]
    exact, fewer = replayed(e, 96, [(n := replay_length(config, 96)), n - 1])
    assert not exact and fewer


def test_control_one_window_is_wrong() -> None:
    """Entries are right, for they are not written; window rows, what follows and logits are not."""
    (found,) = replayed(engine("micro"), 96, [CONFIGS["micro"].sliding_window])
    assert {"now layers.1.window", "now layers.2.window", "logits"} <= found
    assert not {"now layers.1.entries", "now layers.2.entries", "now layers.1.index_keys"} & found


def test_control_a_replay_that_writes_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would write is made of rows that are not exact yet, and the pages are those of everybody."""
    e = engine("micro")
    ids = tokens_of(96)
    donor = e.open()
    e.prefill(donor, ids)
    expected = e.rows(donor)
    pages = donor.pages
    seq = e.adopt(pages, 96, since=96 - 21)
    seq.kept = 0  # the fault
    monkeypatch.setattr(e._slots, "_shared", lambda seq, length: [])
    e.prefill(seq, ids[96 - 21 :])
    assert {"layers.1.entries", "layers.2.entries"} <= differing(e.rows(donor), expected)
    e.close(seq)
    e.close(donor)


def test_lengths_of_the_published_models() -> None:
    for config, exact in ((flash(), 5461), (pro(), 7747)):
        bare = replace(config, num_nextn_predict_layers=0)
        assert replay_length(bare, 128 * 1000) == exact == config.num_hidden_layers * 127
        assert replay_length(config, 128 * 1000) == exact + 128  # the MTP layer is one token behind
    # In the middle of an HCA block its oldest row can be further back than the window.
    bare = replace(flash(), num_nextn_predict_layers=0)
    assert replay_length(bare, 128 * 1000 + 127) == 5461
    assert replay_length(shaped((0, 4, 16), 5), 111) == 2 * 4 + 15 and replay_length(tiny(), 0) == 0


def test_at_the_published_window_and_ratios() -> None:
    config = with_mtp(tiny())
    numerics = Numerics(tile=32, index_block=32, key_block=4)
    e = Engine(Model(config, numerics), config, numerics, slots=3, max_length=768, fill=np.nan)
    enough = replay_length(config, 640)
    assert enough == 3 * 127 + 128
    exact, fewer, window = replayed(e, 640, [enough, enough - 1, 128])
    assert not exact and fewer and "logits" in window


def test_approximate_state_stays_with_its_sequence() -> None:
    e = engine("micro")
    donor = e.open()
    ids = tokens_of(96)
    e.prefill(donor, ids)
    seq = e.adopt(donor.pages, 96, since=88)
    e.replay(seq, ids[88:], exact=False)
    e.decode(seq, 3)  # it can go on
    twin = e.fork(seq)
    for each in (seq, twin):
        for keep in (e.snapshot, e.save_boundary):
            with pytest.raises(ApproximateState, match="approximate and stays"):
                keep(each)
        e.close(each)
    e.close(donor)
