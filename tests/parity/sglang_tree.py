"""SGLang's radix cache on a CPU, with a pool that only counts: for comparisons, never needed otherwise.

It runs where these can be imported: sglang 0.5.23, installed with `pip install --no-deps`, and what its
imports name beyond torch and transformers: aiohttp (aiohappyeyeballs, aiosignal, frozenlist, multidict,
propcache, yarl), apache-tvm-ffi, compressed-tensors, gguf, loguru, msgspec, orjson, pybase64, sentencepiece,
starlette, torchvision and triton, each with `--no-deps` too. A folder made with `--target` will do: name it
in PYTHONPATH.
"""

from __future__ import annotations

import importlib.metadata
from array import array
from typing import Any

import numpy as np


class NoSGLang(ImportError):
    """SGLang, or a package that it imports, is not installed."""


def modules() -> tuple[Any, Any]:
    """Its modules of the radix cache and of that cache's parameters. Raises NoSGLang."""
    try:
        import torch

        vision = importlib.metadata.version("torchvision")
        if torch.version.cuda is None and "cpu" not in vision and not hasattr(torch.ops.torchvision, "nms"):
            # torchvision as built for GPUs has no operators beside this torch and describes two all the same.
            # SGLang takes only constants from it.
            _OPERATORS.append(torch.library.Library("torchvision", "FRAGMENT"))
            for name in ("nms", "qnms"):
                _OPERATORS[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from sglang.srt.mem_cache import base_prefix_cache, radix_cache
    except ImportError as error:
        raise NoSGLang(f"no SGLang to compare with: {error}") from error
    return radix_cache, base_prefix_cache


_OPERATORS: list[Any] = []
"""Definitions last as long as the object that made them."""


class CountingPool:
    """Stands for the memory pool: the cache tells it which token slots it gives back."""

    device = "cpu"

    def __init__(self) -> None:
        self.freed = 0

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        self.freed += len(slots)


class SGLangTree:
    """The cache with plain LRU, spoken to in whole tokens."""

    def __init__(self, page_size: int) -> None:
        self.radix, self.base = modules()
        self.page_size, self.pool = page_size, CountingPool()
        self.cache = self.radix.RadixCache.create_simulated(page_size=page_size, mock_allocator=self.pool)

    def key(self, tokens: np.ndarray) -> Any:
        """Token ids as it takes them."""
        return self.radix.RadixKey(array("q", tokens.astype(np.int64).tobytes()))

    def match(self, key: Any) -> int:
        """The length of a hit in tokens. It counts as a use."""
        return self.cache.match_prefix(self.base.MatchPrefixParams(key=key)).device_prefix_len

    def insert(self, key: Any, slots: Any) -> int:
        """Publishes token slots; the length that was there already."""
        return self.cache.insert(self.base.InsertParams(key=key, value=slots)).prefix_len

    def evict(self, tokens: int) -> int:
        """Frees at least so many tokens, whole leaves; how many."""
        self.pool.freed = 0
        self.cache.evict(self.base.EvictParams(num_tokens=tokens))
        return self.pool.freed

    def rest_of(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens up to the end of the node in which these end or part, by its own keys."""
        node, found, key = self.cache.root_node, [], self.key(tokens).page_aligned(self.page_size)
        while len(key) and (child := node.children.get(key.child_key(self.page_size))) is not None:
            found.append(np.array(child.key.raw_token_ids(), np.int32))
            shared = child.key.match(key, page_size=self.page_size)
            if shared < len(child.key):
                break
            node, key = child, key[shared:]
        return np.concatenate(found) if found else np.zeros(0, np.int32)
