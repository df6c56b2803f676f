"""The capacity calculator against published figures, formulas written out by hand, and real arrays."""

import dataclasses
import io
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from goldenkv import capacity
from goldenkv.capacity import CapacityError, Load, Report, page_size, read_model, snapshot_bytes
from goldenkv.capacity.tables import number, percent, size
from goldenkv.config import ConfigError, ModelConfig, flash, micro, pro, tiny, with_mtp
from goldenkv.state import COMPONENTS, cells, production

LAYERS = {"flash": (2, 21, 20), "pro": (0, 30, 31)}
"""Window-only, CSA and HCA layers."""

V32 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
GQA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


# Bytes a token ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "kv", "index", "published"),
    [
        ("fp8+fp4", 448 + 128 + 8, 64 + 4, (3514.25, 5031.4375)),
        ("fp8+fp8", 584, 128 + 4, (3850.25, 5511.4375)),
        ("bf16+fp8", 1024, 132, (6229, 8918)),
        ("bf16", 1024, 256, (6880, 9848)),
    ],
)
def test_v4_bytes_a_token(form: str, kv: int, index: int, published: tuple[float, float]) -> None:
    for name, expected in zip(LAYERS, published, strict=True):
        _, csa, hca = LAYERS[name]
        by_hand = csa * Fraction(kv + index, 4) + hca * Fraction(kv, 128)
        assert read_model(name, form).bytes_a_token() == by_hand == expected


@pytest.mark.parametrize(
    ("raw", "form", "family", "expected"),
    [
        (GQA, None, "GQA", 131_072),  # 2 x 32 x 8 x 128 x 2
        (GQA, "fp8", "GQA", 65_536),
        (GQA | {"num_key_value_heads": 32}, None, "MHA", 524_288),
        (GQA | {"num_key_value_heads": None}, None, "MHA", 524_288),
        (GQA | {"num_key_value_heads": 1}, None, "MQA", 16_384),
        (GQA | {"head_dim": None, "hidden_size": 4096}, None, "GQA", 131_072),
        (GQA | {"v_head_dim": 64}, None, "GQA", 32 * 8 * (128 + 64) * 2),
        (V32, None, "MLA with index keys", 48_068),  # 61 x (656 + 132)
        (V32, "bf16+fp8", "MLA with index keys", 61 * (1152 + 132)),
        (V32, "bf16", "MLA with index keys", 61 * (1152 + 256)),
        (V32 | {"index_head_dim": None}, None, "MLA", 61 * 1152),
        (V32 | {"index_head_dim": None}, "fp8", "MLA", 61 * 656),
    ],
)
def test_other_models(raw: dict, form: str | None, family: str, expected: int) -> None:
    model = read_model(raw, form)
    assert (model.family, model.bytes_a_token()) == (family, expected)
    assert model.growing_bytes(1000) == 1000 * expected and model.bounded_bytes(1000) == 0


def test_shares_of_v32() -> None:
    report = Report(tuple(map(read_model, ("flash", "pro", "v3.2"))), Load())
    assert report.reference.name == "v3.2"
    assert [percent(report.share(model)) for model in report.models] == ["7.31%", "10.47%", "100.00%"]
    without = Report(report.models[:2], Load())
    assert without.reference.name == "flash" and without.share(without.models[1]) == 5031.4375 / 3514.25


@pytest.mark.parametrize(
    ("name", "form", "gib"), [("flash", None, "3.43"), ("pro", None, "4.91"), ("pro", "bf16", "9.62")]
)
def test_a_million_tokens(name: str, form: str | None, gib: str) -> None:
    assert size(read_model(name, form).growing_bytes(2**20)) == f"{gib} GiB"


# Fixed state and snapshots ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "megabytes"), [("flash", "15.4"), ("pro", "23.3")])
def test_fixed_state(name: str, megabytes: str) -> None:
    """FP8 window rows and the published float32 buffers, by hand; the draft layer is not in the total."""
    window, csa, hca = LAYERS[name]
    by_hand = (window + csa + hca) * 128 * 584
    by_hand += csa * (2 * 8 * 1024 + 2 * 8 * 256) * 4 + hca * 2 * 128 * 512 * 4
    model, config = read_model(name), {"flash": flash(), "pro": pro()}[name]
    assert model.bounded_bytes(2**20) == by_hand
    assert f"{by_hand / 1e6:.1f}" == megabytes
    draft = 128 * 584 + 4 * config.hidden_size * 2
    assert model.bounded_bytes(2**20, draft=True) == draft
    no_mtp = dataclasses.replace(config, num_nextn_predict_layers=0)
    assert read_model(no_mtp).bounded_bytes(2**20) == by_hand
    assert read_model(no_mtp).bounded_bytes(2**20, draft=True) == 0


