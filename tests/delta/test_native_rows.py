"""Codecs of rows: what differs between them, and what their parameters do."""

import ml_dtypes
import numpy as np
import pytest

from goldenkv.delta import (
    BoundedCodec,
    Codec,
    DamagedStream,
    DeltaCodec,
    FieldCodec,
    Frames,
    Range,
    UnsupportedRows,
    Zstd,
    fields,
    lossless,
)
from goldenkv.state.formats import row_format

pytest.importorskip("zstandard", reason="the extra 'delta' is not installed")
pytest.importorskip("constriction", reason="the extra 'delta' is not installed")


def walk(n: int = 256, channels: int = 16, dtype: type = np.float32) -> np.ndarray:
    """Neighbours are alike."""
    steps = np.random.default_rng(0).normal(size=(n, channels)) * 0.05
    return (np.cumsum(steps, axis=0) + 3).astype(np.float32).astype(dtype)


def noise(n: int = 256, channels: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, channels), np.uint8)


# Lossless ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [Zstd(), Range()], ids=lambda e: e.name)
@pytest.mark.parametrize("residual", ["xor", "difference"])
def test_frames_shorten_rows_that_are_alike(entropy: Zstd | Range, residual: str) -> None:
    rows = walk(dtype=ml_dtypes.bfloat16)
    sizes = [
        len(DeltaCodec(Frames(g, kind), residual, True, entropy).encode(rows))
        for g, kind in ((1, "P"), (64, "P"), (64, "B"))
    ]
    assert sizes[1] < 0.7 * sizes[0] and sizes[2] < 0.7 * sizes[0]


def test_noise_grows_by_no_more_than_header_and_index() -> None:
    for distance in (1, 16, 256):
        stream = DeltaCodec(Frames(distance)).encode(noise())
        assert len(stream) <= 4096 + 38 + 256 // distance * (8 + 2)


