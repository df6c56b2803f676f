"""The study of delta encoding: it finds redundancy that is there and none where there is none, and counts
nothing that does not come back.

Controls: rows of known correlation, white noise, codecs that lie.
"""

import functools
import json
from dataclasses import dataclass, replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from goldenkv.config import Numerics, micro
from goldenkv.delta import BoundedCodec, Frames
from goldenkv.delta_study.baselines import Raw, ZstdPlanes
from goldenkv.delta_study.corpus import GROWING, Series, collect, join, native_form
from goldenkv.delta_study.correlation import correlation, most_saved_bits, needed_correlation, saved_bits
from goldenkv.delta_study.effect import Continuation, Effect, compare_logits
from goldenkv.delta_study.lossy import GROUP, Anchors, Int4, Quantiser, Transform
from goldenkv.delta_study.measure import BrokenCodec, measure
from goldenkv.delta_study.methods import DELTA, LOSSLESS, PLAIN, lossy_methods
from goldenkv.delta_study.ranged import RangeCoded
from goldenkv.delta_study.rates import Rate, bits_at
from goldenkv.delta_study.streams import (
    BrokenStream,
    decode_laplace,
    decode_tables,
    encode_laplace,
    encode_tables,
    join_parts,
    split_parts,
)
from goldenkv.delta_study.study import DISTANCES, study_model, study_rows
from goldenkv.delta_study.worth import break_even_bandwidth, reload_seconds
from goldenkv.engine import Engine
from goldenkv.model.weights import Model
from goldenkv.ops import quant
from goldenkv.state import cells, compare, pack, row_format, unpack

for package in ("blosc2", "pcodec", "constriction", "zstandard"):
    pytest.importorskip(package)

CONFIG = micro()  # window 8, CSA blocks of 4, HCA blocks of 8
NUMERICS = Numerics("bfloat16", tile=8, index_block=8, key_block=8, fake_quantisation=True)
TOKENS = np.random.default_rng(0).integers(0, 64, 96).astype(np.int32)
FORMS = {
    "fp8": row_format("fp8", 80, 16),
    "index_fp4": row_format("index_fp4", 32),
    "float32": row_format("float32", 5),
    "wide": row_format("fp8", 512, 64),  # more than 255 bytes
}


@functools.cache
def engine() -> Engine:
    return Engine(Model(CONFIG, NUMERICS), CONFIG, NUMERICS, max_length=96)


@functools.cache
def rows() -> list[Series]:
    return collect(engine(), TOKENS, consecutive=32)


def walk(correlation: float, n: int = 1500, channels: int = 64, seed: int = 0) -> Series:
    """Rows whose neighbours correlate as asked, in the native FP8 format."""
    noise = np.random.default_rng(seed).standard_normal((n, channels)).astype(np.float32)
    values = noise.copy()
    for i in range(1, n):
        values[i] = correlation * values[i - 1] + np.sqrt(1 - correlation**2) * noise[i]
    form = row_format("fp8", channels, 0)
    form = replace(form, fields=tuple(f for f in form.fields if f.name in ("values", "scales")))
    native = pack(values, form, quantise=True)
    return Series("walk", 0, np.arange(n), unpack(native, form), native, form)


# Codecs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", LOSSLESS)
def test_every_bit_pattern_comes_back(codec: str, form: str) -> None:
    """Random bytes: NaN of any payload, -0, every code. And no rows, one, and around a keyframe."""
    data = np.random.default_rng(1).integers(0, 256, (19, FORMS[form].nbytes)).astype(np.uint8)
    data[3], data[4], data[5] = 0, 0xFF, data[2]
    made = LOSSLESS[codec](FORMS[form], 4)
    for n in (0, 1, 3, 4, 5, 19):
        back = made.decode(made.encode(data[:n]))
        assert back.dtype == np.uint8 and back.shape == (n, FORMS[form].nbytes)
        np.testing.assert_array_equal(back, data[:n])


@pytest.mark.parametrize("codec", LOSSLESS)
def test_real_rows_come_back(codec: str) -> None:
    """Of every component; `measure` compares."""
    for component in {s.component for s in rows()}:
        series = [s for s in rows() if s.component == component]
        found = measure(codec, series, lambda s: LOSSLESS[codec](s.form, 4))
        assert found.error == 0 and found.rows == sum(len(s.values) for s in series)
        assert found.native_nbytes == sum(s.native.size for s in series)
        if codec == "raw native":
            assert found.ratio == 1 and found.nbytes == found.native_nbytes


