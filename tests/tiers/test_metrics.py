"""Metrics: what is counted adds up, is never negative, and names nobody."""

from __future__ import annotations

import json
from collections.abc import Callable

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from goldenkv.prefix import Namespace, PageKeys, Tenant, TensorParallel, content_digest
from goldenkv.tiers.errors import StoreError
from goldenkv.tiers.metrics import SECONDS, TierMetrics
from goldenkv.tiers.store import Stats


def busy() -> TierMetrics:
    """Some of everything."""
    metrics = TierMetrics()
    metrics.source("host", 256)
    metrics.source("computed", 44)
    metrics.source("host", 256)
    metrics.moved("disk", "put", 1000, 0.0005)
    metrics.moved("disk", "put", 500, 20.0)
    metrics.moved("disk", "get", 1000, 0.0)
    metrics.failed("disk", "get", "corrupt")
    metrics.failed("disk", "get", "corrupt")
    metrics.failed("redis", "put", "unavailable")
    metrics.evicted("host")
    metrics.evicted("host", 3)
    metrics.promoted("host")
    metrics.demoted("device")
    metrics.dropped("redis")
    metrics.fell_back("corrupt")
    metrics.holds("host", Stats(3, 3000, 4000))
    metrics.holds("disk", Stats(5, 5000))
    metrics.in_flight("disk", 2)
    return metrics


def test_json_has_everything_once() -> None:
    found = busy().to_json()
    operations = found.pop("operation_seconds")["disk"]
    assert found == {
        "capacity_bytes": {"host": 4000},
        "demotions": {"device": 1},
        "dropped_stores": {"redis": 1},
        "evicted_objects": {"host": 4},
        "failures": {"disk": {"get": {"corrupt": 2}}, "redis": {"put": {"unavailable": 1}}},
        "fallbacks": {"corrupt": 1},
        "held_bytes": {"disk": 5000, "host": 3000},
        "moved_bytes": {"disk": {"get": 1000, "put": 1500}},
        "objects": {"disk": 5, "host": 3},
        "promotions": {"host": 1},
        "prompt_tokens": {"computed": 44, "host": 512},
        "transfers_in_flight": {"disk": 2},
    }
    put = operations["put"]
    assert (put["count"], put["sum"]) == (2, 20.0005)
    assert list(put["buckets"]) == [str(end) for end in SECONDS] + ["+Inf"]
    assert [put["buckets"][end] for end in ("0.0003", "0.001", "10.0", "+Inf")] == [0, 1, 1, 2]
    assert operations["get"]["buckets"]["0.0001"] == 1


def test_json_is_the_same_for_the_same_run() -> None:
    """Also its order, and nothing in it is a time of day."""
    assert json.dumps(busy().to_json()) == json.dumps(busy().to_json())
    other = TierMetrics()
    for tier in ("redis", "disk", "host"):
        other.promoted(tier)
    assert list(other.to_json()["promotions"]) == ["disk", "host", "redis"]


def test_nothing_counted_is_empty() -> None:
    found = TierMetrics().to_json()
    assert len(found) == 13
    assert not any(found.values())
    assert TierMetrics().sources() == {}


