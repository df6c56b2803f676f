"""The revision of our own arithmetic is raised whenever a bit of a result changes.

State of one revision is a miss under another. A change of operations that forgets to raise the number would
let old state pass for new; then this test fails.
"""

import hashlib
import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from goldenkv.config import Numerics, micro, with_mtp
from goldenkv.config.numerics import ARITHMETIC
from goldenkv.engine import Engine
from goldenkv.model.weights import Model
from goldenkv.ops import attend

PLAIN = Numerics(tile=8, index_block=8, key_block=8)
EACH = {
    "float32": PLAIN,
    "bfloat16": replace(PLAIN, dtype="bfloat16"),
    "quantised": replace(PLAIN, fake_quantisation=True),
}
MACHINE = {"jaxlib": "0.10.2", "platform": "cpu", "device_kind": "cpu", "isa": "x86_64+avx2", "xla_flags": ""}
"""Under which the digests below were taken; no other part of the identity differs between machines."""

REVISION = 1
DIGESTS = {
    "float32": "83056347a89bb3be",
    "bfloat16": "786c6d1914d4248f",
    "quantised": "f60278ec8de26944",
}


def digest(numerics: Numerics) -> str:
    """Over every component and logit of a run with whole tiles, single steps and drafts."""
    config = with_mtp(micro())
    engine = Engine(Model(config, numerics), config, numerics, max_length=128)
    seq = engine.open()
    tokens = np.random.default_rng(0).integers(0, 64, 85)
    logits = engine.prefill(seq, tokens, [80, 1, 1, 1, 2], all_logits=True)
    found = hashlib.blake2b(np.asarray(engine.draft(seq, 5, 4)).tobytes(), digest_size=8)
    for name, rows in sorted({**engine.rows(seq), "logits": logits}.items()):
        found.update(json.dumps([name, rows.dtype.name, rows.shape]).encode())
        found.update(np.ascontiguousarray(rows).view(np.uint8).data)
    return found.hexdigest()


def on_that_machine() -> bool:
    return MACHINE.items() <= Numerics().identity().items()


@pytest.mark.parametrize("name", EACH)
def test_bits_change_with_the_revision_alone(name: str) -> None:
    if not on_that_machine():
        pytest.skip(f"digests were taken under {MACHINE}")
    assert ARITHMETIC == REVISION, "take the digests anew for the new revision"
    assert digest(EACH[name]) == DIGESTS[name], "bits changed: raise ARITHMETIC and take the digests anew"


def test_control_another_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same mathematics in another order is found."""
    before = digest(PLAIN)
    real = attend.contract

    def turned(equation: str, *operands: jax.Array) -> jax.Array:
        if equation != "thn,nd->thd":
            return real(equation, *operands)
        weight, keys = operands
        return real(equation, weight[:, :, ::-1], keys[::-1])

    monkeypatch.setattr(attend, "contract", turned)
    jax.clear_caches()
    after = digest(PLAIN)
    monkeypatch.undo()
    jax.clear_caches()
    assert before != after and digest(PLAIN) == before