def test_the_range_coder_reaches_the_entropy() -> None:
    """Within 3 % and the table, for columns of different distributions; a constant one costs nothing."""
    rng = np.random.default_rng(2)
    p = np.array([0.6, 0.3, 0.08, 0.02])
    symbols = np.stack([rng.choice(4, 20_000, p=p), np.full(20_000, 2), rng.integers(0, 4, 20_000)], axis=1)
    data = encode_tables(symbols, 4)
    np.testing.assert_array_equal(decode_tables(data, 20_000, 3, 4), symbols)
    entropy = 20_000 * (-(p * np.log2(p)).sum() + 2) / 8
    assert entropy < len(data) < 1.03 * entropy + 60


def test_laplace_integers_come_back() -> None:
    rng = np.random.default_rng(3)
    for n, spread in ((0, 1), (1, 1), (50, 0), (50, 1), (50, 1000)):
        symbols = np.round(rng.laplace(size=(n, 3)) * spread).astype(np.int32)
        scales = np.array([0.0, 1.0, spread])
        np.testing.assert_array_equal(decode_laplace(encode_laplace(symbols, scales), n, scales), symbols)


def test_a_step_that_is_too_small_is_named() -> None:
    with pytest.raises(ValueError, match="the step is too small"):
        encode_laplace(np.full((2, 3), 1 << 21, np.int32), np.ones(3))


def test_parts_that_are_cut_off_are_named() -> None:
    joined = join_parts([b"abc", b"", b"d"])
    assert split_parts(joined, 3) == [b"abc", b"", b"d"]
    for broken, count in ((joined[:-1], 3), (joined[:5], 3), (joined, 2), (joined + b"x", 3)):
        with pytest.raises(BrokenStream):
            split_parts(broken, count)
    with pytest.raises(BrokenStream, match="no rows of"):
        Raw(FORMS["fp8"]).decode(b"abc")
    with pytest.raises(BrokenStream, match="zstd"):
        ZstdPlanes(FORMS["fp8"]).decode(b"abcdefgh")


@pytest.mark.parametrize("n", [0, 1, 2, GROUP - 1, GROUP, GROUP + 1, 25])
def test_lossy_codecs_come_back_in_their_shape(n: int) -> None:
    data = np.random.default_rng(4).standard_normal((n, 7)).astype(np.float32)
    fitted = Transform.fit(np.random.default_rng(5).standard_normal((40, 7)).astype(np.float32), 0.25)
    for codec in (Int4(7), Int4(7, block=4), Quantiser(0.25), Anchors(0.25), fitted):
        back = codec.decode(codec.encode(data))
        assert back.dtype == np.float32 and back.shape == (n, 7), codec.name
        if n > 1:
            assert np.abs(back - data).max() < 1, codec.name
    same = np.full((n, 7), 100.3, np.float32)  # rows that are all the same, and nothing else to learn from
    if n:
        for codec in (Int4(7), Quantiser(0.125), Anchors(0.125), Transform.fit(same[:1], 0.125)):
            np.testing.assert_allclose(codec.decode(codec.encode(same)), same, rtol=0.01)


def test_int4_is_that_of_the_operation() -> None:
    data = np.random.default_rng(6).standard_normal((9, 80)).astype(np.float32)
    data[2] = 0
    codec = Int4(80)
    expected = np.asarray(quant.fake_quantise_int4(jnp.asarray(data), 32))
    np.testing.assert_allclose(
        codec.decode(codec.encode(data)), expected, rtol=3e-7
    )  # of the scale's last bit
    assert len(codec.encode(data)) == 9 * (40 + 3 * 4) + 8  # nibbles, scales, two lengths


def test_errors_are_those_of_their_steps() -> None:
    """A step of s standard deviations leaves s / sqrt(12) of them; a closed anchor does not add its own."""
    data = 3 * np.random.default_rng(7).standard_normal((1000, 32)).astype(np.float32)
    fitted = Transform.fit(data[:500], 0.5)
    for codec, scale in ((Quantiser(0.5), 1), (fitted, 1), (Anchors(0.5), np.sqrt(2))):
        back = codec.decode(codec.encode(data[500:]))
        error = np.sqrt(np.mean((back - data[500:]) ** 2)) / 3
        assert error == pytest.approx(0.5 * scale / np.sqrt(12), rel=0.1), codec.name
    assert [Anchors(1, d).effective_step for d in (0, 0.3, 0.5, 0.9, 1)] == [0.5, 0.5, 1, 1.5, 1.5]


