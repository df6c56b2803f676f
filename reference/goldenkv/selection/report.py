"""A study in one sentence, as tables for a terminal of 80 columns, and as JSON."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from .patterns import in_order
from .study import LayerFindings, Paged, Study

HALF = 0.5
"""The budget that the first line speaks of."""


def finding(study: Study) -> str:
    """What came out, first of all whether selections can be foreseen."""
    parts = []
    for layer in study.layers:
        name, found = layer.best(HALF)
        parts.append(f"layer {layer.layer}: {found:.0%} by '{name}'")
    whole = study.paged[-1]
    ties = ", ".join(f"{layer.by_id:.0%}" for layer in study.layers)
    ordered = sum(in_order(layer.heats) for layer in study.layers)
    return (
        f"Half of the visible entries, chosen ahead, hold so much of the next selection: {'; '.join(parts)}; "
        f"drawn at random they hold 50%. No score decided {ties} of the selections "
        f"(ties at 0). A step needs {whole.needed:.1f} of {whole.pages} pages of "
        f"{whole.page_tokens} tokens. The order P0 to P3 holds in {ordered} of {len(study.layers)} layers. "
        f"Pages from behind another prefix cost {study.spliced.other.divergence:.2g} nats a token "
        f"(the right ones 0)."
    )


def tables(study: Study) -> Iterator[Table]:
    """Stability, hotness, recall, reuse, pages, splices."""
    yield _stability(study)
    yield _hotness(study)
    yield _recall(study)
    yield _reuse(study)
    for paged in study.paged:
        yield _pages(paged)
    yield _rows(study)
    yield _splices(study)


def to_json(study: Study) -> dict[str, Any]:
    """Everything but the ids themselves."""
    out = {field.name: getattr(study, field.name) for field in dataclasses.fields(study)}
    del out["recording"]
    return {"finding": finding(study)} | _plain(out)


def _plain(value: Any) -> Any:
    """Dataclasses, enumerations and arrays as JSON knows them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _stability(study: Study) -> Table:
    k = study.about["top_k"]
    table = _table(f"Entries of {k} that are selected again so many tokens later")
    for lag in study.layers[0].stability.lags:
        table.add_column(f"{lag}", justify="right")
    for layer in study.layers:
        found = layer.stability
        table.add_row(f"layer {layer.layer}", *[f"{v:.0%}" for v in found.overlap])
    found = study.layers[0].stability
    table.add_row("[dim]random[/]", *[f"[dim]{v:.0%}[/]" for v in found.random])
    table.add_row("[dim]the latest entries[/]", *[f"[dim]{v:.0%}[/]" for v in found.recent])
    return table


def _hotness(study: Study) -> Table:
    table = _table("Hotness: shares of selections; lift 1 is random")
    for name in ("selected", "random", "recent", "lift", "by score", "mass"):
        table.add_column(name, justify="right")
    for layer in study.layers:
        for heat, scored in zip(layer.heats, layer.scored_heats, strict=True):
            table.add_row(
                f"layer {layer.layer}, {heat.zone.value}",
                f"{heat.share:.1%}", f"{heat.random:.1%}", f"{heat.recent:.1%}", f"{heat.lift:.2f}",
                f"{scored.lift:.2f}",
                "" if heat.mass is None else f"{heat.mass:.1%}",
            )  # fmt: skip
    sinks = ", ".join(f"{share:.1%}" for share in study.sink_mass.values())
    table.caption_justify = "left"
    ties = ", ".join(f"layer {layer.layer}: {layer.by_id:.1%}" for layer in study.layers)
    table.caption = (
        f"by score: lift without what was taken for its low id, scores being 0 ({ties})\n"
        f"P2 is the first half of the document, as if another request shared it\n"
        f"attention on the learned sink, layer by layer: {sinks}"
    )
    return table


def _recall(study: Study) -> Table:
    table = _table("Recall of the next selection against entries kept")
    for share in study.layers[0].curves["random"].shares:
        table.add_column(f"{share:.0%}", justify="right")
    for layer in study.layers:
        for name, curve in layer.curves.items():
            table.add_row(f"layer {layer.layer}, {name}", *[f"{v:.0%}" for v in curve.recall])
    table.caption_justify = "left"
    table.caption = "at 50%, of what scores decided: " + "; ".join(
        "layer {}: {:.0%} by '{}'".format(layer.layer, *layer.best(HALF, scored=True)[::-1])
        for layer in study.layers
        if layer.scored_curves
    )
    return table


def _reuse(study: Study) -> Table:
    table = _table("Selections that another request, or the last turn, foresaw")
    for name in ("share", "random", "entries kept"):
        table.add_column(name, justify="right")
    for layer in study.layers:
        for label, reuse in _reuses(layer):
            table.add_row(label, f"{reuse.share:.0%}", f"{reuse.random:.0%}", f"{reuse.kept:.0f}")
    return table


def _reuses(layer: LayerFindings) -> Iterator[tuple[str, Any]]:
    yield f"layer {layer.layer}, same prefix, same step", layer.batch
    for number, reuse in enumerate(layer.turns, start=2):
        yield f"layer {layer.layer}, turn {number}", reuse


def _pages(paged: Paged) -> Table:
    table = _table(
        f"Pages of {paged.page_tokens} tokens: hit rate (pages moved)\n"
        f"a step needs {paged.needed:.1f} of {paged.pages}"
    )
    for capacity in paged.capacities:
        table.add_column(f"{capacity} kept", justify="right")
    for name, found in paged.results.items():
        table.add_row(name, *[f"{one.hit_rate:.1%} ({one.moved:,})" for one in found])
    return table


def _rows(study: Study) -> Table:
    table = _table("Rows of one block behind two prefixes")
    for name in ("difference", "equal bits", "equal from row"):
        table.add_column(name, justify="right")
    for row in study.spliced.rows:
        first = "never" if row.first_equal is None else f"{row.first_equal}"
        label = f"layer {row.layer}, {row.kind}"
        table.add_row(label, f"{row.relative.mean():.3f}", f"{row.equal.mean():.0%}", first)
    return table


def _splices(study: Study) -> Table:
    table = _table("The block's pages taken from behind another prefix: what follows")
    for name in ("KL, nats", "loss", "same choice"):
        table.add_column(name, justify="right")
    spliced = study.spliced
    lines = {"same prefix (control)": spliced.exact, "another prefix": spliced.other}
    lines |= {f"another, layer {i} only": one for i, one in spliced.by_layer.items()}
    lines |= {"another text, for scale": spliced.wrong}
    for name, one in lines.items():
        change = one.loss - one.exact_loss
        kl = "0, bit-equal" if one.equal else f"{one.divergence:.2g}"
        table.add_row(name, kl, f"{one.loss:.3f} ({change:+.3f})", f"{one.agreement:.1%}")
    return table


def _table(title: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("", no_wrap=True)
    return table
