"""Claim: a lossless delta codec returns the bits that it got, whatever they are; one with a bound never
exceeds it; and a stream that is not whole is an error with a name.

Controls: codecs with one fault each, for which the same property must fail, and every bit of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from goldenkv.delta import (
    BoundedCodec,
    Codec,
    CodecError,
    DamagedStream,
    DeltaCodec,
    FieldCodec,
    ForeignStream,
    Frames,
    Range,
    TruncatedStream,
    Zstd,
    bounded,
    lossless,
)
from goldenkv.delta import stream as stream_module
from goldenkv.delta.codec import DTYPES, element_type
from goldenkv.delta.frames import Step
from goldenkv.state.formats import row_format

pytest.importorskip("zstandard", reason="the extra 'delta' is not installed")
pytest.importorskip("constriction", reason="the extra 'delta' is not installed")

DISTANCES = (1, 2, 3, 16)
SPECIAL = {
    "float32": [0x80000000, 0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0xFF800000, 1, 0x007FFFFF],
    "bfloat16": [0x8000, 0x7F81, 0xFFC1, 0x7FFF, 0xFF80, 1, 0x007F],
    "float16": [0x8000, 0x7C01, 0xFE01, 0x7FFF, 0xFC00, 1, 0x03FF],
}
"""-0, NaN that signal and that do not, an infinity, the ends of the subnormals."""


def bits_of(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8)


def wide(rows: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return rows.astype(np.float64)


@st.composite
def rows_of(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> np.ndarray:
    """Rows of any pattern, around the edges of groups, of a few kinds of content."""
    dtype, unsigned = element_type(name := draw(st.sampled_from(dtypes))), None
    unsigned = np.dtype(f"u{dtype.itemsize}")
    n = draw(
        st.sampled_from(sorted({0, 1, *(g * k + d for g in DISTANCES for k in (1, 2) for d in (-1, 0, 1))}))
    )
    shape = n, draw(st.sampled_from([0, 1, 3, 8]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    content = draw(st.sampled_from(["any", "walk", "same", "special"]))
    if content == "walk":
        with np.errstate(all="ignore"):
            return np.abs(np.cumsum(generator.normal(size=shape), axis=0)).astype(np.float32).astype(dtype)
    if content == "same":
        return np.full(shape, draw(st.integers(0, 255)), np.uint8).astype(unsigned).view(dtype)
    if content == "special" and name in SPECIAL:
        return generator.choice(np.array(SPECIAL[name], unsigned), shape).view(dtype)
    return generator.integers(0, 256, (n, shape[1] * dtype.itemsize), np.uint8).view(dtype).reshape(shape)


frames = st.builds(Frames, st.sampled_from(DISTANCES), st.sampled_from("PB"))
entropies = st.sampled_from([Zstd(), Zstd(19), Range()])
lossless_codecs = st.builds(
    DeltaCodec, frames, st.sampled_from(["xor", "difference"]), st.booleans(), entropies
)
bounded_codecs = st.builds(
    BoundedCodec, st.sampled_from([0.0, 1e-30, 1e-3, 0.25, 7.0, 1e30]), st.booleans(), frames, entropies
)


def holds(
    codecs: st.SearchStrategy, rows: st.SearchStrategy, check: Callable[[Any, np.ndarray], None]
) -> None:
    """Plays a property. It stops at the first counterexample."""

    @settings(phases=[Phase.generate], database=None, report_multiple_bugs=False)
    @given(codecs, rows, st.data())
    def play(codec: Codec, rows: np.ndarray, data: st.DataObject) -> None:
        check(codec, rows)
        start = data.draw(st.integers(0, len(rows)))
        some = range(start, data.draw(st.integers(start, len(rows))))
        stream = codec.encode(rows)
        assert np.array_equal(bits_of(codec.decode(stream, some)), bits_of(codec.decode(stream))[some])

    play()


# Lossless ---------------------------------------------------------------------------------------------------


def same_bits(codec: Codec, rows: np.ndarray) -> None:
    back = codec.decode(codec.encode(rows))
    assert back.dtype == rows.dtype and back.shape == rows.shape
    assert np.array_equal(bits_of(back), bits_of(rows)), codec.name


def test_every_bit_comes_back() -> None:
    holds(lossless_codecs, rows_of(), same_bits)


@pytest.mark.parametrize("name", [n for n in DTYPES if n not in ("float32", "uint32")])
@pytest.mark.parametrize("ordered", [False, True], ids=["stored", "ordered"])
def test_every_code_comes_back(name: str, ordered: bool) -> None:
    """All patterns of the types of 8 and 16 bits, after each other and beside each other."""
    dtype = element_type(name)
    codes = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    for order in (codes, np.random.default_rng(0).permutation(codes)):
        for kind in "PB":
            for residual in ("xor", "difference"):
                codec = DeltaCodec(Frames(16, kind), residual, ordered, Zstd())
                same_bits(codec, order.reshape(-1, 8).view(dtype))


FORMATS = {
    "fp8": (9, 4),
    "fp8_fnuz": (70, 4),
    "fp8_v32": (130, 2),
    "index_fp8": (5, 0),
    "index_fp4": (34, 0),
    "bfloat16": (3, 0),
}


@pytest.mark.parametrize("name", FORMATS)
def test_native_rows_come_back(name: str) -> None:
    """Any bytes at all, also those that no packing makes."""
    form = row_format(name, *FORMATS[name])
    codec = FieldCodec(
        form, DeltaCodec(), {"values": DeltaCodec(Frames(3, "B"), "difference", True, Range())}
    )
    assert codec.lossless
    for n in (0, 1, 3, 4, 16, 17):
        rows = np.random.default_rng(n).integers(0, 256, (n, form.nbytes), np.uint8)
        same_bits(codec, rows)
        some = range(n // 3, n - n // 4)
        assert np.array_equal(codec.decode(codec.encode(rows), some), rows[some])


@dataclass(frozen=True)
class Broken:
    """A codec that encodes while something is replaced."""

    codec: Any
    fault: Callable[[], Any]

    @property
    def name(self) -> str:
        return f"broken {self.codec.name}"

    def encode(self, rows: np.ndarray) -> bytes:
        with self.fault():
            return self.codec.encode(rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)


@contextmanager
def replaced(place: Any, name: str, by: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        (patch.setitem if isinstance(place, dict) else patch.setattr)(place, name, by)
        yield


def of_values(rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The difference of floats, as floats."""
    if rows.dtype.itemsize != 4:
        return rows - expected
    with np.errstate(all="ignore"):
        return (rows.view(np.float32) - expected.view(np.float32)).view(np.uint32)


