"""Entropy coders: segments come back, and no bytes make them allot more than was asked for."""

import sys
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from goldenkv.delta import DamagedStream, Range, Zstd, entropy
from goldenkv.errors import MissingExtra

zstandard = pytest.importorskip("zstandard", reason="the extra 'delta' is not installed")
pytest.importorskip("constriction", reason="the extra 'delta' is not installed")

KINDS = {"zstd": Zstd(), "zstd19": Zstd(19), "range": Range()}


def segments(seed: int) -> list[np.ndarray]:
    """None, one byte, noise, a constant, a skewed distribution."""
    generator = np.random.default_rng(seed)
    return [
        np.empty(0, np.uint8),
        generator.integers(0, 256, 1, np.uint8),
        generator.integers(0, 256, 1000, np.uint8),
        np.full(1000, 7, np.uint8),
        generator.geometric(0.3, 1000).astype(np.uint8),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_come_back_each_alone(kind: str) -> None:
    groups = [segments(seed) for seed in range(3)]
    model = KINDS[kind].fit([np.concatenate(parts) for parts in zip(*groups, strict=True)])
    coded = [KINDS[kind].coder(model).encode(group) for group in groups]
    for group, data in reversed([*zip(groups, coded, strict=True)]):
        found = KINDS[kind].coder(memoryview(model)).decode(memoryview(data), [len(s) for s in group])
        assert all(np.array_equal(a, b) for a, b in zip(found, group, strict=True))
    # 1,001 bytes have no structure, 1,000 are the same, and the last 1,000 have about 2.9 bits each.
    assert all(1330 < len(data) < 1500 for data in coded)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_takes_no_more_than_it_is(kind: str) -> None:
    noise = [np.random.default_rng(0).integers(0, 256, 5000, np.uint8)]
    model = KINDS[kind].fit(noise)
    assert len(model) + len(KINDS[kind].coder(model).encode(noise)) <= 5000 + 40


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_no_group_are_refused(kind: str) -> None:
    """Each is an error, or segments of the sizes that were asked for."""
    group = segments(0)
    model = KINDS[kind].fit(group)
    coder, sizes = KINDS[kind].coder(model), [len(s) for s in group]
    data = coder.encode(group)
    generator = np.random.default_rng(0)
    broken = [data[:size] for size in range(0, len(data), 37)] + [data + b"\0\0\0\0", b"\xff" * 64]
    for _ in range(200):
        changed = bytearray(data)
        changed[generator.integers(len(data))] ^= 1 << int(generator.integers(8))
        broken.append(bytes(changed))
    refused = 0
    for each in broken:
        try:
            assert [len(s) for s in coder.decode(memoryview(each), sizes)] == sizes
        except DamagedStream:
            refused += 1
    assert refused > 5


def frame(content: bytes, names_size: bool = False) -> bytes:
    """A segment of zstd as it stands in a group."""
    made = zstandard.ZstdCompressor(write_content_size=names_size).compress(content)[4:]
    return entropy.leb128(len(made)) + made


@pytest.mark.parametrize("data", [frame(bytes(1 << 24)), frame(bytes(1 << 24), True), frame(bytes(99))])
def test_a_frame_that_holds_another_size_is_refused(data: bytes) -> None:
    """16 MiB in half a kilobyte are not unpacked where 100 bytes are expected."""
    with pytest.raises(DamagedStream):
        Zstd().coder(b"").decode(memoryview(data), [100])


def test_sizes() -> None:
    for number in (0, 1, 127, 128, 16383, 16384, 2**32 - 1):
        data = entropy.leb128(number)
        assert entropy.read_leb128(memoryview(b"x" + data + b"y"), 1) == (number, 1 + len(data))
        with pytest.raises(DamagedStream):
            entropy.read_leb128(memoryview(data[:-1]), 0)
    with pytest.raises(DamagedStream):
        entropy.read_leb128(memoryview(b"\xff" * 9), 0)


@pytest.mark.parametrize(
    "model",
    [
        b"",
        b"x" * 30,
        zlib.compress(bytes(1 << 24)),
        zlib.compress(b"\1" * 255),
        zlib.compress(b"\xff" * 256),
        zlib.compress(bytes(256)),
        zlib.compress(b"\1" * 256) + b"more",
        zlib.compress(b"\1" * 256)[:-1],
    ],
    ids=["empty", "other", "too many", "short", "no such number", "no frequency", "more", "cut"],
)
def test_what_is_no_table_of_frequencies_is_refused(model: bytes) -> None:
    with pytest.raises(DamagedStream, match="model"):
        Range().coder(model)
    with pytest.raises(DamagedStream, match="a model, zstd has none"):
        Zstd().coder(b"x")


def test_frequencies_are_rounded_to_an_eighth() -> None:
    counts = np.unique(np.concatenate([np.arange(300), 1 << np.arange(27), (1 << np.arange(1, 27)) - 1]))
    codes = entropy._rounded(counts)
    found = entropy._frequencies(codes)
    assert np.array_equal(found[:16], counts[:16])
    assert (found <= counts).all() and (found > counts * 8 / 9 - 1).all()
    assert codes.max() < entropy._CODES and (np.diff(codes.astype(int)) >= 0).all()
    every = np.arange(entropy._CODES)
    assert (np.diff(entropy._frequencies(every)) > 0).all()


@pytest.mark.parametrize(("kind", "package"), [(Zstd, "zstandard"), (Range, "constriction")])
def test_the_extra_is_named(kind: Callable, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"pip install 'goldenkv\[delta\]'"):
        kind()
