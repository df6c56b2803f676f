"""Rows to bytes and back, driven by the fields of a row format.

A row is *representable* in a format if packing it and unpacking it returns the same bits; `pack` accepts no
other, unless asked to quantise. What fake quantisation leaves behind is representable in `fp8` and
`index_fp4`, -0 and blocks of NaN included. Not representable are:

* values off the grid of their block's scale, or beyond what a scale can reach;
* infinities in scaled values, and NaN of any payload but the quiet one (its sign is kept);
* a NaN beside finite values of its block in `index_fp4`: E2M1 has no NaN, only its scale has;
* -0 and -NaN in `fp8_fnuz`, which has one zero and one NaN;
* rotated channels that are no bfloat16;
* in `fp8_v32`, rows made with a scale that cannot be found again; those quantised from bfloat16 always can.

The scale itself is no state: two scales can give the same values. Packing takes the one that the engine would
choose, or, where that one does not give the same bits, the finest that reaches the largest value.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from .compare import unsigned
from .formats import Field, RowFormat, Scaling, element_type

Fields = dict[str, np.ndarray]
"""Field name -> [rows, elements], in the field's own element type."""

NAN = np.float32(np.nan)
"""The quiet NaN, 0x7fc00000, that every NaN of a scaled value unpacks to, with its sign."""


class NotRepresentable(ValueError):
    """Rows that a format cannot hold bit for bit. `row` and `channel` name the first value."""

    def __init__(self, form: RowFormat, row: int, channel: int, value: float, where: str = "") -> None:
        rotated = channel >= form.field("values").count
        plain = form.field("rope" if rotated else "values").dtype
        scaled = form.scaling is not None and not rotated
        reason = "no scale of its block gives it back" if scaled else f"it is no {plain}"
        super().__init__(
            f"{where}{': ' if where else ''}row {row}, channel {channel} is {value!r}, which the format "
            f"{form.name!r} cannot hold: {reason} (quantise=True would change it)"
        )
        self.form, self.row, self.channel, self.value = form, row, channel, value


def pack(rows: np.ndarray, form: RowFormat, *, quantise: bool = False) -> np.ndarray:
    """Rows as bytes, uint8 [rows, form.nbytes]. Arguments and errors as `encode`."""
    return to_bytes(encode(rows, form, quantise=quantise), form)


def unpack(data: np.ndarray, form: RowFormat, dtype: str = "float32") -> np.ndarray:
    """Bytes [rows, form.nbytes] as rows [rows, channels]; see `decode`."""
    return decode(from_bytes(data, form), form, dtype)


def encode(rows: np.ndarray, form: RowFormat, *, quantise: bool = False, where: str = "") -> Fields:
    """What a row's fields hold.

    Args:
        rows: float32 or bfloat16 [rows, channels].
        form: the format.
        quantise: round to what the format can hold, with the engine's scale, instead of refusing.
        where: what the rows are, for the error.

    Raises:
        NotRepresentable: `quantise` is False and the bits would not come back.
        ValueError: another shape or dtype.
    """
    if rows.ndim != 2 or rows.shape[1] != form.channels or rows.dtype.name not in ("float32", "bfloat16"):
        raise ValueError(
            f"expected float32 or bfloat16 [rows, {form.channels}] for the format {form.name!r}, "
            f"got {rows.dtype.name} {list(rows.shape)}"
        )
    count = form.field("values").count
    wide = widened(rows)
    fields: Fields = {f.name: np.zeros((len(rows), f.count), element_type(f.dtype)) for f in form.fields}
    if form.scaling is None:
        fields["values"] = narrowed(wide[:, :count], form.field("values").dtype)
    else:
        fields["values"], fields["scales"] = _scaled(
            wide[:, :count], form, form.scaling, rows.dtype.name, quantise
        )
    if "rope" in fields:
        fields["rope"] = narrowed(wide[:, count:], form.field("rope").dtype)
    if not quantise:
        same = unsigned(decode(fields, form, rows.dtype.name)) == unsigned(rows)
        if not same.all():
            row, channel = (int(i) for i in np.argwhere(~same)[0])
            raise NotRepresentable(form, row, channel, float(wide[row, channel]), where)
    return fields


def decode(fields: Fields, form: RowFormat, dtype: str = "float32") -> np.ndarray:
    """Rows [rows, channels] from their fields: value * scale, in float32.

    In float32 that is exact where the scale is a power of two, as everywhere but in `fp8_v32`. To "bfloat16"
    the product is rounded once more; that changes nothing under such a scale, unless it lies below 2^-126.
    """
    values = fields["values"]
    if form.scaling is None:
        wide = widened(values)
    else:
        scales = np.repeat(fields["scales"].astype(np.float32), form.scaling.block, axis=1)
        wide = _products(values, scales[:, : values.shape[1]])
    if "rope" in fields:
        wide = np.concatenate([wide, widened(fields["rope"])], axis=1)
    return narrowed(wide, dtype)


# Scales -----------------------------------------------------------------------------------------------------