# Correlation and known gains --------------------------------------------------------------------------------


def test_known_correlations_give_their_gains() -> None:
    """Differences cost below one half and save above it, the more the higher, never more than the formula.

    Less than it says, as differences of FP8 codes are not those of values.
    """
    gains = []
    for known in (0.0, 0.5, 0.9, 0.99, 0.999):
        s = walk(known)
        found = correlation(s.wide, s.numbers)
        assert found == pytest.approx(known, abs=0.03)
        plain = measure("", [s], lambda s: RangeCoded(s.form)).bits_a_channel
        framed = measure("", [s], lambda s: RangeCoded(s.form, Frames(1500, "P"))).bits_a_channel
        assert plain - framed < saved_bits(found) + 0.1 <= most_saved_bits(found) + 0.1
        gains.append(plain - framed)
    assert gains == sorted(gains) and gains[1] < 0 < gains[2] and gains[4] > 2


def test_lag_and_gaps() -> None:
    """Pairs are counted by number: a gap between two documents is none."""
    rng = np.random.default_rng(8)
    values = np.repeat(rng.standard_normal((50, 4)), 2, axis=0)  # each row twice
    numbers = np.arange(100)
    assert correlation(values, numbers, 1) == pytest.approx(0.5, abs=0.15)
    assert abs(correlation(values, numbers, 2)) < 0.25
    apart = numbers // 2 * 10 + numbers % 2  # only the twins are neighbours
    assert correlation(values, apart, 1) == pytest.approx(1)
    assert np.isnan(correlation(values, apart, 5)) and np.isnan(correlation(values[:1], numbers[:1]))
    assert np.isnan(correlation(np.ones((5, 2)), np.arange(5)))


def test_what_five_times_needs() -> None:
    assert needed_correlation(5, 8) == pytest.approx(1 - 2**-12.8 / 2)
    assert needed_correlation(1, 8) == 0.5 and saved_bits(0.5) == 0
    assert saved_bits(needed_correlation(5, 8)) == pytest.approx(8 - 8 / 5)
    assert most_saved_bits(0) == 0 and most_saved_bits(-0.6) == pytest.approx(-np.log2(0.8))


def test_worth() -> None:
    assert reload_seconds(1e9, 1e9) == 1 and reload_seconds(1e9, 1e9, 2, 4e9) == 0.75
    edge = break_even_bandwidth(1.25, 100e6)
    assert edge == pytest.approx(20e6)
    for factor, pays in ((0.99, True), (1.01, False)):
        raw, coded = reload_seconds(1e9, factor * edge), reload_seconds(1e9, factor * edge, 1.25, 100e6)
        assert (coded < raw) == pays
    assert break_even_bandwidth(0.9, 1e9) == 0


# Verdicts ---------------------------------------------------------------------------------------------------


def test_white_noise_is_not_shrunk_and_the_finding_says_no() -> None:
    study = study_rows([walk(0.0)], ["walk"], {}, distance=8, sweep=["walk"])
    assert study.ratio(study.best_delta) < study.ratio(study.best_plain) < 1.4
    assert "does not reach" in study.finding() and "no more than entropy coding" in study.finding()
    ratios = study.sweep["walk"]["P"]
    assert len(ratios) == len(DISTANCES) and max(ratios[1:]) < ratios[0]


def test_control_a_slow_walk_is_shrunk_and_the_finding_says_yes() -> None:
    """Rows that repeat for long: the study is not blind to what it looks for."""
    s = walk(0.0, n=400)
    slow = Series(
        "slow", 0, s.numbers, *(np.repeat(a[:10], 40, axis=0) for a in (s.values, s.native)), s.form
    )
    study = study_rows([slow], ["slow"], {}, distance=40)
    assert study.ratio("range coder, P") > 5 > 1.4 * study.ratio("range coder")
    assert "reaches" in study.finding() and "does not" not in study.finding()


