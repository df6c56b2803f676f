"""Pallas GPU kernels for goldenkv, each with the contract of an op of `goldenkv.ops`, on paged state.

Every function takes `implementation="pallas" | "xla"`, `config=` for its block sizes, and `interpret=`. The
reference never imports this package: it finds `implementation` and `command` by their entry points.
"""

from .attention import AttentionConfig, dense_attention, sparse_attention
from .compressor import CompressorConfig, compress_blocks
from .indexer import IndexerConfig, index_scores, select
from .paging import gather_pages, pack_rows, scatter_pages, unpack_rows
from .topk import TopKConfig, top_k_ids

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "CompressorConfig",
    "IndexerConfig",
    "TopKConfig",
    "compress_blocks",
    "dense_attention",
    "gather_pages",
    "index_scores",
    "pack_rows",
    "scatter_pages",
    "select",
    "sparse_attention",
    "top_k_ids",
    "unpack_rows",
]