def _scaled(
    wide: np.ndarray, form: RowFormat, scaling: Scaling, dtype: str, quantise: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Values [n, channels] and scales [n, blocks]: for each block with the first scale that gives it back.

    Where none does, with the one that gives most of it back; to quantise, with the engine's.
    """
    stored, scale_type = (element_type(form.field(name).dtype) for name in ("values", "scales"))
    count = wide.shape[1]
    # A short last block is filled with copies of its last channel: they change neither amax nor what fits.
    padded = np.pad(wide, [(0, 0), (0, -count % scaling.block)], mode="edge")
    blocks = padded.reshape(len(wide), padded.shape[1] // scaling.block, scaling.block)
    values, scales = np.zeros(blocks.shape, stored), np.zeros(blocks.shape[:2], scale_type)
    best = np.full(blocks.shape[:2], -1)
    for candidate in _candidates(blocks, scaling, stored):
        new_scales = candidate.astype(scale_type)
        scale = new_scales.astype(np.float32)[..., None]
        new_values = _quotients(blocks, scale, stored)
        back = narrowed(_products(new_values, scale), dtype)
        right = (unsigned(widened(back)) == unsigned(blocks)).sum(axis=-1)
        better = right > best
        values[better], scales[better] = new_values[better], new_scales[better]
        best = np.maximum(best, right)
        if quantise or (best == scaling.block).all():
            break
    return values.reshape(padded.shape)[:, :count], scales


def _candidates(blocks: np.ndarray, scaling: Scaling, stored: np.dtype) -> Iterator[np.ndarray]:
    """Scales [n, blocks] to try: the engine's; the finest power of two; the quotient as it is (V3.2)."""
    finite = np.isfinite(blocks)
    amax = np.where(finite, np.abs(blocks), 0).max(axis=-1, initial=0)
    scale = np.maximum(amax, np.float32(scaling.floor)) / np.float32(scaling.largest)
    engine = power_of_two_above(scale) if scaling.power_of_two else scale
    # As in fake quantisation, a block that is not finite is NaN throughout.
    yield np.where(finite.all(axis=-1), engine, NAN)
    yield power_of_two_above(amax / _largest(stored))
    yield amax / np.float32(scaling.largest)


def power_of_two_above(x: np.ndarray) -> np.ndarray:
    """The smallest power of two not below x, within UE8M0's 2^-127 .. 2^127. Exact: no log2, no exp2."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.float32(1), np.clip(exponent - (mantissa == 0.5), -127, 127)).astype(np.float32)


def _quotients(blocks: np.ndarray, scale: np.ndarray, stored: np.dtype) -> np.ndarray:
    """blocks / scale in the stored type, to the nearest, ties to even, clamped to its largest value.

    The clamp is ours: a bare cast to float8_e4m3fn turns 465 into NaN. Of NaN only the sign is kept.
    """
    with np.errstate(all="ignore"):
        quotient = np.clip(blocks / scale, -_largest(stored), _largest(stored))
    broken = np.isnan(quotient)
    filler = NAN if np.isnan(NAN.astype(stored)) else np.float32(0)
    signed = np.copysign(filler, np.where(np.isnan(blocks), blocks, 0))
    return np.where(broken, signed, quotient).astype(stored)


def _products(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """values * scale in float32; NaN is the quiet one, with the value's sign if the type has one for zero."""
    wide = values.astype(np.float32)
    with np.errstate(all="ignore"):
        product = wide * scale
    signed_zero = np.signbit(np.float32(-0.0).astype(values.dtype).astype(np.float32))
    broken = np.copysign(NAN, wide) if signed_zero else NAN
    return np.where(np.isnan(product), broken, product)


def _largest(stored: np.dtype) -> np.float32:
    return np.float32(ml_dtypes.finfo(stored).max)


# Bits and bytes ---------------------------------------------------------------------------------------------


def widened(rows: np.ndarray) -> np.ndarray:
    """float32 or bfloat16 as float32, NaN payloads included: a cast does not promise them."""
    if rows.dtype == np.float32:
        return rows
    return (np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrowed(wide: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded to `dtype`, "float32" or "bfloat16"; what needs no rounding keeps its bits."""
    if dtype == "float32":
        return np.ascontiguousarray(wide)
    bits = np.ascontiguousarray(wide).view(np.uint32)
    with np.errstate(all="ignore"):
        rounded = wide.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(bits & 0xFFFF, rounded, (bits >> 16).astype(np.uint16)).view(ml_dtypes.bfloat16)


def to_bytes(fields: Fields, form: RowFormat) -> np.ndarray:
    """The fields one after the other, uint8 [rows, form.nbytes]."""
    return np.concatenate([field_bytes(fields[field.name], field) for field in form.fields], axis=1)


def from_bytes(data: np.ndarray, form: RowFormat) -> Fields:
    """What `to_bytes` put together.

    Raises:
        ValueError: not uint8 [rows, form.nbytes].
    """
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != form.nbytes:
        raise ValueError(
            f"expected uint8 [rows, {form.nbytes}] for the format {form.name!r}, "
            f"got {data.dtype.name} {list(data.shape)}"
        )
    fields, start = {}, 0
    for field in form.fields:
        fields[field.name] = field_values(data[:, start : start + field.nbytes], field)
        start += field.nbytes
    return fields


def field_bytes(values: np.ndarray, field: Field) -> np.ndarray:
    """A field's elements [rows, count] as its bytes, uint8 [rows, field.nbytes]."""
    data = np.ascontiguousarray(values).view(np.uint8)
    if field.dtype != "float4_e2m1fn":
        return data
    return ((data[:, 0::2] & 0xF) | (data[:, 1::2] << 4)).astype(np.uint8)  # ml_dtypes has a byte for each


def field_values(data: np.ndarray, field: Field) -> np.ndarray:
    """A field's bytes as its elements."""
    if field.dtype == "float4_e2m1fn":
        data = np.stack([data & 0xF, data >> 4], axis=-1).reshape(len(data), field.count)
    return np.ascontiguousarray(data).view(element_type(field.dtype))
