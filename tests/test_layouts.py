"""Row formats and pages: bytes against the published layouts, bits against fake quantisation."""

from collections.abc import Callable
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from goldenkv.ops import quant
from goldenkv.state import NotRepresentable, PageSizeError, pack, pack_page, page_layout, read_page, unpack
from goldenkv.state import packing as packings
from goldenkv.state.formats import ROW_FORMATS, RowFormat, element_type, row_format
from goldenkv.state.layouts import ARRANGEMENTS, put_rows

BF16 = ml_dtypes.bfloat16
SIZES = {
    "float32": (512, 64, 2048),
    "bfloat16": (512, 64, 1024),
    "fp8": (512, 64, 584),
    "fp8_fnuz": (512, 64, 584),
    "fp8_v32": (576, 64, 656),
    "index_fp8": (128, 0, 132),
    "index_fp4": (128, 0, 68),
}
"""Format -> published channels, rotated channels and bytes of a row."""

each_format = pytest.mark.parametrize("name", SIZES)
scaled_formats = pytest.mark.parametrize("name", [n for n in SIZES if n not in ("float32", "bfloat16")])
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def published(name: str) -> RowFormat:
    return row_format(name, *SIZES[name][:2])


def bits(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.dtype(f"u{rows.dtype.itemsize}"))


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and np.array_equal(bits(left), bits(right))


def some_rows(
    seed: int, count: int, channels: int, magnitude: float = 1.0, dtype: str = "bfloat16"
) -> np.ndarray:
    """Rows of the given magnitude whose blocks differ by up to 2^12, with zeros of both signs."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, channels)) * magnitude * 2.0 ** rng.integers(-6, 6, (count, channels))
    rows[rng.random(rows.shape) < 0.05] = 0.0
    rows[rng.random(rows.shape) < 0.05] = -0.0
    return rows.astype(element_type(dtype))


# Rows: the bytes --------------------------------------------------------------------------------------------


def value_of(code: int, dtype: str) -> float:
    """One element from the definition of its type, without ml_dtypes."""
    if dtype == "float4_e2m1fn":
        return (-1.0 if code & 8 else 1.0) * [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7]
    fnuz = dtype == "float8_e4m3fnuz"
    if code == 0x80 if fnuz else code & 0x7F == 0x7F:
        return np.nan
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = mantissa / 8 * 2.0 if exponent == 0 else (1 + mantissa / 8) * 2.0**exponent
    return (-1.0 if code & 0x80 else 1.0) * size * 2.0 ** (-8 if fnuz else -7)


@each_format
def test_bytes_of_a_row(name: str) -> None:
    assert published(name).nbytes == SIZES[name][2]
    assert set(SIZES) == set(ROW_FORMATS)


@scaled_formats
def test_every_byte_means_what_is_published(name: str) -> None:
    """Rows put together by hand: values, rotated channels and scales at the published offsets."""
    channels, rope, nbytes = SIZES[name]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (20, nbytes), dtype=np.uint8)
    stored, block, scales_at, scale, rope_at = {
        "fp8": ("float8_e4m3fn", 64, 576, "u1", 448),
        "fp8_fnuz": ("float8_e4m3fnuz", 64, 576, "u1", 448),
        "fp8_v32": ("float8_e4m3fn", 128, 512, "f4", 528),
        "index_fp8": ("float8_e4m3fn", 128, 128, "f4", None),
        "index_fp4": ("float4_e2m1fn", 32, 64, "u1", None),
    }[name]
    count = -(-(channels - rope) // block)
    codes = rng.integers(60, 200, (20, count), dtype=np.uint8)
    factors = 2.0 ** (codes.astype(float) - 127)
    kept = codes if scale == "u1" else factors.astype(np.float32)
    raw[:, scales_at : scales_at + count * kept.itemsize] = kept.view(np.uint8)
    if rope_at is not None:
        rotated = some_rows(1, 20, rope)
        raw[:, rope_at : rope_at + 2 * rope] = rotated.view(np.uint8)
    got = unpack(raw, published(name))
    for row in range(20):
        for channel in range(channels - rope):
            if stored == "float4_e2m1fn":
                code = raw[row, channel // 2] >> 4 * (channel % 2) & 15
            else:
                code = raw[row, channel]
            expected = np.float32(value_of(int(code), stored) * factors[row, channel // block])
            np.testing.assert_equal(got[row, channel], expected)
            assert np.isnan(expected) or same(got[row, channel], expected)
    if rope:
        assert same(got[:, -rope:], rotated.astype(np.float32))


@scaled_formats
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 8, 100, 127, 200, 246]), st.sampled_from([0, 1, 5]))
def test_whatever_an_engine_holds_can_be_packed_again(name: str, seed: int, code: int, count: int) -> None:
    """Any codes, NaN and -0 included, under any scale that is a power of two and stays finite."""
    form = published(name)
    rng = np.random.default_rng(seed)
    fields = packings.from_bytes(rng.integers(0, 256, (count, form.nbytes), dtype=np.uint8), form)
    shape = fields["scales"].shape
    codes = np.clip(code + rng.integers(-6, 7, shape), 0, 246).astype(np.uint8)
    codes[rng.random(shape) < 0.1] = quant.NAN_CODE
    scales = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    fields["scales"] = scales.astype(element_type(form.field("scales").dtype))
    rows = packings.decode(fields, form)
    assert same(unpack(pack(rows, form), form), rows)
    assert same(rows, unpack(packings.to_bytes(fields, form), form))


def test_a_scale_below_the_floor_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM's floor is 1e-8. Control: with the scale of the published model alone rows are lost."""
    form = published("fp8")
    fields = packings.encode(some_rows(0, 3, 512), form, quantise=True)
    fields["scales"] = np.full_like(fields["scales"], 2.0**-35)
    rows = packings.decode(fields, form)
    assert same(unpack(pack(rows, form), form), rows)
    every = packings._candidates
    monkeypatch.setattr(packings, "_candidates", lambda *args: [next(every(*args))])
    with pytest.raises(NotRepresentable):
        pack(rows, form)


