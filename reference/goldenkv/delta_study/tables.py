"""The study as tables of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from .correlation import most_saved_bits, needed_correlation, saved_bits
from .methods import LOSSLESS
from .study import DISTANCES, HOPED, Study
from .worth import break_even_bandwidth, reload_seconds

BITS = {"index keys": 4.0, "CSA rows": 32.0, "index rows": 32.0, "HCA rows": 32.0}
"""Of a stored value; 8 where nothing is said."""

STATE, NETWORK = 460_619_776, 1.25e9
"""V4-Flash after 131,072 tokens, 3,514.25 bytes each; 10 Gbit/s."""


def tables(study: Study) -> Iterator[Table]:
    """Correlation, lossless by component and together, distances of keyframes, lossy."""
    yield _correlations(study)
    yield _components(study)
    yield _together(study)
    if study.sweep:
        yield _sweep(study)
    if study.lossy:
        yield _lossy(study)


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", caption=caption, box=None, pad_edge=False
    )
    table.caption_justify = "left"
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=not i)
    return table


def _correlations(study: Study) -> Table:
    table = _table(
        "Correlation of neighbouring rows, centred, mean over layers",
        "component", "lag 1", "keyframe", "unrotated", "saves", "at most", f"for {HOPED[0]:g} times",
        caption="keyframe: lag of their distance; unrotated: lag 1, rotary part undone; saves: "
        "bits of a value that differences save; at most: that the best prediction does; "
        "last column: the correlation that differences need",
    )  # fmt: skip
    for c in study.correlations:
        needed = needed_correlation(HOPED[0], BITS.get(c.component, 8.0))
        table.add_row(
            c.component, _two(c.near), _two(c.far), _two(c.unrotated), f"{saved_bits(c.near):+.2f}",
            _two(most_saved_bits(c.near)), f"{needed:.5f}" if needed < 0.999995 else "over 0.99999",
        )  # fmt: skip
    return table


def _two(value: float) -> str:
    """Two digits; nothing for NaN."""
    return "" if value != value else f"{value:.2f}"


def _components(study: Study) -> Table:
    names = list(dict.fromkeys(m.component for m in study.lossless))
    table = _table("Lossless: native bytes over coded bytes", "codec", *names)
    for codec in LOSSLESS:
        table.add_row(codec, *(f"{study.ratio(codec, [name]):.2f}" for name in names))
    raw = [study.of("raw native", [name])[0] for name in names]
    table.add_row("[dim]native bytes a row", *(f"[dim]{m.bytes_a_row:.0f}" for m in raw))
    table.add_row("[dim]rows", *(f"[dim]{m.rows}" for m in raw))
    return table


def _together(study: Study) -> Table:
    tokens = study.about.get("tokens")
    table = _table(
        f"What grows with the context ({', '.join(study.growing)}), together",
        "codec", "B a token", "x native", "x BF16", "encode", "decode", "pays below", "460 MB",
        caption="encode, decode: MB/s of native bytes, one core, this Python code; pays below: "
        "MB/s of a tier under which reading and decoding is faster than reading raw; "
        "460 MB: seconds for V4-Flash's state of 131,072 tokens at 10 Gbit/s",
    )  # fmt: skip
    for codec in LOSSLESS:
        found = study.of(codec)
        native, coded = (sum(getattr(m, n) for m in found) for n in ("native_nbytes", "nbytes"))
        encode, decode = (
            native / 1e6 / sum(getattr(m, n) for m in found) for n in ("encode_seconds", "decode_seconds")
        )
        bf16 = sum(2 * m.rows * m.channels for m in found) / coded
        raw = codec == "raw native"
        seconds = reload_seconds(STATE, NETWORK, native / coded, 0 if raw else decode * 1e6)
        pays = "" if raw else f"{break_even_bandwidth(native / coded, decode):.0f}"
        table.add_row(
            codec, f"{coded / tokens:.0f}" if tokens else "", f"{native / coded:.2f}", f"{bf16:.2f}",
            f"{encode:.0f}", f"{decode:.0f}", pays, f"{seconds:.2f}",
        )  # fmt: skip
    return table


def _sweep(study: Study) -> Table:
    table = _table(
        "Native over coded bytes by distance of keyframes, same range coder", "component", "frames",
        *(str(d) for d in DISTANCES), caption="distance 1: every row a keyframe, no neighbour is looked at",
    )  # fmt: skip
    for component, kinds in study.sweep.items():
        for kind, ratios in kinds.items():
            table.add_row(component, kind, *(f"{ratio:.2f}" for ratio in ratios))
    return table


def _lossy(study: Study) -> Table:
    table = _table(
        "Lossy, attention keys: bytes, error, effect on the logits that follow",
        "method, step", "bits", "x native", "error", "KL", "same", "loss", "shared kB",
        caption="bits: a channel; KL: nats a token; same: greedy choice unchanged; loss: what it "
        "grew by on the text; shared: held once by both sides, in no other column",
    )  # fmt: skip
    for r in study.lossy:
        table.add_row(
            r.name, f"{r.bits:.2f}", f"{r.ratio:.2f}", f"{r.error:.1%}", f"{r.effect.kl:.4f}",
            f"{r.effect.same_choice:.0%}", f"{r.effect.loss:+.4f}", f"{r.shared_nbytes / 1e3:.0f}",
        )  # fmt: skip
    return table
