"""The page groupings of vLLM, SGLang and TensorRT-LLM, each as one description.

Facts are cited from their public sources and threads as of 2026; what is not described is said in each place.
No engine keeps the streams of the last token: they come with the last token, which is computed again anyway.
"""

from __future__ import annotations

from ..config import LayerKind
from .groupings import Grouping, HitPolicy, Pool, Slot
from .layouts import FLASHMLA_ALIGNMENT

ALL, TRAILING = HitPolicy.ALL_PAGES, HitPolicy.TRAILING_PAGES
CSA, HCA = frozenset({LayerKind.CSA}), frozenset({LayerKind.HCA})
WINDOW = ("window", "draft_window")
STATE = ("rows_kv", "rows_score", "overlap_kv", "overlap_score")
INDEX_STATE = ("index_rows_kv", "index_rows_score", "index_overlap_kv", "index_overlap_score")
NO_STREAMS = (("draft_streams", "after a hit the last token must be computed again before the first draft"),)


def vllm(kv: str = "fp8", index: str = "index_fp8") -> Grouping:
    """vLLM: blocks of 256 tokens for entries and index keys, 64 for windows, 4 and 8 for compressor rows.

    A state row holds kv, then score, in float32 (`vllm/models/deepseek_v4/compressor.py`; `sparse_swa.py` has
    the windows). With `fp8` every page is padded to a multiple of 576 bytes. The sizes of its groups for
    Flash are in vllm-project/vllm#54703; the windows are two groups there, for allocation only. MTP layers
    have window pages too: `mtp.py` uses the same layer; no measurement was found.

    Args:
        kv, index: row formats. vLLM has `index_fp4` on Blackwell devices only.
    """
    align = FLASHMLA_ALIGNMENT if kv in ("fp8", "fp8_fnuz") else 1
    pools = (
        Pool("kv", 256, ALL, (Slot(("entries",), kv, align), Slot(("index_keys",), index, align))),
        Pool("window", 64, TRAILING, (Slot(WINDOW, kv, align),)),
        Pool("csa_state", 4, TRAILING, tuple(Slot(s, "float32", align) for s in (STATE, INDEX_STATE)), CSA),
        Pool("hca_state", 8, TRAILING, (Slot(STATE, "float32", align),), HCA),
    )
    return Grouping("vLLM", pools, NO_STREAMS)


def sglang(kv: str = "fp8", index: str = "index_fp8") -> Grouping:
    """SGLang: pages of 256 tokens in seven pools.

    The names (there with the prefix "deepseek_v4_", but for swa) and policies are those of
    `mem_cache/hicache_storage.py`. A state page keeps the rows of its last 8 tokens (ratio 4) or 128 in a
    ring, kv then score (`deepseek_v4_compress_state.py`). Hits end at multiples of 256, where `c128_state` is
    empty: later versions do not store it (sgl-project/sglang#27294). The windows of MTP layers travel with
    `swa`. Not described: rings twice as long under speculative decoding, the one-row ring of the online
    compressor, and the unified pool of AMD devices.
    """
    pools = (
        Pool("swa", 256, TRAILING, (Slot(WINDOW, kv),)),
        Pool("c4", 256, ALL, (Slot(("entries",), kv),), CSA),
        Pool("c4_indexer", 256, ALL, (Slot(("index_keys",), index),)),
        Pool("c128", 256, ALL, (Slot(("entries",), kv),), HCA),
        Pool("c4_state", 256, TRAILING, (Slot(STATE, "float32"),), CSA, kept_blocks=2),
        Pool("c4_indexer_state", 256, TRAILING, (Slot(INDEX_STATE, "float32"),), kept_blocks=2),
        Pool("c128_state", 256, TRAILING, (Slot(STATE, "float32"),), HCA, kept_blocks=1),
    )
    return Grouping("SGLang", pools, NO_STREAMS)


def tensorrt_llm(kv: str = "bfloat16", index: str = "index_fp8", tokens: int = 128) -> Grouping:
    """TensorRT-LLM: seven roles, each with blocks of 128 or 256 tokens.

    The roles (there with the prefix "deepseek_v4_") are those of `sparse/deepseek_v4/params.py`; the sliding
    ones keep a row for every token of a block and have windows of 128, 8 and 128 tokens (`cache_manager.py`).
    Its `fp8` rows come in runs of 64 with their scales behind them and no padding (`footer_scale_kv.py`). MTP
    layers are layers of the same manager. Not described: FP8 rows under one scale a tensor, and the NVFP4
    pages of its cold tier.

    Raises:
        ValueError: another block size.
    """
    if tokens not in (128, 256):
        raise ValueError(f"{tokens=} must be 128 or 256, as TensorRT-LLM requires of tokens_per_block")

    def pool(name: str, policy: HitPolicy, components: tuple[str, ...], form: str) -> Pool:
        run = 64 if form == "fp8" else 0
        return Pool(name, tokens, policy, (Slot(components, form, alignment=1, run=run),))

    pools = (
        pool("swa", TRAILING, WINDOW, kv),
        pool("compressor_kv", TRAILING, ("rows_kv", "overlap_kv"), "float32"),
        pool("compressor_score", TRAILING, ("rows_score", "overlap_score"), "float32"),
        pool("indexer_compressor_kv", TRAILING, ("index_rows_kv", "index_overlap_kv"), "float32"),
        pool("indexer_compressor_score", TRAILING, ("index_rows_score", "index_overlap_score"), "float32"),
        pool("compress", ALL, ("entries",), kv),
        pool("indexer_compress", ALL, ("index_keys",), index),
    )
    return Grouping("TensorRT-LLM", pools, NO_STREAMS)