def of_values_undone(residual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    if residual.dtype.itemsize != 4:
        return residual + expected
    with np.errstate(all="ignore"):
        return (residual.view(np.float32) + expected.view(np.float32)).view(np.uint32)


def from_another_row(block: np.ndarray, step: Step) -> np.ndarray:
    """The row before is taken for the one that follows it, which the decoder does not have."""
    if step.before is None:
        return np.zeros_like(block[:, step.rows])
    return block[:, np.minimum(step.before + 1, block.shape[1] - 1)]


def canonical(bits: np.ndarray, dtype: np.dtype, back: bool = False) -> np.ndarray:
    """An order in which -0 is 0, as the values say."""
    found = lossless_ordered(bits, dtype, back)
    if dtype.kind == "u" or back:
        return found
    return np.where(bits == 1 << (8 * dtype.itemsize - 1), lossless_ordered(bits * 0, dtype), found)


lossless_ordered = lossless.ordered
FAULTS: dict[str, Callable[[], Any]] = {
    "P from another row": lambda: replaced(lossless, "_expected", from_another_row),
    "the order of values": lambda: replaced(lossless, "ordered", canonical),
    "a mean with overflow": lambda: replaced(lossless, "_mean", lambda one, two: (one + two) // 2),
    "the groups swapped": lambda: replaced(lossless, "cut", lambda block: reversed([*bounded.cut(block)])),
    "the last channel lost": lambda: replaced(
        lossless, "cut", lambda block: bounded.cut(without_last(block))
    ),
}


def without_last(block: np.ndarray) -> np.ndarray:
    kept = block.copy()
    kept[..., -1:] = 0
    return kept


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_faulty_codec_fails(fault: str) -> None:
    with pytest.raises(AssertionError):
        holds(lossless_codecs.map(lambda codec: Broken(codec, FAULTS[fault])), rows_of(), same_bits)


def test_control_a_difference_of_floats_fails() -> None:
    """Both ways: it rounds, and makes other NaN."""
    with replaced(lossless.RESIDUALS, "difference", (of_values, of_values_undone)):
        codec = DeltaCodec(Frames(16), "difference", False, Zstd())
        walk = np.cumsum(np.random.default_rng(0).normal(size=(40, 3)), axis=0).astype(np.float32)
        with pytest.raises(AssertionError):
            same_bits(codec, walk)
        with pytest.raises(AssertionError):
            holds(st.just(codec), rows_of(("float32",)), same_bits)


# A bound ----------------------------------------------------------------------------------------------------


def within_bound(codec: BoundedCodec, rows: np.ndarray) -> None:
    back = codec.decode(codec.encode(rows))
    assert back.dtype == rows.dtype and back.shape == rows.shape
    finite = np.isfinite(wide(rows))
    itself = np.repeat(~finite, rows.dtype.itemsize, axis=1)
    assert np.array_equal(bits_of(back)[itself], bits_of(rows)[itself]), "what is not finite must be exact"
    for before, after in zip(codec.frames.blocks(rows), codec.frames.blocks(back), strict=True):
        bound, finite = stated(codec, before)[:, None, None], np.isfinite(wide(before))
        error = np.abs(np.where(finite, wide(before), 0) - np.where(finite, wide(after), 0))
        assert (error <= bound).all(), f"{codec.name}: {(error - bound).max()} beyond the bound"


def stated(codec: BoundedCodec, block: np.ndarray) -> np.ndarray:
    """The bound of each group as the user gives it."""
    if not codec.relative:
        return np.full(len(block), codec.bound)
    values = [v[np.isfinite(v)] for v in wide(block)]
    return np.array([codec.bound * np.sqrt(np.mean(v * v)) if v.size else 0.0 for v in values])


def test_no_error_exceeds_the_bound() -> None:
    holds(bounded_codecs, rows_of(), within_bound)


class OpenLoop(BoundedCodec):
    """Predicts from what the rows were, which the decoder does not have."""

    def _expected(self, originals: np.ndarray, decoded: np.ndarray, step: Step) -> np.ndarray:
        return super()._expected(originals, originals, step)


def test_control_an_open_loop_exceeds_the_bound() -> None:
    """Its errors add up along a group, where the closed loop's do not."""
    walk = np.cumsum(np.random.default_rng(0).normal(size=(64, 4)), axis=0).astype(np.float32)
    for kind in "PB":
        within_bound(BoundedCodec(0.1, False, Frames(16, kind)), walk)
        with pytest.raises(AssertionError, match="beyond the bound"):
            within_bound(OpenLoop(0.1, False, Frames(16, kind)), walk)


def test_control_values_that_are_not_checked_exceed_the_bound() -> None:
    """The rounding to the element type takes more than the bound leaves."""
    unchecked = bounded_codecs.map(lambda codec: Broken(codec, no_check))
    with pytest.raises(AssertionError, match="beyond the bound"):
        holds(unchecked, rows_of(("bfloat16",)), within_bound)


def no_check() -> Any:
    return replaced(bounded, "_too_far", lambda new, original, bounds: ~np.isfinite(original))


# Streams ----------------------------------------------------------------------------------------------------


def streams() -> dict[str, tuple[Codec, bytes]]:
    walk = np.cumsum(np.random.default_rng(0).normal(size=(19, 3)), axis=0).astype(np.float32)
    form = row_format("fp8", 9, 4)
    packed = np.random.default_rng(0).integers(0, 256, (9, form.nbytes), np.uint8)
    codecs: dict[str, tuple[Codec, np.ndarray]] = {
        "zstd": (DeltaCodec(Frames(8)), walk),
        "range": (DeltaCodec(Frames(8), entropy=Range()), walk),
        "empty": (DeltaCodec(), walk[:0]),
        "bounded": (BoundedCodec(0.01, True, Frames(8, "B"), Range()), walk),
        "fields": (FieldCodec(form, DeltaCodec(Frames(4))), packed),
    }
    return {name: (codec, codec.encode(rows)) for name, (codec, rows) in codecs.items()}


@pytest.mark.parametrize("name", ["zstd", "range", "empty", "bounded", "fields"])
def test_what_is_not_the_whole_stream_is_refused(name: str) -> None:
    codec, stream = streams()[name]
    for size in range(len(stream)):
        with pytest.raises(TruncatedStream):
            codec.decode(stream[:size])
    for more in (b"\0", stream):
        with pytest.raises(DamagedStream):
            codec.decode(stream + more)
    for place in range(len(stream)):
        changed = bytearray(stream)
        changed[place] ^= 1 << place % 8
        with pytest.raises(CodecError) as refused:
            codec.decode(bytes(changed))
        assert refused.type is not CodecError
    for foreign in (
        b"\0" * 64,
        b"GKVE" + stream[4:],
        stream[:4] + b"\2" + stream[5:],
        b'{"__metadata__":{}}',
    ):
        with pytest.raises(ForeignStream):
            codec.decode(foreign)
    for other, (_, its) in streams().items():
        if other != name:
            with pytest.raises(ForeignStream):
                codec.decode(its)


def test_control_without_checksums_other_rows_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the checksums that find a bit: most of them make whole streams of other rows."""
    monkeypatch.setattr(stream_module, "_half", lambda data: 0)
    rows, codec = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8), DeltaCodec(Frames(8))
    stream = codec.encode(rows)
    wrong = 0
    for place in range(codec.touched(stream, range(0)).nbytes, len(stream)):
        changed = bytearray(stream)
        changed[place] ^= 1
        try:
            wrong += not np.array_equal(codec.decode(bytes(changed)), rows)
        except CodecError:
            continue
    assert wrong == rows.size