@pytest.mark.parametrize(
    "name", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
)
def test_the_order_is_that_of_the_values(name: str) -> None:
    """And one to one on all patterns."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    width = 8 * dtype.itemsize
    if width == 32:
        bits = np.random.default_rng(0).integers(0, 2**32, 5000, np.uint32)
    else:
        bits = np.arange(1 << width, dtype=f"u{dtype.itemsize}")
    found = lossless.ordered(bits, dtype)
    assert np.array_equal(lossless.ordered(found, dtype, back=True), bits)
    if name == "float4_e2m1fn":
        bits, found = bits[:16], found[:16]
    with np.errstate(invalid="ignore"):
        values = bits.view(dtype).astype(np.float64)
    real = ~np.isnan(values)
    by_value = values[real][np.argsort(found[real], kind="stable")]
    assert (np.diff(by_value[np.isfinite(by_value)]) >= 0).all()


def test_integers_and_scales_are_in_order_as_they_are() -> None:
    bits = np.arange(256, dtype=np.uint8)
    for dtype in (np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e8m0fnu)):
        assert np.array_equal(lossless.ordered(bits, dtype), bits)


def test_the_mean_does_not_overflow() -> None:
    codes = np.arange(256, dtype=np.uint8)
    one, two = codes[:, None], codes[None]
    assert np.array_equal(lossless._mean(one, two), (one.astype(int) + two) // 2)


def test_names_tell_codecs_apart() -> None:
    form = row_format("fp8", 20, 4)
    codecs: list[Codec] = [
        *(DeltaCodec(f, r, o, e) for f in (Frames(8), Frames(8, "B"), Frames(1))
          for r in ("xor", "difference") for o in (False, True) for e in (Zstd(), Zstd(9), Range())),
        *(BoundedCodec(b, r) for b in (0.1, 0.1000001, 1.0) for r in (False, True)),
        FieldCodec(form, DeltaCodec()), FieldCodec(form, DeltaCodec(), {"rope": DeltaCodec(Frames(1))}),
    ]  # fmt: skip
    names = [codec.name for codec in codecs]
    assert len(set(names)) == len(names) and all(name.isprintable() for name in names)
    assert "delta xor P G=8 zstd3" in names and "bounded 0.1 rms P G=16 zstd3" in names
    assert all(isinstance(codec, Codec) for codec in codecs)
    with pytest.raises(ValueError, match="residual='sum' is not one of xor, difference"):
        DeltaCodec(residual="sum")


# A bound ----------------------------------------------------------------------------------------------------


def test_a_looser_bound_takes_less() -> None:
    sizes = [len(BoundedCodec(bound, True, entropy=Range()).encode(walk())) for bound in (1e-5, 1e-3, 0.1)]
    assert sizes[0] > 1.3 * sizes[1] > 1.3**2 * sizes[2]
    exact = len(DeltaCodec(ordered=True, residual="difference", entropy=Range()).encode(walk()))
    assert sizes[1] < exact


def test_without_a_bound_all_is_exact() -> None:
    rows = walk()
    assert np.array_equal(BoundedCodec(0.0).decode(BoundedCodec(0.0).encode(rows)), rows)


def test_a_relative_bound_goes_by_the_group() -> None:
    """Rows of another size have another bound; what is not finite does not count."""
    rows = np.concatenate([walk(16) * 1e-6, walk(16) * 1e6]).astype(np.float32)
    rows[3, 2], rows[20, 1] = np.nan, np.inf
    codec = BoundedCodec(0.01, True, Frames(16))
    groups = [g[np.isfinite(g)].astype(np.float64) for g in (rows[:16], rows[16:])]
    bounds = codec.bounds(next(codec.frames.blocks(rows)))
    stated = np.array([0.01 * np.sqrt(np.mean(g * g)) for g in groups])
    assert (bounds <= stated * (1 + 1e-12)).all() and (bounds > stated * (1 - 2e-7)).all()
    back = codec.decode(codec.encode(rows))
    for at, bound in ((slice(0, 16), bounds[0]), (slice(16, 32), bounds[1])):
        finite = np.isfinite(rows[at])
        error = np.abs(back[at][finite].astype(np.float64) - rows[at][finite])
        assert 0 < error.max() <= bound


@pytest.mark.parametrize("bound", [0.1, 1 / 3, 1e-40, 1e-60, 3e38, 1e300])
def test_a_bound_is_rounded_down(bound: float) -> None:
    used = BoundedCodec(bound).bounds(np.zeros((2, 1, 1), np.float32))
    assert (used <= bound).all() and (used == used.astype(np.float32)).all()
    if 1e-30 < bound < 1e38:
        assert (used > bound * (1 - 2e-7)).all()


def test_integers_stay_in_their_range() -> None:
    for dtype in (np.uint8, np.uint16, np.uint32):
        top = np.iinfo(dtype).max
        rows = np.array([[0, top], [top, 0], [top, top], [0, 0], [top - 1, 1]], dtype)
        back = BoundedCodec(3.0).decode(BoundedCodec(3.0).encode(rows))
        assert (np.abs(back.astype(np.int64) - rows.astype(np.int64)) <= 3).all()


@pytest.mark.parametrize("bound", [-1.0, float("inf"), float("nan")])
def test_a_bound_that_is_none(bound: float) -> None:
    with pytest.raises(ValueError, match="must be finite, 0 or more"):
        BoundedCodec(bound)


# Fields -----------------------------------------------------------------------------------------------------


def test_fields_have_codecs_of_their_own() -> None:
    form = row_format("fp8", 20, 4)
    exact = FieldCodec(form, DeltaCodec())
    lossy = FieldCodec(form, DeltaCodec(), {"rope": BoundedCodec(0.05)})
    assert exact.lossless and not lossy.lossless
    rows = noise(40, form.nbytes)
    rows[:, 16:24] = walk(40, 4, ml_dtypes.bfloat16).view(np.uint8)
    back = lossy.decode(lossy.encode(rows))
    other = np.r_[0:16, 24 : form.nbytes]
    assert np.array_equal(back[:, other], rows[:, other])
    rope = [np.ascontiguousarray(r[:, 16:24]).view(ml_dtypes.bfloat16).astype(float) for r in (rows, back)]
    assert 0 < np.abs(rope[0] - rope[1]).max() <= 0.05


def test_fields_without_bytes_are_passed_over() -> None:
    form = row_format("fp8", 64 * 8, 0)
    assert [f.count for f in form.fields] == [512, 0, 8, 0]
    codec, rows = FieldCodec(form, DeltaCodec()), noise(20, form.nbytes)
    stream = codec.encode(rows)
    assert np.array_equal(codec.decode(stream), rows) and codec.touched(stream).groups == 2 * 2


def test_what_fields_cannot_be() -> None:
    form = row_format("fp8", 20, 4)
    with pytest.raises(ValueError, match="the format 'fp8' has no field other"):
        FieldCodec(form, DeltaCodec(), {"other": DeltaCodec()})
    for bad in (noise(3, form.nbytes + 1), noise(3, form.nbytes).astype(np.uint16), noise(3)[0]):
        with pytest.raises(UnsupportedRows, match=rf"expected uint8 \[rows, {form.nbytes}\]"):
            FieldCodec(form, DeltaCodec()).encode(bad)


def test_streams_that_do_not_fit_the_fields() -> None:
    """Whole streams, put together to what no rows make."""
    form = row_format("index_fp8", 8)
    codec = FieldCodec(form, DeltaCodec())
    rows = noise(20, form.nbytes)
    inside = {
        "values": DeltaCodec().encode(np.ascontiguousarray(rows[:, :8]).view(ml_dtypes.float8_e4m3fn)),
        "scales": DeltaCodec().encode(np.ascontiguousarray(rows[:, 8:]).view(np.float32)),
    }
    other_rows = DeltaCodec().encode(np.zeros((3, 1), np.float32))
    other_type = DeltaCodec().encode(np.zeros((20, 1), np.uint32))
    wider = DeltaCodec().encode(np.zeros((20, 2), np.float32))

    def made(count: int, *streams: bytes) -> bytes:
        header = fields._FIXED.pack(b"GKVF", 1, len(streams), fields.tag(codec.name), count)
        header += b"".join(len(s).to_bytes(4, "little") for s in streams)
        return header + fields.xxhash.xxh3_64_intdigest(header).to_bytes(8, "little") + b"".join(streams)

    assert made(20, *inside.values()) == codec.encode(rows)
    for bad in (
        made(20, inside["values"], other_rows), made(20, inside["values"], other_type),
        made(20, inside["values"], wider), made(21, *inside.values()), made(2**63, *inside.values()),
        made(20, inside["values"]), made(20, *inside.values(), other_rows),
    ):  # fmt: skip
        with pytest.raises(DamagedStream):
            codec.decode(bad)
