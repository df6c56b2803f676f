"""Page groupings of the engines, and whole states of real sequences through their pages."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldenkv.config import LayerKind, ModelConfig, Numerics, flash, micro, pro, tiny
from goldenkv.config.presets import with_mtp
from goldenkv.engine import Engine
from goldenkv.model.weights import Model
from goldenkv.state import (
    COMPONENTS,
    Grouping,
    GroupingError,
    HitPolicy,
    IncompleteSnapshot,
    MissingPage,
    NotRepresentable,
    PageSizeError,
    Rows,
    cells,
    compare,
    pack_state,
    read_page,
    sglang,
    tensorrt_llm,
    unpack_state,
    vllm,
)

ENGINES: dict[str, Callable[..., Grouping]] = {
    "vllm": vllm,
    "sglang": sglang,
    "tensorrt_llm": tensorrt_llm,
    "tensorrt_llm of 256": functools.partial(tensorrt_llm, tokens=256),
}
each_engine = pytest.mark.parametrize("engine", ENGINES)
EDGES = (0, 1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 131, 255, 256, 257, 300, 511, 512, 513, 1000)
CONFIGS = {"flash": flash(), "micro": with_mtp(micro()), "tiny": tiny()}


def with_pools(grouping: Grouping, *names: str, **changes: object) -> Grouping:
    """The same with attributes of these pools changed."""
    pools = (replace(pool, **changes) if pool.name in names else pool for pool in grouping.pools)
    return replace(grouping, pools=tuple(pools))


# Descriptions -----------------------------------------------------------------------------------------------


@each_engine
def test_every_component_has_one_place(engine: str) -> None:
    """Of every layer kind. Control: each component left out of its slot, or placed twice, is named."""
    grouping = ENGINES[engine]()
    for config in (flash(), pro(), with_mtp(micro())):
        placed = [cell for place in grouping.places(config) for cell in place.cells]
        absent = {name for name, _ in grouping.not_kept}
        assert sorted(c.name for c in placed) == sorted(
            c.name for c in cells(config) if c.component.name not in absent
        )
    for component in COMPONENTS:
        name = component.name
        pools = tuple(
            replace(
                pool,
                slots=tuple(
                    replace(s, components=tuple(c for c in s.components if c != name)) for s in pool.slots
                ),
            )
            for pool in grouping.pools
        )
        not_kept = tuple(pair for pair in grouping.not_kept if pair[0] != name)
        with pytest.raises(GroupingError, match=rf"\b{name} of \w+ layers must be .* it is in none"):
            Grouping(grouping.name, pools, not_kept)
        with pytest.raises(GroupingError, match=rf"\b{name} of \w+ layers must be .* it is in \w+ and \w+"):
            Grouping(grouping.name, grouping.pools, (*grouping.not_kept, (name, "twice")))


def test_names_that_the_table_lacks_do_no_harm() -> None:
    grouping = vllm()
    slot = replace(grouping.pools[0].slots[0], components=("entries", "of_another_model"))
    pool = replace(grouping.pools[0], slots=(slot, *grouping.pools[0].slots[1:]))
    changed = replace(grouping, pools=(pool, *grouping.pools[1:]))
    assert changed.page_bytes(flash()) == grouping.page_bytes(flash())


@each_engine
def test_policies_follow_from_the_components(engine: str) -> None:
    for place in ENGINES[engine]().places(flash()):
        policy = HitPolicy.ALL_PAGES if place.cells[0].component.paged else HitPolicy.TRAILING_PAGES
        assert place.pool.policy is policy
        assert len({cell.component.paged for cell in place.cells}) == 1


def test_names_are_the_engines() -> None:
    """Of SGLang's PoolName and TensorRT-LLM's DeepseekV4AttentionType."""
    assert {pool.name for pool in sglang().pools} == {
        "swa", "c4", "c4_indexer", "c128", "c4_state", "c4_indexer_state", "c128_state",
    }  # fmt: skip
    assert {pool.name for pool in tensorrt_llm().pools} == {
        "swa", "compressor_kv", "compressor_score", "indexer_compressor_kv", "indexer_compressor_score",
        "compress", "indexer_compress",
    }  # fmt: skip


def test_pages_of_flash_have_the_bytes_that_vllm_reports() -> None:
    """vllm-project/vllm#54703 lists, for Flash without MTP, groups of 62, 22 + 21, 42 and 20 layers.

    Control: without the padding to 576 no sum agrees.
    """
    config = replace(flash(), num_nextn_predict_layers=0)
    reported = {"kv": 1002240, "window": 823680 + 786240, "csa_state": 870912, "hca_state": 656640}
    parts = {"kv": 62, "window": 22 + 21, "csa_state": 42, "hca_state": 20}
    assert vllm().page_bytes(config) == reported
    assert {p: sum(x.pool.name == p for x in vllm().places(config)) for p in parts} == parts
    bare = replace(
        vllm(),
        pools=tuple(replace(p, slots=tuple(replace(s, alignment=1) for s in p.slots)) for p in vllm().pools),
    )
    assert not set(bare.page_bytes(config).values()) & set(reported.values())


@pytest.mark.parametrize(
    "engine, rows",
    [
        ("vllm", {"entries": {64, 2}, "index_keys": {64}, "window": {64}, "rows_kv": {4, 8}}),
        ("sglang", {"entries": {64, 2}, "index_keys": {64}, "window": {256}, "rows_kv": {8, 128}}),
        ("tensorrt_llm", {"entries": {32, 1}, "index_keys": {32}, "window": {128}, "rows_kv": {128}}),
        ("tensorrt_llm of 256", {"entries": {64, 2}, "index_keys": {64}, "window": {256}, "rows_kv": {256}}),
    ],
)
def test_rows_a_page(engine: str, rows: dict[str, set[int]]) -> None:
    found: dict[str, set[int]] = {}
    for place in ENGINES[engine]().places(flash()):
        found.setdefault(place.layout.parts[0][0], set()).add(place.layout.rows)
    assert {name: found[name] for name in rows} == rows


@pytest.mark.parametrize("config, expected", [(flash(), 3514.25), (pro(), 5031.4375)])
def test_bytes_a_token(config: ModelConfig, expected: float) -> None:
    """Entries and FP4 index keys of a long context, where nothing is padded."""
    sizes = tensorrt_llm("fp8", "index_fp4", tokens=256).page_bytes(config)
    assert (sizes["compress"] + sizes["indexer_compress"]) / 256 == expected


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tensorrt_llm(tokens=64), "tokens=64 must be 128 or 256"),
        (lambda: vllm().places(replace(flash(), compress_ratios=(0, 0, *(4, 96) * 20, 4, 0))),
         "pool 'kv': tokens=256 must be a multiple of ratio=96"),
        (lambda: with_pools(sglang(), "c4_state", kept_blocks=1).places(flash()),
         "pool 'c4_state': a ring of 4 rows cannot hold 8 live ones"),
        (lambda: with_pools(sglang(), "swa", kept_blocks=1).places(flash()),
         "pool 'swa': layer 0 has no blocks of which a ring could keep some"),
    ],
)  # fmt: skip
def test_bad_groupings(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# Pages and prefixes -----------------------------------------------------------------------------------------


@each_engine
@given(st.sampled_from(sorted(CONFIGS)), st.sampled_from(EDGES))
def test_pages_are_those_with_live_rows(engine: str, name: str, length: int) -> None:
    config, grouping = CONFIGS[name], ENGINES[engine]()
    expected: dict[str, set[int]] = {pool.name: set() for pool in grouping.pools}
    for place in grouping.places(config):
        for cell in place.cells:
            a_token = config.compress_ratios[cell.layer] if cell.component.paged else 1
            for row in cell.live(config, length):
                expected[place.pool.name].add(row * a_token // place.pool.tokens)
    assert {pool: set(pages) for pool, pages in grouping.pages(config, length).items()} == expected


@each_engine
@given(st.data(), st.integers(0, 2**32 - 1), st.sampled_from((0, 255, 256, 1000, 2048, 2300)))
def test_the_usable_prefix_is_the_longest(engine: str, data: st.DataObject, seed: int, length: int) -> None:
    """Against the definition: the last multiple of `step` whose pages are all there."""
    config, grouping, rng = flash(), ENGINES[engine](), np.random.default_rng(seed)
    missing = data.draw(st.sampled_from([0.0, 0.02, 0.5]))
    pages = {pool.name: range(length // pool.tokens + 1) for pool in grouping.pools}
    present = {name: [p for p in numbers if rng.random() >= missing] for name, numbers in pages.items()}
    ends = range(0, length + 1, grouping.step)
    needed = {end: grouping.pages(config, end) for end in ends}
    usable = [end for end in ends if all(set(needed[end][n]) <= set(present[n]) for n in present)]
    assert grouping.usable_prefix(config, present, length) == max(usable)
    assert missing or max(usable) == length // grouping.step * grouping.step


def test_what_bounds_a_prefix() -> None:
    """A missing entry page cuts there, a missing window page only where a prefix ends. Control: a policy."""
    config, grouping = flash(), sglang()
    everything = {pool.name: set(range(8)) for pool in grouping.pools}

    def usable(changed: dict[str, set[int]], of: Grouping = grouping) -> int:
        return of.usable_prefix(config, everything | changed, 2048)

    assert usable({}) == 2048
    assert usable({"c4": {0, 1, 2, 4, 5, 6, 7}}) == 3 * 256
    assert usable({"swa": {0, 1, 2, 4, 5, 6, 7}}) == 2048
    assert usable({"swa": {0, 1, 2}}) == 3 * 256
    assert usable({"c128_state": set()}) == 2048  # empty at every multiple of 128
    assert usable({"c4_state": set()}) == 0
    assert grouping.usable_prefix(config, {}, 2048) == 0
    all_pages = with_pools(grouping, "swa", policy=HitPolicy.ALL_PAGES)
    assert usable({"swa": {0, 1, 2, 4, 5, 6, 7}}, all_pages) == 3 * 256


def test_one_minimum_over_pools_is_not_enough() -> None:
    """Windows were saved with pages 1 and 3, compressor rows with 1 and 2: only page 1 has both."""
    config, grouping = flash(), sglang()
    present = {pool.name: {0, 1, 2, 3} for pool in grouping.pools} | {"swa": {1, 3}, "c4_state": {1, 2}}
    once = min(grouping.pool_prefix(config, pool, present[pool.name], 1024) for pool in grouping.pools)
    assert once == 3 * 256 and not set(grouping.pages(config, once)["swa"]) <= present["swa"]
    assert grouping.usable_prefix(config, present, 1024) == 2 * 256


# Whole states -----------------------------------------------------------------------------------------------

QUANTISED = Numerics(dtype="bfloat16", fake_quantisation=True, tile=8, index_block=8, key_block=8)
EXACT = Numerics(tile=8, index_block=8, key_block=8)
MODELS = {
    "micro": (with_mtp(micro()), QUANTISED),
    "micro float32": (with_mtp(micro()), EXACT),
    "tiny": (tiny(), QUANTISED),
}
each_model = pytest.mark.parametrize("model", MODELS)
STEPS = 12
POISONS = {
    "0xff": lambda n: np.full(n, 0xFF, np.uint8),
    "quiet NaN": lambda n: np.resize(np.uint8([0xC0, 0x7F]), n),  # of bfloat16; its high byte is one of E4M3
    "noise": lambda n: np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8),
}


def formats(engine: str, model: str) -> Grouping:
    """The engine's grouping in the formats that hold this model's rows."""
    exact = MODELS[model][1] is EXACT
    return ENGINES[engine](*(("float32", "float32") if exact else ("fp8", "index_fp4")))


@functools.cache
def an_engine(model: str) -> Engine:
    config, numerics = MODELS[model]
    return Engine(Model(config, numerics), config, numerics, slots=3, max_length=320, fill=np.nan)


@functools.cache
def prefilled(model: str, length: int) -> tuple[object, Rows, Rows]:
    """A snapshot, and the logits and rows of the undisturbed run that continues it."""
    e = an_engine(model)
    seq = e.open()
    e.prefill(seq, tokens_of(model, length)[:length])
    snapshot = e.snapshot(seq)
    return snapshot, snapshot.rows, continued(e, seq, model, length)


def tokens_of(model: str, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, MODELS[model][0].vocab_size, length + STEPS)


def continued(e: Engine, seq, model: str, length: int) -> Rows:
    """Decodes from `length` on, closes the sequence and returns all bits seen."""
    logits = [e.decode(seq, int(token)) for token in tokens_of(model, length)[length:]]
    rows = e.rows(seq)
    e.close(seq)
    return rows | {"logits": np.stack(logits)}


def from_pages(model: str, length: int, grouping: Grouping, pages) -> Rows:
    """What the pages hold, and from the snapshot what the engine does not keep."""
    config, numerics = MODELS[model]
    found = unpack_state(pages, config, length, grouping, numerics)
    _, rows, _ = prefilled(model, length)
    absent = {name for name, _ in grouping.not_kept}
    kept = {name for name in rows if name.split(".")[-1] not in absent}
    assert set(found) == kept
    return rows | found


def dead_bytes(rows: Rows, config: ModelConfig, length: int, grouping: Grouping) -> dict:
    """For every page a mask of the bytes where nothing lives: those that show what the page held before."""
    clean, filled = (pack_state(rows, config, length, grouping, fill=fill) for fill in (0x00, 0xFF))
    return {
        pool: {n: as_bytes(page) != as_bytes(filled[pool][n]) for n, page in numbered.items()}
        for pool, numbered in clean.items()
    }


def as_bytes(page: bytes) -> np.ndarray:
    return np.frombuffer(page, np.uint8)


def live_bytes(rows: Rows, config: ModelConfig, grouping: Grouping) -> int:
    """How many bytes the live rows have by their formats, without padding."""
    total = 0
    for place in grouping.places(config):
        for cell in place.cells:
            form, (count, channels) = place.layout.form, rows[cell.name].shape
            used = sum(field.nbytes for field in form.fields if field.name != "padding")
            total += count * (used if form.scaling else channels * used // form.channels)
    return total


@each_model
@each_engine
@pytest.mark.parametrize("length", [1, 7, 127, 128, 131, 256, 261, 300])
def test_pages_hold_a_whole_state(model: str, engine: str, length: int) -> None:
    """tokenspeed#1612 and ds4#767 ask what must survive: with all else poisoned, decoding gives equal bits.

    Poisoned are padding, unused rows, and the channels of old compressor rows that no later entry pools.
    """
    config, grouping = MODELS[model][0], formats(engine, model)
    snapshot, rows, undisturbed = prefilled(model, length)
    pages = pack_state(rows, config, length, grouping)
    assert {pool: list(numbers) for pool, numbers in pages.items()} == {
        pool: list(numbers) for pool, numbers in grouping.pages(config, length).items()
    }
    dead = dead_bytes(rows, config, length, grouping)
    masks = [mask for numbered in dead.values() for mask in numbered.values()]
    assert sum((~mask).sum() for mask in masks) == live_bytes(rows, config, grouping)
    assert sum(mask.sum() for mask in masks) > 0

    for poison in POISONS.values():
        poisoned = {
            pool: {
                n: np.where(dead[pool][n], poison(len(page)), as_bytes(page)).tobytes()
                for n, page in numbered.items()
            }
            for pool, numbered in pages.items()
        }
        assert poisoned != pages
        found = from_pages(model, length, grouping, poisoned)
        assert compare(found, rows).same, compare(found, rows).first
    e = an_engine(model)
    seq = e.restore(replace(snapshot, rows=found))
    assert compare(continued(e, seq, model, length), undisturbed).same


@each_model
@each_engine
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.sampled_from([131, 261]),
    what=st.sampled_from(["flip", "poison"]),
)
def test_every_live_byte_counts(model: str, engine: str, seed: int, length: int, what: str) -> None:
    """The control: one live byte flipped, or set to 0xff, changes some bit of what is read."""
    grouping, rng = formats(engine, model), np.random.default_rng(seed)
    clean, dead = packed(model, engine, length)
    pages = {pool: dict(numbered) for pool, numbered in clean.items()}
    pool = rng.choice([name for name in pages if pages[name]])
    number = rng.choice(list(pages[pool]))
    page = as_bytes(pages[pool][number]).copy()
    alive = np.flatnonzero(~dead[pool][number] & (page != 0xFF))
    at = rng.choice(alive)
    page[at] = page[at] ^ 1 << rng.integers(8) if what == "flip" else 0xFF
    pages[pool][number] = page.tobytes()
    assert not compare(from_pages(model, length, grouping, pages), prefilled(model, length)[1]).same


@functools.cache
def packed(model: str, engine: str, length: int) -> tuple[dict, dict]:
    """Pages of a state, and their dead bytes."""
    config, grouping, rows = MODELS[model][0], formats(engine, model), prefilled(model, length)[1]
    return pack_state(rows, config, length, grouping), dead_bytes(rows, config, length, grouping)


@each_engine
def test_a_poisoned_window_row_changes_the_logits(engine: str) -> None:
    """The control for the decoding: it would find what the comparison of rows finds."""
    model, length = "micro", 131
    config, grouping = MODELS[model][0], formats(engine, model)
    snapshot, rows, undisturbed = prefilled(model, length)
    damaged = rows | {"layers.0.window": rows["layers.0.window"].copy()}
    damaged["layers.0.window"][-1] = 1.0
    found = from_pages(model, length, grouping, pack_state(damaged, config, length, grouping))
    e = an_engine(model)
    again = continued(e, e.restore(replace(snapshot, rows=found)), model, length)
    assert not compare({"logits": again["logits"]}, {"logits": undisturbed["logits"]}).same


def test_a_page_of_a_real_state_has_named_components() -> None:
    """What an engine developer does: one layer's part of a page, with the layout of its place."""
    config, grouping, length = MODELS["micro"][0], formats("vllm", "micro"), 131
    _, rows, _ = prefilled("micro", length)
    pages = pack_state(rows, config, length, grouping)["csa_state"]
    place = next(p for p in grouping.places(config) if p.pool.name == "csa_state")
    parts = read_page(pages[length // 4][: place.layout.nbytes], place.layout)
    assert list(parts) == ["rows_kv", "rows_score"]
    for name in parts:
        live = rows[f"layers.{place.layer}.{name}"]
        assert np.array_equal(parts[name][: len(live)].view(np.uint32), live.view(np.uint32)) and len(live)


def test_what_a_format_cannot_hold_is_named() -> None:
    """State in plain bfloat16 has no place in FP8 pages, and the message says which."""
    config, grouping = MODELS["micro"][0], formats("vllm", "micro")
    _, rows, _ = prefilled("micro", 261)
    broken = rows | {"layers.1.entries": rows["layers.1.entries"].copy()}
    broken["layers.1.entries"][64, 1] = np.inf
    with pytest.raises(
        NotRepresentable, match=r"layers.1.entries from its row 64 on: row 0, channel 1 is inf"
    ):
        pack_state(broken, config, 261, grouping)


def test_rows_that_are_missing_or_too_few_are_named() -> None:
    config, grouping = MODELS["micro"][0], formats("vllm", "micro")
    _, rows, _ = prefilled("micro", 261)
    name = "layers.1.overlap_kv"
    with pytest.raises(IncompleteSnapshot, match=f"{name} is missing, expected .4, 16. at length=261"):
        pack_state({n: r for n, r in rows.items() if n != name}, config, 261, grouping)
    with pytest.raises(
        IncompleteSnapshot, match=f"{name} is of shape .3, 16., expected .4, 16. at length=261"
    ):
        pack_state(rows | {name: rows[name][1:]}, config, 261, grouping)


@each_engine
def test_pages_that_are_missing_or_cut_are_named(engine: str) -> None:
    model, length = "micro", 261
    config, numerics = MODELS[model]
    grouping = formats(engine, model)
    _, rows, _ = prefilled(model, length)
    pages = pack_state(rows, config, length, grouping)
    for pool, numbered in pages.items():
        for number, page in numbered.items():
            without = pages | {pool: {n: p for n, p in numbered.items() if n != number}}
            with pytest.raises(
                MissingPage, match=rf"page {number} of pool '{pool}' is missing at length=261"
            ):
                unpack_state(without, config, length, grouping, numerics)
            cut = pages | {pool: numbered | {number: page[:-1]}}
            said = re.escape(f"page {number} of pool '{pool}' must have {len(page)} bytes (all layers), got ")
            with pytest.raises(PageSizeError, match=said):
                unpack_state(cut, config, length, grouping, numerics)
    assert unpack_state(pages, config, length, grouping, numerics).keys() <= rows.keys()


def test_layer_kinds_are_all_there() -> None:
    """The tests above rest on it."""
    config = MODELS["micro"][0]
    assert {config.kind(layer) for layer in config.state_layers} == set(LayerKind)