@dataclass(frozen=True)
class Liar:
    """Calls itself lossless and changes what `damage` changes."""

    damage: str
    name: str = "liar"
    lossless: bool = True

    def encode(self, rows: np.ndarray) -> bytes:
        return Raw(FORMS["float32"]).encode(rows)

    def decode(self, stream: bytes) -> np.ndarray:
        rows = np.array(Raw(FORMS["float32"]).decode(stream))
        match self.damage:
            case "a bit":
                rows[2, 7] ^= 1
            case "a row":
                rows = rows[:-1]
            case "the type":
                rows = rows.astype(np.int64)
            case "NaN":
                return np.where(np.arange(5) == 1, np.nan, rows.view(np.float32))
        return rows


@pytest.mark.parametrize("damage", ["a bit", "a row", "the type"])
def test_control_a_codec_that_lies_is_not_reported(damage: str) -> None:
    values = np.random.default_rng(9).standard_normal((6, 5)).astype(np.float32)
    s = Series("x", 0, np.arange(6), values, pack(values, FORMS["float32"]), FORMS["float32"])
    assert measure("", [s], lambda s: Liar("nothing")).ratio == 1
    with pytest.raises(BrokenCodec, match="liar on x"):
        measure("", [s], lambda s: Liar(damage))
    with pytest.raises(BrokenCodec, match="not finite"):
        measure("", [s], lambda s: Liar("NaN", lossless=False))


def test_control_a_bound_that_is_exceeded_is_not_reported() -> None:
    class Loose(BoundedCodec):
        def decode(self, stream, rows=None):  # type: ignore[no-untyped-def]
            return np.asarray(super().decode(stream, rows)) * np.float32(1.01)

    s = walk(0.0, n=20)
    assert measure("", [s], lambda s: BoundedCodec(0.01, True, Frames(4))).error < 0.01
    with pytest.raises(BrokenCodec, match="exceeds its bound"):
        measure("", [s], lambda s: Loose(0.01, True, Frames(4)))


# A model ----------------------------------------------------------------------------------------------------


def test_rows_are_those_of_a_run() -> None:
    """Window rows, entries, 7 of 8 HCA rows, CSA rows block by block; the last are those of the snapshot."""
    seq = engine().open()
    engine().prefill(seq, TOKENS)
    snapshot = engine().rows(seq)
    engine().close(seq)
    by_name = {}
    for s in rows():
        by_name.setdefault((s.component, s.layer), []).append(s)
    assert {c for c, _ in by_name} == {
        "window", "CSA entries", "HCA entries", "index keys", "CSA rows", "index rows", "HCA rows"
    }  # fmt: skip
    for layer in CONFIG.layers:
        (window,) = by_name["window", layer]
        np.testing.assert_array_equal(window.numbers, np.arange(96))
        assert compare({"": window.values[-7:]}, {"": snapshot[f"layers.{layer}.window"]}).same
    (entries,) = by_name["CSA entries", 1]
    assert compare({"": entries.values}, {"": snapshot["layers.1.entries"]}).same
    assert [n for n in range(96) if n % 8 < 7] == by_name["HCA rows", 2][0].numbers.tolist()
    assert by_name["CSA rows", 1][0].numbers[-32:].tolist() == list(range(64, 96))
    assert len(by_name["CSA rows", 1]) == 2  # kv and score
    for s in rows():
        assert compare({"": unpack(s.native, s.form, s.values.dtype.name)}, {"": s.values}).same, s.component


def test_unrotated_rows_are_those_before_the_rotation() -> None:
    """Layer 0 makes its row from the token alone: equal tokens, equal rows once they are unrotated."""
    window = next(s for s in rows() if s.component == "window" and s.layer == 0)
    (first, second) = np.flatnonzero(TOKENS[5] == TOKENS)[:2]
    assert np.abs(window.wide[first] - window.wide[second]).max() > 0.05
    np.testing.assert_allclose(window.unrotated[first], window.unrotated[second], atol=0.05)


def test_runs_are_joined_by_component_and_layer() -> None:
    twice = join([rows(), rows()])
    assert [(s.component, s.layer) for s in twice] == [(s.component, s.layer) for s in rows()]
    for one, two in zip(rows(), twice, strict=True):
        np.testing.assert_array_equal(two.native, np.concatenate([one.native] * 2))
        assert (two.unrotated is None) == (one.unrotated is None)