# Rows: fake quantisation ------------------------------------------------------------------------------------

fake_fp8, fake_fp4 = jax.jit(quant.fake_quantise_e4m3), jax.jit(quant.fake_quantise_e2m1)


def fake_quantised(name: str, rows: np.ndarray) -> np.ndarray:
    """What the model's fake quantisation leaves behind."""
    if name == "index_fp4":
        return np.asarray(fake_fp4(rows))
    return np.concatenate(
        [np.asarray(fake_fp8(rows[:, :448])), rows[:, 448:].astype(BF16).astype(rows.dtype)], 1
    )


@each_dtype
@pytest.mark.parametrize("name", ["fp8", "index_fp4"])
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-12, 6),
    broken=st.sampled_from([0, 0, np.nan, np.inf]),
)
def test_fake_quantised_rows_come_back(
    name: str, dtype: str, seed: int, exponent: int, broken: float
) -> None:
    """They are representable, and packing with `quantise` leaves the same behind. Control: a bit flipped."""
    form = published(name)
    rows = some_rows(seed, 5, form.channels, 10.0**exponent, dtype)
    rows[1, 32:64] = 0.0
    rows[2, 3] = broken
    expected = fake_quantised(name, rows)
    assert same(unpack(pack(expected, form), form, dtype), expected)
    got = unpack(pack(rows, form, quantise=True), form, dtype)
    assert same(got, expected)

    if not expected[3, :100].any():  # a bit of a zero is a value that some scale reaches
        return
    row, channel = 3, int(np.argmax(np.abs(expected[3, :100].astype(np.float32))))
    flipped = expected.copy()
    flipped.view(bits(flipped).dtype)[row, channel] ^= 1
    with pytest.raises(
        NotRepresentable, match=f"row {row}, channel {channel} is .*no scale of its block"
    ) as error:
        pack(flipped, form)
    assert (error.value.row, error.value.channel) == (row, channel)


