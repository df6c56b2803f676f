"""Tells the strategy of a prefix cache which pages a request selected entries of.

Whoever has the ids of the indexer calls `feed`. The engine's ordinary program does not return them, and the
program that does is another one, whose bits need not be the same; so `shadow` runs the tokens in a fork that
is thrown away, and what the request keeps is untouched.
"""

from __future__ import annotations

import numpy as np

from ..engine import PrefixCache, Request
from .record import csa_layers


def feed(cache: PrefixCache, request: Request, ids: np.ndarray) -> None:
    """Passes selections on to `cache.tree.strategy`.

    Args:
        cache: that the request runs in.
        request: it is open.
        ids: selected entries of this request in any shape, -1 for none.

    Raises:
        ValueError: the request has ended, or has no such entry.
    """
    if not request.open:
        raise ValueError("the request has ended: its pages may hold something else by now")
    config, size = cache.engine.config, cache.engine.geometry.page_size
    ratio = config.compress_ratios[csa_layers(config)[0]]
    entries = np.unique(ids[ids >= 0])
    there = len(request.seq.pages) * size // ratio
    if len(entries) and entries[-1] >= there:
        raise ValueError(f"entry {entries[-1]} was selected, but the pages of this request hold {there}")
    numbers = np.unique(entries * ratio // size)
    pages = np.array(request.seq.pages, np.int64)[numbers]
    # Later than everything that the tree was told, and no later than what comes next.
    cache.tree.strategy.selected(pages, cache.tree.holdings.now + 1)


def shadow(cache: PrefixCache, request: Request, tokens: np.ndarray) -> np.ndarray:
    """What the request would select while it runs these tokens next: [CSA layers, tokens, k] entry ids.

    It needs a free slot and pages, and it costs what the tokens cost.

    Raises:
        CapacityError: no room. Nothing has changed.
    """
    twin = cache.engine.fork(request.seq)
    try:
        _, probe = cache.engine.prefill_probed(twin, tokens)
    finally:
        cache.engine.close(twin)
    return np.stack([np.asarray(probe.selected[layer]) for layer in csa_layers(cache.engine.config)])
