"""What fewer bytes are worth: the time of a reload, decoding included."""

from __future__ import annotations

BANDWIDTHS = {
    "object store, 0.2 GB/s": 0.2e9,
    "10 Gbit/s": 1.25e9,
    "NVMe, 5 GB/s": 5e9,
    "100 Gbit/s": 12.5e9,
    "PCIe 5 x16, 50 GB/s": 50e9,
}
"""Bytes a second, by name: round figures of what state travels over."""


def reload_seconds(nbytes: float, bandwidth: float, ratio: float = 1.0, decode_rate: float = 0.0) -> float:
    """Reading a state and decoding it, one after the other.

    Args:
        nbytes: native bytes of the state.
        bandwidth: bytes a second of the tier.
        ratio: how many times smaller its streams are.
        decode_rate: native bytes a second; 0 for no decoding.
    """
    return nbytes / ratio / bandwidth + (nbytes / decode_rate if decode_rate else 0.0)


def break_even_bandwidth(ratio: float, decode_rate: float) -> float:
    """The bandwidth (bytes a second) below which a codec is faster than none; 0 for never."""
    return max(0.0, decode_rate * (1 - 1 / ratio))