@each_dtype
@scaled_formats
@given(st.integers(0, 2**32 - 1), st.integers(-8, 6), st.sampled_from([0, 1, 5]))
def test_what_was_quantised_can_be_packed_again(
    name: str, dtype: str, seed: int, exponent: int, count: int
) -> None:
    """Also under the scales of V3.2, which are no powers of two, if the rows were bfloat16."""
    if (name, dtype) == ("fp8_v32", "float32"):
        return
    form = published(name)
    rows = some_rows(seed, count, form.channels, 10.0**exponent, dtype)
    once = unpack(pack(rows, form, quantise=True), form, dtype)
    assert same(unpack(pack(once, form), form, dtype), once)
    if count == 5:
        # Half a step of the grid at its largest value, 448 or 6, under a scale up to twice the smallest.
        share = 1 / 3 if name == "index_fp4" else 1 / 14
        worst = np.abs(once.astype(float) - rows.astype(float)).max()
        assert 0 < worst <= np.abs(rows.astype(float)).max() * share


@pytest.mark.parametrize("name, golden", [("fp8", "fp8_block64"), ("index_fp4", "fp4_block32")])
def test_scales_are_the_published_ones(golden_dir, name: str, golden: str) -> None:
    file = load_file(golden_dir.parent / "quantisers.safetensors")
    x = file["x"]
    form = ROW_FORMATS[name](x.shape[1], 0)
    fields = packings.encode(x, form, quantise=True)
    assert np.array_equal(fields["scales"].view(np.uint8), file[f"{golden}.scale_code"])
    assert same(packings.decode(fields, form), file[f"{golden}.dequantised"])


# Rows: what cannot be held ----------------------------------------------------------------------------------

PAYLOAD = np.uint32(0x7FC10000).view(np.float32)
NEGATIVE_NAN = np.copysign(np.float32(np.nan), np.float32(-1))


@pytest.mark.parametrize(
    "name, channel, values",  # the first that does not come back, and what differs from 0
    [
        ("fp8", 70, {70: np.inf}),
        ("fp8", 70, {70: PAYLOAD}),
        ("fp8", 3, {3: 1 + 2.0**-4}),
        ("fp8", 9, {9: 2.0**-20, 10: 1.0}),
        ("fp8", 500, {500: 1 + 2.0**-9}),
        ("index_fp4", 33, {33: np.nan}),
        ("index_fp4", 33, {33: 7.0, 34: 6.0}),
        ("fp8_fnuz", 5, {5: -0.0}),
        ("fp8_fnuz", 0, dict.fromkeys(range(64), NEGATIVE_NAN)),
        ("fp8_v32", 131, {130: 1 + 2.0**-6, 131: 1.0}),
        ("bfloat16", 7, {7: 1 + 2.0**-9}),
    ],
)
def test_what_cannot_be_held_is_named(name: str, channel: int, values: dict[int, float]) -> None:
    """In float32. Nothing is written; with `quantise` it is, and is finite unless it was not before."""
    form = published(name)
    rows = np.zeros((3, form.channels), np.float32)
    for at, value in values.items():
        rows[1, at] = value
    layout = page_layout(name, 4, *SIZES[name][:2])
    page = np.full(layout.nbytes, 7, np.uint8)
    why = (
        "it is no bfloat16" if name == "bfloat16" or channel >= 448 else "no scale of its block gives it back"
    )
    with pytest.raises(
        NotRepresentable, match=rf"row 1, channel {channel} .*{form.name!r} cannot hold: {why}"
    ):
        put_rows(page, layout, np.arange(3), rows)
    assert (page == 7).all()
    back = unpack(pack(rows, form, quantise=True), form)
    assert np.isnan(back).any() == (not np.isfinite(rows).all())
    assert same(back[0::2], rows[0::2])