@pytest.mark.parametrize(("name", "published"), [("flash", 3_644_416), ("pro", 5_174_272)])
def test_snapshot(name: str, published: int) -> None:
    config, (window, csa, hca) = {"flash": flash(), "pro": pro()}[name], LAYERS[name]
    layers = window + csa + hca
    for length in (128, 3200, 2**20):
        assert snapshot_bytes(config, None, length) == published
        assert snapshot_bytes(config, None, length, exact=True) == published - layers * 584
    one_more = csa * 2 * (1024 + 256) * 4 + hca * 2 * 512 * 4  # a row of every compressor
    assert snapshot_bytes(config, None, 3201) == published + one_more
    bf16 = published + layers * 128 * (1024 - 584)
    assert snapshot_bytes(config, "bf16", 3200) == bf16


def test_a_hundred_requests_of_3200_tokens() -> None:
    """The worked case of an article, which takes 6.3 bytes a token: about 560 times too few."""
    model = read_model("flash")
    (snapshot,) = Report((model,), Load(context=3200, requests=100)).snapshots(model)
    assert (snapshot.pages, snapshot.nbytes) == (11_245_600, 3_644_416)  # one hand-over: 11 MB + 3.6 MB
    assert 100 * snapshot.pages == Report((model,), Load(3200, 100)).growing(model) == 1_124_560_000
    assert f"{100 * snapshot.nbytes / 1e9:.2f} GB" == "0.36 GB"
    assert 256 * model.bytes_a_token() == 899_648  # a block of 256 tokens: 0.9 MB, not 1.6 KB
    assert 550 < 100 * snapshot.pages / (100 * 3200 * 6.3) < 560


# Pages ------------------------------------------------------------------------------------------------------


def test_pages_of_flash() -> None:
    """256 tokens: 64 CSA and 2 HCA rows, padded to 576; index keys are not padded."""
    page = page_size(read_model("flash"), 256, 3200, 48)
    rows = 21 * 64 * (584 + 68) + 20 * 2 * 584
    padded = 21 * (65 * 576 + 64 * 68) + 20 * 3 * 576
    assert rows == 899_648 and page.nbytes == padded
    assert page.padding == pytest.approx(padded / rows - 1, rel=1e-12)  # the same quotient, rounded otherwise
    assert page.metadata == 48 / rows
    assert page.pages == 13 and page.apart == {}


def test_pages_smaller_than_an_hca_entry() -> None:
    """16 tokens: 4 CSA rows; HCA layers have pages of 128 tokens with one row, which fills 2 x 576 bytes."""
    page = page_size(read_model("flash"), 16, 3200, 48)
    assert page.apart == {"HCA": 128}
    assert page.nbytes == 21 * (5 * 576 + 4 * 68)
    rows, padded = 128 * Fraction(351425, 100), 8 * page.nbytes + 20 * 2 * 576
    assert page.padding == pytest.approx(float(padded / rows) - 1, rel=1e-12)
    assert page.metadata == pytest.approx(float(9 * 48 / rows), rel=1e-12)  # 8 keys and one for the HCA page
    assert page.pages == 200 + 25
    assert page_size(read_model("flash"), 16, 3201, 48).pages == 201 + 26


def test_metadata_share_against_an_article() -> None:
    """It gives up to 24% at 16 tokens and over 1% at 256, having 101 and 1,613 bytes a block."""
    model = read_model("flash")
    assert percent(24 / (16 * 6.3)) == "23.81%" and percent(24 / (256 * 6.3)) == "1.49%"
    assert page_size(model, 16, 3200, 24).metadata < 0.0005
    assert page_size(model, 256, 3200, 24).metadata < 0.00003
    shares = [page.metadata for page in capacity.page_table(model, 3200, 48)]
    padding = [page.padding for page in capacity.page_table(model, 3200, 48)]
    assert shares == sorted(shares, reverse=True) and padding == sorted(padding, reverse=True)
    assert all(p > 100 * m for p, m in zip(padding, shares, strict=True))  # padding is what costs