def test_the_text_is_read_by_prometheus() -> None:
    metrics = busy()
    families = {family.name: family for family in text_string_to_metric_families(metrics.text())}
    for name, kind in (
        ("prompt_tokens", "counter"),
        ("moved_bytes", "counter"),
        ("failures", "counter"),
        ("operation_seconds", "histogram"),
        ("held_bytes", "gauge"),
    ):
        assert families[f"goldenkv_{name}"].type == kind
    samples = {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["goldenkv_prompt_tokens_total", "host"] == 512
    assert samples["goldenkv_failures_total", "get", "corrupt", "disk"] == 2
    assert samples["goldenkv_operation_seconds_bucket", "0.001", "put", "disk"] == 1
    assert samples["goldenkv_capacity_bytes", "host"] == 4000
    assert all(name.startswith("goldenkv_") for name, *_ in samples)


@given(st.lists(st.tuples(st.sampled_from(["host", "disk", "replayed", "computed"]), st.integers(0, 2**40))))
def test_sources_add_up(prompts: list[tuple[str, int]]) -> None:
    """vllm#30522, LMCache#3269: no token is counted twice, and no source is below zero."""
    metrics = TierMetrics()
    for source, tokens in prompts:
        metrics.source(source, tokens)
    assert sum(metrics.sources().values()) == sum(tokens for _, tokens in prompts)
    assert list(metrics.sources()) == sorted({source for source, _ in prompts})


NEGATIVE: dict[str, Callable[[TierMetrics], None]] = {
    "tokens": lambda m: m.source("host", -7680),
    "bytes": lambda m: m.moved("host", "put", -1, 0.0),
    "seconds": lambda m: m.moved("host", "put", 1, -0.001),
    "nan": lambda m: m.moved("host", "put", 1, float("nan")),
    "infinite": lambda m: m.moved("host", "put", 1, float("inf")),
    "objects": lambda m: m.evicted("host", -1),
    "held objects": lambda m: m.holds("host", Stats(-1, 0, 0)),
    "held bytes": lambda m: m.holds("host", Stats(0, -1, 0)),
    "capacity": lambda m: m.holds("host", Stats(0, 0, -1)),
    "in flight": lambda m: m.in_flight("host", -1),
    "direction": lambda m: m.moved("host", "up", 1, 0.0),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_what_cannot_be_counted_changes_nothing(name: str) -> None:
    """LMCache#3269: 768 tokens cached less 8448 from elsewhere are no -7680."""
    metrics = TierMetrics()
    with pytest.raises(ValueError):
        NEGATIVE[name](metrics)
    assert not any(metrics.to_json().values())


def test_capacity_is_not_invented() -> None:
    metrics = TierMetrics()
    metrics.holds("redis", Stats(1, 10, None))
    assert metrics.to_json()["capacity_bytes"] == {}


def test_two_do_not_share_anything() -> None:
    """Neither with each other nor with what else a process exports."""
    busy()
    assert TierMetrics().sources() == {}
    assert b"goldenkv" not in prometheus_client.generate_latest()


# Names ------------------------------------------------------------------------------------------------------

TOKENS = [91_237, 104_511, 55_555]
NAMESPACE = Namespace(
    domain=Tenant("Ms Meyer's hospital", b"s" * 32), model=content_digest(b"m"), tokenizer=None,
    chat_template=None, layout="a layout", page_size=3, dtype="float32",
    tensor_parallel=TensorParallel(1, 0, "none"), adapter=None, media=(), salt=None,
)  # fmt: skip
KEY = PageKeys(NAMESPACE, TOKENS).pages[0].hex()
SECRETS = {
    "a token": "91237",
    "tokens": str(TOKENS),
    "a key": KEY,
    "half a key": KEY[:32],
    "an owner": NAMESPACE.owner().hex(),
    "a tenant": "Ms Meyer's hospital",
    "a path": "/data/store/ab",
    "nothing": "",
    "a line": "host\n",
}

BY_NAME: dict[str, Callable[[TierMetrics, str], None]] = {
    "source": lambda m, s: m.source(s, 1),
    "moved": lambda m, s: m.moved(s, "get", 1, 0.1),
    "failed tier": lambda m, s: m.failed(s, "get", "corrupt"),
    "failed operation": lambda m, s: m.failed("host", s, "corrupt"),
    "failed reason": lambda m, s: m.failed("host", "get", s),
    "evicted": lambda m, s: m.evicted(s),
    "promoted": lambda m, s: m.promoted(s),
    "demoted": lambda m, s: m.demoted(s),
    "dropped": lambda m, s: m.dropped(s),
    "fell back": lambda m, s: m.fell_back(s),
    "holds": lambda m, s: m.holds(s, Stats(1, 1, 1)),
    "in flight": lambda m, s: m.in_flight(s, 1),
}


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("name", BY_NAME)
def test_no_label_holds_what_a_user_sent(name: str, secret: str) -> None:
    """Neither what is counted nor the error says it."""
    metrics = TierMetrics()
    with pytest.raises(ValueError) as refused:
        BY_NAME[name](metrics, SECRETS[secret])
    assert not any(metrics.to_json().values())
    if SECRETS[secret]:
        assert SECRETS[secret] not in str(refused.value)
        assert SECRETS[secret] not in metrics.text()


def reasons() -> list[str]:
    found, classes = [], [StoreError]
    while classes:
        found.append(classes[-1].reason)
        classes += classes.pop().__subclasses__()
    return found


@pytest.mark.parametrize("reason", sorted(set(reasons())))
def test_every_reason_of_a_store_is_a_label(reason: str) -> None:
    metrics = TierMetrics()
    metrics.failed("host", "get", reason)
    assert metrics.to_json()["failures"] == {"host": {"get": {reason: 1}}}