@each_dtype
@pytest.mark.parametrize("name", ["fp8", "index_fp4"])
def test_blocks_of_nan_keep_their_signs(name: str, dtype: str) -> None:
    form = published(name)
    rows = np.zeros((2, form.channels), element_type(dtype))
    rows[1, :64] = np.nan
    rows[1, :64:3] = NEGATIVE_NAN.astype(element_type(dtype))
    assert same(unpack(pack(rows, form), form, dtype), rows)


@each_dtype
def test_plain_rows_keep_every_bit(dtype: str) -> None:
    """NaN payloads and subnormals included: all patterns of a bfloat16, as many random ones of a float32."""
    form = row_format(dtype, 64)
    count = np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint32)
    patterns = count if dtype == "float32" else np.arange(2**16, dtype=np.uint16)
    rows = patterns.view(element_type(dtype)).reshape(-1, 64)
    assert same(unpack(pack(rows, form), form, dtype), rows)
    wide = packings.widened(rows)
    assert same(packings.narrowed(wide, dtype), rows)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: row_format("fp9", 512), "row format 'fp9' is not one of float32, "),
        (lambda: row_format("fp8", 64, 64), r"rope=64 must lie in 0 .. 63"),
        (lambda: row_format("index_fp4", 33), "channels=33 must be even"),
        (
            lambda: pack(np.zeros((2, 500), np.float32), published("fp8")),
            r"\[rows, 512\] .* got float32 \[2, 500\]",
        ),
        (lambda: pack(np.zeros((2, 512)), published("fp8")), "expected float32 or bfloat16 .* got float64"),
        (
            lambda: unpack(np.zeros((2, 583), np.uint8), published("fp8")),
            r"uint8 \[rows, 584\] .* \[2, 583\]",
        ),
        (lambda: page_layout("fp8", 0, 512, 64), "rows=0 must be a positive multiple"),
        (lambda: page_layout("fp8", 96, 512, 64, run=64), "rows=96 must be a positive multiple of run=64"),
        (lambda: page_layout("float32", 4, 8, parts=(("a", 4), ("b", 5))), "must have 8 channels together"),
        (
            lambda: page_layout("fp8", 4, 128, parts=(("a", 64), ("b", 64))),
            "cannot hold 2 parts side by side",
        ),
        (lambda: read_page(b"", "fp8", rows=64), "layout='fp8' needs rows and channels"),
        (
            lambda: pack_page(np.zeros((5, 8), np.float32), page_layout("float32", 4, 8)),
            "5 rows .* a page of 4",
        ),
        (
            lambda: pack_page({"kv": np.zeros((1, 8))}, page_layout("float32", 4, 8)),
            "expected rows of rows, got kv",
        ),
    ],
)
def test_bad_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# Pages ------------------------------------------------------------------------------------------------------

PAGES = {
    ("fp8", 64): (37440, 576, 64 * 576, 8),
    ("fp8", 2): (1728, 576, 2 * 576, 8),
    ("fp8_v32", 64): (64 * 656, 656, None, 0),
    ("index_fp8", 64): (64 * 132, 128, 64 * 128, 4),
    ("index_fp4", 64): (64 * 68, 64, 64 * 64, 4),
    ("bfloat16", 64): (64 * 1024, 1024, None, 0),
}
"""(format, rows) -> bytes of a page, of a row's data, then the first byte of the scales and a row's share."""


@pytest.mark.parametrize("name, count", PAGES)
def test_rows_lie_where_published(name: str, count: int) -> None:
    nbytes, data, scales, width = PAGES[name, count]
    channels, rope, _ = SIZES[name]
    layout = page_layout(name, count, channels, rope)
    assert layout.nbytes == nbytes
    rows = some_rows(0, count, channels)
    rows = unpack(pack(rows, layout.form, quantise=True), layout.form, "bfloat16")
    page, packed = pack_page(rows, layout, fill=0xAB), pack(rows, layout.form)
    for i in range(count):
        assert page[i * data : (i + 1) * data] == packed[i, :data].tobytes()
        if scales is not None:
            kept = layout.form.field("scales").nbytes
            at = scales + i * width
            assert page[at : at + kept] == packed[i, data : data + kept].tobytes()
            assert set(page[at + kept : at + width]) <= {0xAB}  # the padding byte of a row
    assert set(page[count * layout.form.nbytes :]) <= {0xAB}
    read = read_page(page, name, rows=count, channels=channels, rope=rope, dtype="bfloat16")
    assert list(read) == ["rows"] and same(read["rows"], rows)


