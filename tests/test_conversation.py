"""Conversations under reload policies: what is foreseen is counted, and bits are those of cold runs.

Controls: a policy that claims to be exact and is not is found out; no two policies are foreseen alike.
"""

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldenkv.config import Numerics, flash, micro
from goldenkv.conversation import boundary_bytes, converse, foresee
from goldenkv.engine import EndPoints, Engine, Full, OneWindow, Periodic, PrefixCache, ReloadPolicy, Zero
from goldenkv.engine.policies import Plan
from goldenkv.model.weights import Model
from goldenkv.prefix import Namespace, Tenant, TensorParallel

CONFIG = micro()
NUMERICS = Numerics(tile=8, index_block=8, key_block=8)
PAGE = 16
SIZES = dict(slots=2, max_length=288, page_size=PAGE, pages=40, boundaries=40)
POLICIES = [Full(), Periodic(32), Periodic(48), EndPoints(), Zero(), OneWindow()]


@functools.cache
def model() -> Model:
    return Model(CONFIG, NUMERICS)


@functools.cache
def cold() -> Engine:
    return Engine(model(), CONFIG, NUMERICS, **SIZES)


def talk(policy, lengths, reply):
    """A conversation in a new cache."""
    cache = PrefixCache(Engine(model(), CONFIG, NUMERICS, **SIZES), policy)
    shard = TensorParallel(size=1, rank=0, split="none")
    namespace = Namespace(
        domain=Tenant("t", None), model=cache.engine.fingerprint, tokenizer=None, chat_template=None,
        layout="rows", page_size=PAGE, dtype="float32", tensor_parallel=shard, adapter=None, media=(),
        salt=None,
    )  # fmt: skip
    rng = np.random.default_rng(sum(lengths))
    said = [rng.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in lengths]
    found = converse(cache, namespace, said, reply, cold())
    cache.tree.check()
    assert cache.engine.free_slots == SIZES["slots"]
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@settings(max_examples=8)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 7, 15, 16, 17, 31, 33, 48, 60]), min_size=1, max_size=4),
    reply=st.sampled_from([0, 1, 5, 16]),
)
def test_what_is_foreseen_is_what_is_counted(policy, lengths, reply):
    """With prompts and answers that end in, at and behind pages. And exact is what says so."""
    found = talk(policy, lengths, reply)
    assert [m.turn for m in found] == foresee(CONFIG, policy, PAGE, [(n, reply) for n in lengths])
    for m in found:
        assert m.turn.reused + m.turn.replayed + m.turn.computed == m.turn.prompt
        assert m.equal or not m.turn.exact
        assert m.logit_error == 0 or not m.equal


def test_one_window_is_found_to_be_wrong():
    found = talk(OneWindow(), [60, 40], 5)
    assert [m.turn.exact for m in found] == [m.equal for m in found] == [True, False]
    assert found[1].logit_error > 0 and found[1].turn.kept == ()


@dataclass(frozen=True, slots=True)
class TooShort(ReloadPolicy):
    """Claims that a window is enough."""

    def plan(self, config, length, boundaries):
        return Plan(length, None, length - 8) if length > 8 else None


def test_control_a_policy_that_claims_too_much():
    found = talk(TooShort(), [60, 40], 5)
    assert [m.turn.exact for m in found] == [True, True] and [m.equal for m in found] == [True, False]


def test_control_foreseen_is_not_always_the_same():
    """The comparison above tells policies apart."""
    turns = [(60, 5), (40, 5), (33, 5)]
    foreseen = [foresee(CONFIG, policy, PAGE, turns) for policy in POLICIES]
    assert all(a != b for i, a in enumerate(foreseen) for b in foreseen[:i])


def test_a_policy_that_does_not_fit_the_pages_is_refused():
    with pytest.raises(ValueError, match="multiple of page_size=16"):
        foresee(CONFIG, Periodic(24), PAGE, [(1, 1)])


def test_flash_by_hand():
    config = replace(flash(), num_nextn_predict_layers=0)
    first, second, third = foresee(config, Zero(), 256, [(3000, 100), (4000, 100), (5000, 0)])
    assert (first.reused, first.replayed, first.computed) == (0, 0, 3000)
    assert (second.reused, second.replayed, second.computed) == (0, 0, 7100)  # 3,072 tokens are too few
    assert (third.reused, third.replayed, third.computed) == (7168 - 5461, 5461, 12200 - 7168)
    first, second = foresee(config, EndPoints(), 256, [(3000, 100), (4000, 100)])
    assert first.kept == (3000, 3100) and (second.reused, second.replayed) == (3100, 0)


def test_bytes_of_a_boundary_state():
    """Three windows of 7 rows; and of the CSA layer the overlap, 4 rows of kv and score, main and index."""
    assert boundary_bytes(CONFIG, NUMERICS, 32) == 4 * (3 * 7 * 16 + 2 * 4 * (16 + 16))
    # One token more: a raw row in each compressor; those of CSA are twice as wide.
    assert boundary_bytes(CONFIG, NUMERICS, 33) - boundary_bytes(CONFIG, NUMERICS, 32) == 4 * 2 * (
        16 + 2 * 32
    )