def test_pages_of_other_models_have_no_padding() -> None:
    for name, rows in (("v3.2", 48_068), ("llama-3.1-8b", 131_072)):
        for page in capacity.page_table(read_model(name), 1000, 48):
            assert (page.nbytes, page.padding, page.apart) == (page.tokens * rows, 0, {})
            assert page.pages == -(-1000 // page.tokens)
    only_windows = GQA | {"sliding_window": 512, "layer_types": ["sliding_attention"] * 32}
    assert capacity.page_table(read_model(only_windows), 1000, 48) == []


# Real state -------------------------------------------------------------------------------------------------

FLASH_LAYERS = dataclasses.replace(
    flash(), num_hidden_layers=2, compress_ratios=(4, 128), num_nextn_predict_layers=0, num_hash_layers=0
)
"""One CSA and one HCA layer in the shapes of Flash."""


def counted(arrays: dict[str, np.ndarray], *names: str) -> int:
    return sum(a.nbytes for name, a in arrays.items() if name.rsplit(".", 1)[1] in names)


@pytest.mark.parametrize("form", capacity.FORMATS["V4"])
@pytest.mark.parametrize(
    ("config", "page", "length"),
    [(FLASH_LAYERS, 256, 1024), (with_mtp(tiny()), 2048, 5000)],
    ids=["flash", "tiny"],
)
def test_production_arrays(config: ModelConfig, page: int, length: int, form: str) -> None:
    """Packed pages and buffers have the sizes calculated; a component less or a wrong ratio shows."""
    model, arrays = read_model(config, form), capacity.allocate(config, form, length, page)
    paged = {component.name for component in COMPONENTS if component.paged}
    bounded = {array.rsplit(".", 1)[1] for array in arrays} - paged
    pages = page_size(model, page, length, 0).nbytes * -(-length // page)
    fixed = model.bounded_bytes(length) + model.bounded_bytes(length, draft=True)
    assert counted(arrays, *paged) == pages
    assert counted(arrays, *bounded) == fixed
    for name in arrays:
        fewer = {n: a for n, a in arrays.items() if n != name}
        assert (counted(fewer, *paged), counted(fewer, *bounded)) != (pages, fixed), name
    other = dataclasses.replace(
        config, compress_ratios=tuple(64 if r == 128 else r for r in config.compress_ratios)
    )
    wrong = read_model(other, form)
    assert page_size(wrong, page, length, 0).nbytes * -(-length // page) != pages
    assert wrong.bounded_bytes(length) + wrong.bounded_bytes(length, draft=True) != fixed


def test_production_arrays_of_flash_layers_by_hand() -> None:
    """Shapes written out, so that no sum of the calculator or helper of `allocate` is trusted."""
    arrays = capacity.allocate(FLASH_LAYERS, None, 1024, 256)
    assert {name: a.shape for name, a in arrays.items()} == {
        "layers.0.window": (128, 584),
        "layers.0.entries": (4, 65 * 576),
        "layers.0.index_keys": (4, 64 * 68),
        "layers.0.rows_kv": (8, 1024 * 4),
        "layers.0.rows_score": (8, 1024 * 4),
        "layers.0.index_rows_kv": (8, 256 * 4),
        "layers.0.index_rows_score": (8, 256 * 4),
        "layers.1.window": (128, 584),
        "layers.1.entries": (4, 3 * 576),
        "layers.1.rows_kv": (128, 512 * 4),
        "layers.1.rows_score": (128, 512 * 4),
    }
    with pytest.raises(ValueError, match="page_size=64 must be a positive multiple of 128"):
        capacity.allocate(FLASH_LAYERS, None, 1024, 64)


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_pages_of_engines(name: str) -> None:
    """The pools of three engines, described elsewhere, agree; vLLM pads pages of index keys too."""
    config = {"flash": flash(), "pro": pro()}[name]

    def page(form: str, tokens: int) -> int:
        return page_size(read_model(name, form), tokens, 3200, 0).nbytes

    for index, form in (("index_fp4", "fp8+fp4"), ("index_fp8", "fp8+fp8")):
        pools = production.sglang(index=index).page_bytes(config)
        assert pools["c4"] + pools["c4_indexer"] + pools["c128"] == page(form, 256)
    fixed = sum(pools[f"{ring}_state"] for ring in ("c4", "c4_indexer", "c128"))
    windows = sum(LAYERS[name]) * 128 * 584
    assert fixed + windows == read_model(name).bounded_bytes(3200)
    trt = production.tensorrt_llm(tokens=128).page_bytes(config)
    assert trt["compress"] + trt["indexer_compress"] == page("bf16+fp8", 128)
    padding = LAYERS[name][1] * (15 * 576 - 64 * 132)
    assert production.vllm().page_bytes(config)["kv"] == page("fp8+fp8", 256) + padding


@pytest.mark.parametrize(
    ("config", "page", "lengths"),
    [(with_mtp(micro()), 8, (5, 16, 37)), (FLASH_LAYERS, 256, (700,))],
    ids=["micro", "flash"],
)
def test_rows_of_the_pool(config: ModelConfig, page: int, lengths: tuple[int, ...]) -> None:
    """What the project's own pool holds in bfloat16: growing rows, and the rest as a snapshot."""
    no_draft = [cell for cell in cells(config) if cell.layer in config.layers]
    for length in lengths:
        rows = capacity.pool_rows(config, "bfloat16", length, page)
        main = {cell.name: rows[cell.name].nbytes for cell in no_draft}
        grown = sum(main[cell.name] for cell in no_draft if cell.component.paged)
        assert grown == read_model(config, "bf16").growing_bytes(length)
        exact = snapshot_bytes(config, "bf16", length, exact=True)
        assert sum(main.values()) - grown == exact
        for cell in no_draft:  # a component that is left out shows, if it holds anything
            if main[cell.name] and not cell.component.paged:
                assert sum(main.values()) - grown - main[cell.name] != exact


@given(st.integers(0, 4096))
def test_lengths(length: int) -> None:
    """Whole entries only: a length counts as the multiple of 4, or 128, below it."""
    model = read_model("flash")
    by_hand = 21 * (length // 4) * 652 + 20 * (length // 128) * 584
    assert model.growing_bytes(length) == by_hand <= length * model.bytes_a_token()


# Tensor parallelism -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (64, 1)])
def test_gqa_is_split_then_repeated(ranks: int, heads: int) -> None:
    model = read_model(GQA)
    one = Report((model,), Load(1000, 3, ranks))
    assert model.bytes_a_token(ranks) == 32 * heads * 2 * 128 * 2
    assert one.all_ranks(model) == 131_072 * max(1, ranks // 8)
    assert one.growing(model) == 3 * 1000 * model.bytes_a_token(ranks)
    notes = list(capacity.notes(one))
    assert notes == (
        [f"model has 8 KV heads: {ranks} ranks hold everything {ranks // 8} times"] if ranks > 8 else []
    )


@pytest.mark.parametrize("name", ["flash", "v3", "v3.2"])
def test_one_kv_head_is_repeated(name: str) -> None:
    model = read_model(name)
    report = Report((model,), Load(3200, 1, 6))
    assert model.bytes_a_token(6) == model.bytes_a_token()
    assert report.all_ranks(model) == 6 * model.bytes_a_token()
    assert report.bounded(model) == model.bounded_bytes(3200)
    assert list(capacity.notes(report)) == [f"{name} has one KV head: 6 ranks hold everything 6 times"]


def test_heads_and_ranks_that_do_not_divide() -> None:
    with pytest.raises(CapacityError, match="tensor_parallel=3 must divide the 8 KV heads or be a multiple"):
        Report((read_model(GQA),), Load(tensor_parallel=3))


# Configurations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "sliding"),
    [
        ({"sliding_window": 512, "layer_types": ["sliding_attention"] * 20 + ["full_attention"] * 12}, 20),
        ({"sliding_window": 512, "sliding_window_pattern": 6}, 27),  # layers 5, 11, 17, 23, 29 are full
        ({"sliding_window": 512, "use_sliding_window": False, "max_window_layers": 28}, 0),
        ({"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 28}, 4),
        ({"sliding_window": 512, "model_type": "mistral"}, 32),
        ({"sliding_window": None, "model_type": "mistral"}, 0),
    ],
)
def test_sliding_windows(more: dict, sliding: int) -> None:
    model = read_model(GQA | more)
    assert model.layers == 32
    assert model.bytes_a_token() == (32 - sliding) * 4096
    for length in (100, 512, 5000):
        assert model.bounded_bytes(length) == sliding * 4096 * min(length, 512)


@pytest.mark.parametrize("make", [flash, pro])
def test_v4_files(make, tmp_path: Path) -> None:
    """The name, the mapping, a file and a folder say the same, the draft layer included."""
    raw = make().to_json() | {"torch_dtype": "bfloat16"}
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    (tmp_path / "other.json").write_text(json.dumps(raw))
    built_in = read_model(make.__name__)
    for source, name in (
        (folder, "a model"),
        (folder / "config.json", "a model"),
        (tmp_path / "other.json", "other"),
    ):
        found = read_model(source)
        assert found.name == name and found.groups == built_in.groups
    assert read_model(raw).groups == built_in.groups
    assert [group.kind for group in built_in.groups if group.draft] == ["MTP"]


def test_published_keys_that_do_not_matter() -> None:
    """MLA files also name attention heads; models that see pictures keep the rest in text_config."""
    more = {"num_key_value_heads": 128, "num_attention_heads": 128, "v_head_dim": 128, "hidden_size": 7168}
    assert read_model(V32 | more).bytes_a_token() == 48_068
    assert read_model({"model_type": "any", "text_config": GQA}).bytes_a_token() == 131_072
    drafting = read_model(V32 | {"num_nextn_predict_layers": 1})
    assert (drafting.bytes_a_token(), drafting.bytes_a_token(draft=True)) == (48_068, 788)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "num_attention_heads is missing"),
        (GQA | {"num_hidden_layers": None}, "num_hidden_layers is missing"),
        (GQA | {"num_hidden_layers": "32"}, "num_hidden_layers='32' must be an integer >= 1"),
        (GQA | {"num_key_value_heads": 0}, "num_key_value_heads=0 must be an integer >= 1"),
        (
            GQA | {"num_key_value_heads": 5},
            "num_attention_heads=32 must be a multiple of num_key_value_heads=5",
        ),
        (GQA | {"head_dim": None}, "hidden_size is missing"),
        (GQA | {"head_dim": None, "hidden_size": 100}, "hidden_size=100 is no multiple"),
        (GQA | {"index_head_dim": 128}, "index_head_dim needs kv_lora_rank"),
        (
            GQA | {"layer_types": ["full_attention"]},
            "layer_types must be a list of num_hidden_layers=32 names",
        ),
        (GQA | {"layer_types": ["linear_attention"] * 32}, "layer_types has linear_attention"),
        (GQA | {"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        (GQA | {"sliding_window": 4096}, "nothing says in which layers"),
        (GQA | {"full_attention_interval": 4}, "full_attention_interval=4 is not read: recurrent layers"),
        (GQA | {"num_kv_heads": 8}, "num_kv_heads=8 is not read: expected num_key_value_heads"),
        (V32 | {"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        (V32 | {"num_hidden_layers": -1}, "num_hidden_layers=-1 must be an integer"),
        ({"model_type": "deepseek_v4"}, "compress_ratios is missing"),
        ({"compress_ratios": [0, 4]}, "config.json lacks hidden_size|config.json lacks"),
        (flash().to_json() | {"num_key_value_heads": 8}, "num_key_value_heads=8 is not supported"),
    ],
)
def test_files_that_do_not_say_enough(raw: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^it: .*{said}"):
        read_model(raw, name="it")


@pytest.mark.parametrize(
    ("source", "form", "said"),
    [
        ("flash", "fp8", "format 'fp8' does not fit V4: V4 has fp8\\+fp4, fp8\\+fp8, bf16\\+fp8, bf16"),
        ("v3.2", "fp8+fp4", "does not fit MLA with index keys"),
        (GQA, "fp8+fp8", "does not fit GQA: GQA has bf16, fp8"),
        (GQA, "int3", "format 'int3' is unknown: GQA has bf16, fp8"),
    ],
)
def test_formats_that_do_not_fit(source: str | dict, form: str, said: str) -> None:
    with pytest.raises(CapacityError, match=said):
        read_model(source, form)


@pytest.mark.parametrize(
    "wrong",
    [
        {"context": 0},
        {"context": -1},
        {"requests": -1},
        {"context": 1.5},
        {"tensor_parallel": 0},
        {"metadata": -1},
    ],
)
def test_loads_that_mean_nothing(wrong: dict) -> None:
    (name,) = wrong
    with pytest.raises(CapacityError, match=f"{name}={wrong[name]} must be an integer >= "):
        Load(**wrong)
    with pytest.raises(CapacityError, match="no model to count"):
        Report((), Load())


# What a reader sees -----------------------------------------------------------------------------------------


def printed(report: Report, width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    for table in capacity.tables(report):
        console.print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit(width: int) -> None:
    """No cell is cut at 80 columns, with the longest numbers that are asked for in practice."""
    models = tuple(map(read_model, capacity.BUILT_IN))
    for load in (Load(2**20 + 77, 1000, 16), Load(3200, 100)):
        text = printed(Report(models, load), width)
        assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert "…" in printed(Report(models, load), 40)
    for shown in (
        "3,514.25",
        "3,066",
        "10,485,760",
        "15,420,416",
        "15,527,936",
        "23,270,400",
        "11,245,600",
        "3,644,416",
        "7.31%",
        "HCA, 128",
    ):
        assert shown in text, shown


def test_json_says_what_the_tables_say() -> None:
    models = tuple(map(read_model, capacity.BUILT_IN))
    report = Report(models, Load(3200, 100, 2))
    found = json.loads(json.dumps(report.to_json()))
    assert found["share_of"] == "v3.2" and found["metadata_bytes_a_page"] == 32 + 8 + 8
    by_name = {model["name"]: model for model in found["models"]}
    assert by_name["flash"]["bytes"] == 1_124_560_000 + 1_542_041_600
    assert by_name["flash"]["bytes_all_ranks"] == 2 * by_name["flash"]["bytes"]
    assert by_name["flash"]["snapshots"][0] == {
        "length": 3200, "bytes": 3_644_416, "bytes_exact": 3_619_304, "bytes_of_pages": 11_245_600,
    }  # fmt: skip
    assert by_name["flash"]["draft"] == {"bytes_a_token": 0, "bounded_bytes": 128 * 584 + 32_768}
    assert by_name["llama-3.1-8b"]["bytes_a_token"] == 65_536
    assert by_name["llama-3.1-8b"]["bytes_a_token_all_ranks"] == 131_072
    for model in found["models"]:
        parts = [(g["layers"], p) for g in model["groups"] if not g["draft"] for p in g["parts"]]
        assert sum(n * p["bytes_a_token_a_layer"] for n, p in parts) == model["bytes_a_token"]
        assert 100 * sum(n * p["bytes_a_layer"] for n, p in parts) == model["bytes"]


def test_numbers_for_people() -> None:
    assert [number(x) for x in (17, 3514.25, 4.5625, 131072, 0)] == [
        "17",
        "3,514.25",
        "4.5625",
        "131,072",
        "0",
    ]
    assert [size(x) for x in (512, 899_648, 15_420_416, 2**40)] == [
        "512 B",
        "878.6 KiB",
        "14.7 MiB",
        "1.00 TiB",
    ]
    shares = (0.0731, 1, 13.68, 0.008, 0.000053, 0.00000098, 0)
    assert [percent(x) for x in shares] == [
        "7.31%",
        "100.00%",
        "1,368%",
        "0.80%",
        "0.0053%",
        "0.000098%",
        "0.00%",
    ]


def test_the_picture_shows_the_numbers() -> None:
    """Bars add up to bytes a token, curves end in the bytes of 2^19 tokens, pages are those of the table."""
    pytest.importorskip("matplotlib", reason="the extra 'explore' is not installed")
    from goldenkv.figures import capacity_figure

    report = Report(tuple(map(read_model, ("flash", "v3.2"))), Load())
    bars, curves, pages = capacity_figure(report).axes
    widths: dict[int, float] = {}
    for bar in bars.patches:
        line = round(bar.get_y() + bar.get_height() / 2)
        widths[line] = widths.get(line, 0) + bar.get_width()
    assert widths == {0: 3514.25, 1: 48_068}
    assert [text.get_text() for text in bars.texts] == ["3,514.25  (7.31% of v3.2)", "48,068"]
    flash_model, v32 = report.models
    ends = [line.get_ydata()[-1] for line in curves.lines]  # V3.2 has no dotted line: nothing is fixed
    last = 2**19
    assert curves.lines[0].get_xdata()[-1] == 2**20
    assert ends == [
        flash_model.growing_bytes(2 * last) + 15_420_416, 15_420_416, v32.growing_bytes(2 * last)
    ]  # fmt: skip
    assert [list(line.get_ydata()) for line in pages.lines[:2]] == [
        [page.padding for page in report.pages(flash_model)],
        [page.metadata for page in report.pages(flash_model)],
    ]
    only_windows = read_model(GQA | {"sliding_window": 512, "model_type": "mistral"})
    bars, _, pages = capacity_figure(Report((flash_model, only_windows), Load(tensor_parallel=8))).axes
    assert [text.get_text() for text in bars.texts] == ["3,514.25", "0  (0.00% of flash)"]
    assert len(pages.lines) == 2 and pages.get_xticks().tolist() == list(capacity.PAGE_SIZES)
