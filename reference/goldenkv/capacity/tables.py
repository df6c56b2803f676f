"""The calculator's tables on a terminal of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.markup import escape
from rich.table import Table

from .pages import PageSize
from .parts import Group, Model, Part
from .report import Report, SnapshotSize


def tables(report: Report) -> Iterator[Table]:
    """For each model what grows, what is bounded and the page sizes; last all models side by side."""
    for model in report.models:
        yield from _model_tables(report, model)
    yield _totals(report)


def notes(report: Report) -> Iterator[str]:
    """What a reader must know to use the totals."""
    ranks = report.load.tensor_parallel
    for model in report.models:
        name = escape(model.name)
        if report.too_long(model):
            yield f"{name} was made for {model.max_context:,} tokens, fewer than {report.load.context:,}"
        repeated = {part.heads: ranks // part.heads for _, part in model.parts() if ranks > part.heads}
        for heads, times in repeated.items():
            what = "one KV head" if heads == 1 else f"{heads} KV heads"
            yield f"{name} has {what}: {ranks} ranks hold everything {times} times"


def size(nbytes: float) -> str:
    """A size for people: 1.34 TiB, 3.43 GiB, 14.7 MiB, 878.6 KiB, 512 B."""
    for unit, digits, step in (("TiB", 2, 2**40), ("GiB", 2, 2**30), ("MiB", 1, 2**20), ("KiB", 1, 2**10)):
        if nbytes >= step:
            return f"{nbytes / step:,.{digits}f} {unit}"
    return f"{nbytes:,.0f} B"


def number(value: float) -> str:
    """Bytes with as many decimals as they have, at most four: 17, 3,514.25, 4.5625."""
    return f"{value:,.4f}".rstrip("0").rstrip(".")


def percent(share: float) -> str:
    """A share with two decimals from 1% on, below with two significant digits: 7.31%, 1,368%, 0.0053%."""
    value = 100 * share
    if value >= 1000:
        return f"{value:,.0f}%"
    digits = 2 if value >= 1 or not value else 1 - math.floor(math.log10(value))
    return f"{value:.{digits}f}%"


def _model_tables(report: Report, model: Model) -> Iterator[Table]:
    yield _growing(report, model)
    if any(not part.grows for group in model.groups for part in group.parts):
        yield _bounded(report, model)
    if pages := report.pages(model):
        yield _pages(report, pages)
    if snapshots := report.snapshots(model):
        yield _snapshots(snapshots)


def _growing(report: Report, model: Model) -> Table:
    """Bytes a token of the parts that grow."""
    ranks = report.load.tensor_parallel
    rank = f", one of {ranks} ranks" if ranks > 1 else ""
    table = _table(
        f"{escape(model.name)}: {model.family}, {model.layers} layers, format {model.format}{rank}",
        "layers", "grows with tokens", "bytes\na row", "tokens\na row", "bytes a token\nand layer",
        "bytes\na token",
    )  # fmt: skip
    for group in model.groups:
        for part in group.parts:
            if part.grows:
                each = part.bytes_a_token(ranks)
                cells = (
                    _row(part, ranks),
                    f"{part.tokens_a_row:,}",
                    number(each),
                    number(each * group.layers),
                )
                table.add_row(_layers(group), part.name, *cells, style=_style(group))
    main, draft = model.bytes_a_token(ranks), model.bytes_a_token(ranks, draft=True)
    _sum(table, model, main, draft)
    return table


def _bounded(report: Report, model: Model) -> Table:
    """What a sequence keeps whatever its length; equal parts of a layer share a line."""
    context, ranks = report.load.context, report.load.tensor_parallel
    table = _table(
        None, "layers", "fixed a sequence", "bytes\na row", "rows\nat most", "bytes\na layer", "bytes"
    )
    for group in model.groups:
        equal: dict[tuple[object, ...], list[Part]] = {}
        for part in group.parts:
            if not part.grows:
                equal.setdefault((part.row, part.heads, part.most_rows), []).append(part)
        for parts in equal.values():
            each = sum(part.nbytes(context, ranks) for part in parts)
            cells = (
                _row(parts[0], ranks),
                f"{parts[0].most_rows:,}",
                f"{each:,}",
                f"{each * group.layers:,}",
            )
            table.add_row(_layers(group), _names(parts), *cells, style=_style(group))
    main, draft = (model.bounded_bytes(context, ranks, draft=draft) for draft in (False, True))
    _sum(table, model, main, draft)
    return table


def _pages(report: Report, pages: list[PageSize]) -> Table:
    """Page sizes: bytes, and what padding and metadata add to the rows."""
    load = report.load
    apart = any(page.apart for page in pages)
    table = _table(
        None, "tokens\na page", "bytes\na page", "", f"pages at\n{load.context:,}", "padding", "metadata",
        *(["apart"] if apart else []),
    )  # fmt: skip
    for page in pages:
        table.add_row(
            f"{page.tokens:,}",
            f"{page.nbytes:,}",
            size(page.nbytes),
            f"{page.pages:,}",
            percent(page.padding) if page.padding else "none",
            percent(page.metadata),
            *([", ".join(f"{kind}, {tokens}" for kind, tokens in page.apart.items())] if apart else []),
        )
    table.columns[0].justify = table.columns[1].justify = "right"
    table.caption = f"padding and metadata: shares of the rows;\nmetadata: {load.metadata} bytes a page"
    if apart:
        table.caption += (
            "\napart: so small a page holds no whole entry of these layers; they have"
            "\npages of so many tokens, counted everywhere but in the bytes"
        )
    return table


def _snapshots(snapshots: list[SnapshotSize]) -> Table:
    """What a hand-over or an offload of one sequence moves, a column a length."""
    table = _table(None, "bytes to reload a sequence of", *(f"{s.length:,} tokens" for s in snapshots))
    for column in table.columns[1:]:
        column.justify = "right"
    lines = {
        "pages": [f"{s.pages:,}" for s in snapshots],
        "snapshot of the rest, whole windows": [f"{s.nbytes:,}" for s in snapshots],
        "together": [f"{s.pages + s.nbytes:,}" for s in snapshots],
        "": [size(s.pages + s.nbytes) for s in snapshots],
        "snapshot, rows that an exact reload reads": [f"{s.exact:,}" for s in snapshots],
    }
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table


def _totals(report: Report) -> Table:
    """All models side by side."""
    load, ranks = report.load, report.load.tensor_parallel
    requests = "1 request" if load.requests == 1 else f"{load.requests:,} requests"
    table = _table(
        f"{requests} of {load.context:,} tokens" + (f", {ranks} tensor-parallel ranks" if ranks > 1 else ""),
        "", "format", "bytes\na token", f"share of\n{escape(report.reference.name)}",
        *(("one rank", "all ranks") if ranks > 1 else ("grows", "fixed", "total")),
    )  # fmt: skip
    for model in report.models:
        growing, bounded, share = report.growing(model), report.bounded(model), report.share(model)
        total = growing + bounded
        sizes = (total, ranks * total) if ranks > 1 else (growing, bounded, total)
        table.add_row(
            escape(model.name),
            model.format,
            number(model.bytes_a_token(ranks)),
            "" if share is None else percent(share),
            *(size(nbytes) if nbytes else "none" for nbytes in sizes),
        )
    table.columns[0].max_width = 20
    table.columns[-1].style = "bold"
    return table


def _layers(group: Group) -> str:
    return f"{group.layers} {group.kind}"


def _style(group: Group) -> str | None:
    return "dim" if group.draft else None


def _row(part: Part, ranks: int) -> str:
    """Bytes of a row, times the heads that have one."""
    heads = part.heads_a_rank(ranks)
    return f"{part.row.nbytes:,}" if part.heads == 1 else f"{heads} x {part.row.nbytes:,}"


def _names(parts: list[Part]) -> str:
    """`rows_kv` and `rows_score` become `rows_{kv,score}`."""
    names = [part.name for part in parts]
    if len(names) == 1:
        return names[0]
    same = next(i for i in range(len(names[0]) + 1) if len({name[: i + 1] for name in names}) > 1)
    return f"{names[0][:same]}{{{','.join(name[same:] for name in names)}}}"


def _sum(table: Table, model: Model, main: float, draft: float) -> None:
    """The last lines of a table; the draft layer comes on top of what is published."""
    blank = [""] * (len(table.columns) - 2)
    table.add_section()
    table.add_row("total", *blank, f"[bold]{number(main)}[/]")
    if draft:
        kind = next(group.kind for group in model.groups if group.draft)
        table.add_row(f"with {kind}", *blank, number(main + draft), style="dim")


def _table(title: str | None, *columns: str) -> Table:
    """The first two columns are text, all others numbers; headers break where they say."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        caption_justify="left", caption_style="dim",
    )  # fmt: skip
    for column, name in enumerate(columns):
        table.add_column(name, justify="left" if column < 2 else "right", no_wrap=True)
    return table