@each_format
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2, 63, 64]), st.sampled_from([0, 0x7F, 0xFF]))
def test_unused_rows_and_padding_are_never_read(name: str, seed: int, count: int, fill: int) -> None:
    channels, rope, _ = SIZES[name]
    layout = page_layout(name, 64, channels, rope)
    rows = some_rows(seed, count, channels)
    rows = unpack(pack(rows, layout.form, quantise=True), layout.form, "bfloat16")
    page = pack_page(rows, layout, fill=fill)
    assert same(read_page(page, layout, dtype="bfloat16")["rows"][:count], rows)
    live = sum(a == b for a, b in zip(page, pack_page(rows, layout, fill=fill ^ 0xFF), strict=True))
    padding = sum(field.nbytes for field in layout.form.fields if field.name == "padding")
    assert live == count * (layout.form.nbytes - padding)


def test_runs_are_pages_within_a_page() -> None:
    """TensorRT-LLM: 128 native rows are twice 64, each with its scales behind it. Control: one run of 128."""
    rows = some_rows(0, 128, 512)
    halves = [pack_page(part, page_layout("fp8", 64, 512, 64, alignment=1), quantise=True) for part in
              (rows[:64], rows[64:])]  # fmt: skip
    runs = page_layout("fp8", 128, 512, 64, run=64, alignment=1)
    page = pack_page(rows, runs, quantise=True)
    assert page == b"".join(halves) and len(page) == 128 * 584
    whole = page_layout("fp8", 128, 512, 64, alignment=1)
    assert not np.array_equal(read_page(page, whole)["rows"], read_page(page, runs)["rows"], equal_nan=True)


def test_parts_have_names() -> None:
    """A compressor row: kv, then score."""
    layout = page_layout("float32", 4, 24, parts=(("rows_kv", 16), ("rows_score", 8)))
    kv, score = some_rows(0, 4, 16, dtype="float32"), some_rows(1, 3, 8, dtype="float32")
    page = pack_page({"rows_score": score, "rows_kv": kv}, layout)
    assert page[:64] == kv[0].tobytes() and page[64:96] == score[0].tobytes()
    read = read_page(page, layout)
    assert same(read["rows_kv"], kv) and same(read["rows_score"][:3], score)
    with pytest.raises(ValueError, match="'window' is not in this page: it holds rows_kv, rows_score"):
        layout.offset("window")


@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        memoryview,
        partial(np.frombuffer, dtype=np.uint8),
        partial(np.frombuffer, dtype=np.int8),
    ],
)
def test_a_page_can_be_any_buffer(make: Callable) -> None:
    layout = page_layout("index_fp4", 64, 128)
    page = pack_page(some_rows(0, 64, 128), layout, quantise=True)
    assert same(read_page(make(page), layout)["rows"], read_page(page, layout)["rows"])


@pytest.mark.parametrize(
    "nbytes, message",
    [
        (37376, r"64 rows of format 'fp8' \(512 channels, 584 bytes a row, padded to a multiple of 576\)"),
        (37376, "has 37440 bytes, got 37376, as have 64 rows of 'fp8' without padding"),
        (65536, "got 65536, as have 32 rows of 'float32' without padding or 64 rows of 'bfloat16'"),
        (18720, "got 18720$"),
        (0, "got 0$"),
    ],
)
def test_a_wrong_length_is_named(nbytes: int, message: str) -> None:
    with pytest.raises(PageSizeError, match=message):
        read_page(bytes(nbytes), "fp8", rows=64, channels=512, rope=64)


def test_arrangements_name_formats() -> None:
    assert set(ARRANGEMENTS) < set(ROW_FORMATS)
