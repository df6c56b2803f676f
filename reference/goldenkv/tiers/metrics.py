"""What tiers did, as Prometheus counts it: every number is one that can be checked against another.

Tokens are counted by where their state came from, once each and only after it was verified and used: so the
sources of all finished prompts add up to their lengths. No label can hold what a user sent.
"""

from __future__ import annotations

import re
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .store import Stats

SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper ends of the latency buckets. What a mover waits for at most lies within."""

DIRECTIONS = ("put", "get")


class TierMetrics:
    """Counters, gauges and histograms in a registry of their own. Safe for threads.

    Attributes:
        registry: to add to an exporter.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"goldenkv_{name}", help, labels, registry=self.registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"goldenkv_{name}", help, ["tier"], registry=self.registry)

        self._tokens = counter("prompt_tokens", "Prompt tokens by where their state came from", "source")
        self._bytes = counter("moved_bytes", "Payload bytes that arrived", "tier", "direction")
        self._seconds = Histogram(
            "goldenkv_operation_seconds", "How long what succeeded took", ["tier", "operation"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._failures = counter("failures", "Operations that raised", "tier", "operation", "reason")
        self._evicted = counter("evicted_objects", "Objects that left to make room", "tier")
        self._promoted = counter("promotions", "Objects copied up into a tier", "tier")
        self._demoted = counter("demotions", "Objects moved down out of a tier", "tier")
        self._dropped = counter("dropped_stores", "Stores given up as too many were waiting", "tier")
        self._fallbacks = counter("fallbacks", "Hits that were shortened or recomputed", "reason")
        self._objects = gauge("objects", "Objects held")
        self._held = gauge("held_bytes", "Bytes held, heads included")
        self._capacity = gauge("capacity_bytes", "Bytes that can be held")
        self._flying = gauge("transfers_in_flight", "Transfers begun and not ended")

    def source(self, name: str, tokens: int) -> None:
        """Prompt tokens of one request: a tier's name, "replayed", "computed" or "cancelled"."""
        _check(source=name, tokens=tokens)
        self._tokens.labels(name).inc(tokens)

    def moved(self, tier: str, direction: str, nbytes: int, seconds: float) -> None:
        """A whole object arrived: by "put" in the tier, by "get" out of it."""
        if direction not in DIRECTIONS:
            raise ValueError(f"the direction must be one of {DIRECTIONS}")
        _check(tier=tier, nbytes=nbytes, seconds=seconds)
        self._bytes.labels(tier, direction).inc(nbytes)
        self._seconds.labels(tier, direction).observe(seconds)

    def failed(self, tier: str, operation: str, reason: str) -> None:
        """An operation raised; `reason` is that of a `StoreError`."""
        _check(tier=tier, operation=operation, reason=reason)
        self._failures.labels(tier, operation, reason).inc()

    def evicted(self, tier: str, objects: int = 1) -> None:
        """Objects left a tier to make room."""
        _check(tier=tier, objects=objects)
        self._evicted.labels(tier).inc(objects)

    def promoted(self, tier: str) -> None:
        """An object was copied up into a tier."""
        _check(tier=tier)
        self._promoted.labels(tier).inc()

    def demoted(self, tier: str) -> None:
        """An object moved down out of a tier."""
        _check(tier=tier)
        self._demoted.labels(tier).inc()

    def dropped(self, tier: str) -> None:
        """A store was given up because too many were waiting."""
        _check(tier=tier)
        self._dropped.labels(tier).inc()

    def fell_back(self, reason: str) -> None:
        """A hit was shortened or recomputed."""
        _check(reason=reason)
        self._fallbacks.labels(reason).inc()

    def holds(self, tier: str, stats: Stats) -> None:
        """What a tier has now. Its capacity is shown if it knows one."""
        _check(tier=tier, objects=stats.objects, nbytes=stats.nbytes, capacity=stats.capacity or 0)
        self._objects.labels(tier).set(stats.objects)
        self._held.labels(tier).set(stats.nbytes)
        if stats.capacity is not None:
            self._capacity.labels(tier).set(stats.capacity)

    def in_flight(self, tier: str, transfers: int) -> None:
        """Transfers that have begun and not ended now."""
        _check(tier=tier, transfers=transfers)
        self._flying.labels(tier).set(transfers)

    def sources(self) -> dict[str, int]:
        """Prompt tokens by source, sorted."""
        return dict(sorted(self.to_json()["prompt_tokens"].items()))

    def to_json(self) -> dict[str, Any]:
        """Values by metric (without "goldenkv_"), then by each label's value in the order of its labels.

        All sorted. A histogram's value has `count`, `sum` and `buckets`, which count up to their upper ends.
        Times of creation are left out: equal runs give equal counts.
        """
        found: dict[str, Any] = {}
        for metric in sorted(self.registry.collect(), key=lambda metric: metric.name):
            name = metric.name.removeprefix("goldenkv_")
            found[name] = {}
            for sample in metric.samples:
                part = sample.name.removeprefix(metric.name)
                if part == "_created":
                    continue
                *parents, last = [value for label, value in sample.labels.items() if label != "le"]
                at = found[name]
                for parent in parents:
                    at = at.setdefault(parent, {})
                if metric.type != "histogram":
                    at[last] = int(sample.value)
                elif part == "_bucket":
                    buckets = at.setdefault(last, {}).setdefault("buckets", {})
                    buckets[sample.labels["le"]] = int(sample.value)
                else:
                    at[last][part[1:]] = int(sample.value) if part == "_count" else sample.value
        return _sorted(found)

    def text(self) -> str:
        """The exposition format, for a Prometheus server to read."""
        return generate_latest(self.registry).decode()


def _check(**values: str | float) -> None:
    """Checks all labels and amounts of a call, before any of them is counted.

    A label is a few words, which name a tier, an operation or a reason: no key, token id, path or tenant.

    Raises:
        ValueError: a label that is no short name, or a negative amount. A label is not repeated in the text.
    """
    for what, value in values.items():
        if isinstance(value, str):
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9 _()+:-]{0,39}", value) or re.search(r"\d{3}", value):
                raise ValueError(f"{what} must be a short name: letters, and at most two digits in a row")
        elif not 0 <= value < float("inf"):
            raise ValueError(f"{what}={value} must be 0 or more")


def _sorted(values: dict[str, Any]) -> dict[str, Any]:
    """By name, at every depth; buckets stay in the order of their ends."""
    return {
        name: _sorted(value) if isinstance(value, dict) and name != "buckets" else value
        for name, value in sorted(values.items())
    }
