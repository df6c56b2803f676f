"""What rounding the state costs: against float64, and against doing nothing."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from goldenkv.config import Numerics, micro
from goldenkv.engine import Engine
from goldenkv.model.weights import Model
from goldenkv.ops import quant
from goldenkv.precision import FORMATS, measure, rounded
from goldenkv.state import Rows, Snapshot, compare

CONFIG = micro()
PLAIN = CONFIG.head_dim - CONFIG.qk_rope_head_dim
SMALL = Numerics(tile=8, index_block=8, key_block=8)
LATER = list(range(6))


@functools.cache
def engine(fake: bool = False) -> Engine:
    numerics = Numerics(tile=8, index_block=8, key_block=8, fake_quantisation=fake)
    return Engine(Model(CONFIG, numerics), CONFIG, numerics, slots=2, max_length=64)


def snapshot(e: Engine) -> Snapshot:
    seq = e.open()
    e.prefill(seq, np.random.default_rng(0).integers(0, 64, 41))
    found = e.snapshot(seq)
    e.close(seq)
    return found


def test_attention_keys_are_rounded_and_nothing_else() -> None:
    rows = snapshot(engine()).rows
    found, error = rounded(CONFIG, rows, quant.fake_quantise_e4m3)
    changed = {name for name, ok in compare(found, rows).by_name.items() if not ok.all()}
    assert changed == {n for n in rows if n.endswith((".window", ".entries"))}
    lost = np.concatenate([(found[n].astype(np.float64) - rows[n])[:, :PLAIN].ravel() for n in changed])
    held = np.concatenate([rows[n][:, :PLAIN].astype(np.float64).ravel() for n in changed])
    assert error == pytest.approx(np.sqrt((lost**2).sum() / (held**2).sum()), rel=1e-12)
    for name in changed:
        np.testing.assert_array_equal(found[name][:, PLAIN:], rows[name][:, PLAIN:])


def test_no_rounding_costs_nothing() -> None:
    """And neither does rounding what is rounded."""
    e, state = engine(), snapshot(engine())
    costs = measure(e, state, LATER, {"none": (lambda x: x, 32.0)})
    assert (
        costs["none"].row_error == 0
        and not costs["none"].logit_error.any()
        and costs["none"].same_choice == 1
    )
    once, _ = rounded(CONFIG, state.rows, quant.fake_quantise_e4m3)
    again, error = rounded(CONFIG, once, quant.fake_quantise_e4m3)
    assert error == 0 and compare(once, again).same


def test_formats_of_fewer_bits_cost_more() -> None:
    costs = measure(engine(), snapshot(engine()), LATER)
    assert list(costs) == list(FORMATS)
    e4m3, *others = costs.values()
    assert [cost.bits for cost in costs.values()] == [8.125, 5.0, 4.5, 4.25]
    for other in others:
        assert 0 < 2 * e4m3.row_error < other.row_error < 0.3
        assert 0 < e4m3.logit_error.mean() < other.logit_error.mean()


def test_an_empty_state_and_one_that_is_rounded() -> None:
    e = engine()
    seq = e.open()
    empty: Rows = e.rows(seq)
    e.close(seq)
    assert rounded(CONFIG, empty, quant.fake_quantise_e4m3)[1] == 0.0
    with pytest.raises(ValueError, match="fake_quantisation on"):
        measure(engine(fake=True), snapshot(engine(fake=True)), LATER)


def test_bits_are_those_of_the_definition() -> None:
    """Distinct values a block, and blocks: what the bits a channel stand for."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((50, 64)) * 3, jnp.float32)
    for name, levels, block in (("INT4, scale a 32", 15, 32), ("E2M1, scale a 32", 15, 32)):
        got = np.asarray(FORMATS[name][0](x)).reshape(-1, block)
        assert max(len(np.unique(row)) for row in got) <= levels