def test_an_engine_whose_rows_no_format_holds_is_refused() -> None:
    plain = Numerics(tile=8, index_block=8, key_block=8)
    with pytest.raises(ValueError, match="must store native rows"):
        collect(Engine(Model(CONFIG, plain), CONFIG, plain, max_length=16), TOKENS[:9])


def test_native_rows_have_no_padding() -> None:
    names = {native_form(CONFIG, cell).name for cell in cells(CONFIG)}
    assert names == {"fp8", "index_fp4", "float32"}
    assert not any(f.name == "padding" for cell in cells(CONFIG) for f in native_form(CONFIG, cell).fields)


def continuation() -> Continuation:
    return Continuation(engine(), TOKENS, 61)


class Exact:
    """float32 as they are."""

    name, lossless = "exact", True

    def encode(self, rows: np.ndarray) -> bytes:
        return rows.tobytes()

    def decode(self, stream: bytes) -> np.ndarray:
        return np.frombuffer(stream, np.float32).reshape(-1, CONFIG.head_dim)


def test_the_effect_of_nothing_is_nothing_and_more_error_is_more_effect() -> None:
    c = continuation()
    nothing = c.effect(lambda cell: Exact())
    assert (nothing.kl, nothing.same_choice, nothing.loss) == (0, 1, 0)
    fine, coarse = (c.effect(lambda cell, step=step: Quantiser(step)) for step in (0.05, 2.0))
    assert 0 < fine.kl < coarse.kl / 10


def test_only_attention_keys_are_decoded() -> None:
    c = continuation()
    found = c.decoded(lambda cell: Quantiser(1.0))
    changed = {n for n, ok in compare(found, c.snapshot.rows).by_name.items() if not ok.all()}
    assert changed == {n for n in found if n.endswith((".window", ".entries"))}
    with pytest.raises(ValueError, match="at least two"):
        Continuation(engine(), TOKENS, 95)


def test_logits_are_compared_as_defined() -> None:
    exact = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    found = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])) + 7  # a constant is no difference
    effect = compare_logits(exact, found, np.array([0, 1]))
    assert effect.kl == pytest.approx((0.5 * np.log(2) + 0.25 * np.log(0.5)) / 2)
    assert effect.same_choice == 0.5 and effect.loss == pytest.approx(np.log(2) / 2)


def test_a_whole_study_can_be_written() -> None:
    texts, sizes = [TOKENS, TOKENS[:80], TOKENS], dict(distance=4, steps=[0.5], following=8)
    study = study_model(engine(), texts, {"tokens": 80}, **sizes)
    found = json.loads(json.dumps(study.to_json(), allow_nan=False))
    assert {r["codec"] for r in found["lossless"]} == set(PLAIN) | set(DELTA)
    assert found["growing"] == list(GROWING) and set(found["sweep"]) == {
        "CSA entries",
        "index keys",
        "window",
    }
    assert [r["name"] for r in found["lossy"]] == [m.name for m in lossy_methods([0.5], 4)]
    assert all(np.isfinite(r["effect"]["kl"]) and r["bits"] > 0 for r in found["lossy"])
    transform = next(r for r in found["lossy"] if r["family"] == "transform")
    assert transform["shared_nbytes"] == 5 * 2 * (16 * 16 + 16 + 16)  # windows of three layers, two entries
    with pytest.raises(ValueError, match="at least three"):
        study_model(engine(), [TOKENS, TOKENS], {})


def test_bfloat16_holds_every_native_value() -> None:
    """A row that comes back as float32 goes into the pool without another rounding."""
    for s in rows():
        if s.values.dtype == ml_dtypes.bfloat16:
            assert compare({"": s.wide.astype(ml_dtypes.bfloat16)}, {"": s.values}).same


def test_bits_at_an_effect() -> None:
    def made(family: str, bits: float, kl: float) -> Rate:
        return Rate(family, family, 1, bits, 1, 0, 0, Effect(kl, 1, 0))

    rates = [made("a", 4, 0.01), made("a", 2, 1.0), made("a", 3, 0.005), made("b", 5, 0.1)]
    assert bits_at(rates, "a", 0.1) == pytest.approx(2.5)  # where less bits cost less, that is noise
    assert bits_at(rates, "b", 0.1) == 5
    assert np.isnan(bits_at(rates, "a", 2)) and np.isnan(bits_at(rates, "c", 0.1))
