"""Names of checkpoint tensors: where each parameter of `Model` lies, and how the released files store it.

Two name schemes are known: "published" (the released checkpoints) and "transformers" (its class
`DeepseekV4ForCausalLM`, which has no MTP layer). Matrices are stored [outputs, inputs] there and [inputs,
outputs] here.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal

import numpy as np
from flax import nnx

from .weights import Model

Names = Literal["published", "transformers"]


class As(enum.Enum):
    """How a parameter lies in its tensor or tensors."""

    SAME = "as here"
    MATRIX = "the last two axes swapped"
    GROUPED = "one matrix, in which the groups follow each other"
    EXPERTS = "the last two axes swapped; published: one tensor an expert"
    GATE = "as EXPERTS; transformers: the first half of a tensor shared with UP"
    UP = "as EXPERTS; transformers: the second half of a tensor shared with GATE"


_Row = tuple[str, str, str, As]
_UNNAMED = "?"
"""In place of a name: the scheme has none."""


def _under(path: str, published: str, transformers: str, rows: Sequence[_Row]) -> tuple[_Row, ...]:
    """The rows of a module, with the names of that module before theirs."""
    return tuple((f"{path}.{a}", f"{published}.{b}", f"{transformers}.{c}", how) for a, b, c, how in rows)


# Path in `Model`, published name, transformers' name, how it lies.
_MIXING = (("weight", "fn", As.MATRIX), ("base", "base", As.SAME), ("scale", "scale", As.SAME))
_COMPRESSOR: tuple[_Row, ...] = (
    ("kv", "wkv.weight", "kv_proj.weight", As.MATRIX),
    ("gate", "wgate.weight", "gate_proj.weight", As.MATRIX),
    ("position_bias", "ape", "position_bias", As.SAME),
    ("norm", "norm.weight", "kv_norm.weight", As.SAME),
)
_ATTENTION: tuple[_Row, ...] = (
    ("q_down", "wq_a.weight", "q_a_proj.weight", As.MATRIX),
    ("q_norm", "q_norm.weight", "q_a_norm.weight", As.SAME),
    ("q_up", "wq_b.weight", "q_b_proj.weight", As.MATRIX),
    ("kv", "wkv.weight", "kv_proj.weight", As.MATRIX),
    ("kv_norm", "kv_norm.weight", "kv_norm.weight", As.SAME),
    ("sinks", "attn_sink", "sinks", As.SAME),
    ("out_group", "wo_a.weight", "o_a_proj.weight", As.GROUPED),
    ("out", "wo_b.weight", "o_b_proj.weight", As.MATRIX),
    *_under("compressor", "compressor", "compressor", _COMPRESSOR),
    ("indexer.q", "indexer.wq_b.weight", "compressor.indexer.q_b_proj.weight", As.MATRIX),
    ("indexer.head_weight", "indexer.weights_proj.weight",
     "compressor.indexer.scorer.weights_proj.weight", As.MATRIX),
    *_under("indexer.compressor", "indexer.compressor", "compressor.indexer", _COMPRESSOR),
)  # fmt: skip
_MOE: tuple[_Row, ...] = (
    ("router", "gate.weight", "gate.weight", As.MATRIX),
    ("bias", "gate.bias", "gate.e_score_correction_bias", As.SAME),
    ("table", "gate.tid2eid", "gate.tid2eid", As.SAME),
    ("gate", "experts.{expert}.w1.weight", "experts.gate_up_proj", As.GATE),
    ("up", "experts.{expert}.w3.weight", "experts.gate_up_proj", As.UP),
    ("down", "experts.{expert}.w2.weight", "experts.down_proj", As.EXPERTS),
    ("shared_gate", "shared_experts.w1.weight", "shared_experts.gate_proj.weight", As.MATRIX),
    ("shared_up", "shared_experts.w3.weight", "shared_experts.up_proj.weight", As.MATRIX),
    ("shared_down", "shared_experts.w2.weight", "shared_experts.down_proj.weight", As.MATRIX),
)
_LAYER: tuple[_Row, ...] = (
    *((f"attention_mixing.{a}", f"hc_attn_{b}", f"attn_hc.{b}", how) for a, b, how in _MIXING),
    ("attention_norm", "attn_norm.weight", "input_layernorm.weight", As.SAME),
    *_under("attention", "attn", "self_attn", _ATTENTION),
    *((f"moe_mixing.{a}", f"hc_ffn_{b}", f"ffn_hc.{b}", how) for a, b, how in _MIXING),
    ("moe_norm", "ffn_norm.weight", "post_attention_layernorm.weight", As.SAME),
    *_under("moe", "ffn", "mlp", _MOE),
)
_MTP: tuple[_Row, ...] = (
    ("embed_norm", "enorm.weight", _UNNAMED, As.SAME),
    ("embed_proj", "e_proj.weight", _UNNAMED, As.MATRIX),
    ("streams_norm", "hnorm.weight", _UNNAMED, As.SAME),
    ("streams_proj", "h_proj.weight", _UNNAMED, As.MATRIX),
    *((f"layer.{path}", published, _UNNAMED, how) for path, published, _, how in _LAYER),
    *((f"head_mixing.{a}", f"hc_head_{b}", _UNNAMED, how) for a, b, how in _MIXING),
    ("norm", "norm.weight", _UNNAMED, As.SAME),
)
_TABLE: tuple[_Row, ...] = (
    ("embed", "embed.weight", "model.embed_tokens.weight", As.SAME),
    *_under("layers.*", "layers.*", "model.layers.*", _LAYER),
    *((f"head_mixing.{a}", f"hc_head_{b}", f"model.hc_head.hc_{b}", how) for a, b, how in _MIXING),
    ("norm", "norm.weight", "model.norm.weight", As.SAME),
    ("head", "head.weight", "lm_head.weight", As.MATRIX),
    *_under("mtp", "mtp.0", _UNNAMED, _MTP),
)
RULES: dict[str, dict[str, tuple[str, As]]] = {
    "published": {path: (published, how) for path, published, _, how in _TABLE},
    "transformers": {path: (transformers, how) for path, _, transformers, how in _TABLE},
}
"""Scheme -> path in `Model` ("*" for the layer) -> name of its tensor, and how it lies there."""

_RELEASED = (
    (r".*\.experts\.\d+\.w[123]\.weight", "I8"),
    (r".*\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|indexer\.wq_b|shared_experts\.w[123])\.weight", "F8_E4M3"),
    (r"mtp\.\d+\.[eh]_proj\.weight", "F8_E4M3"),
    (r".*\.weight", "BF16"),
    (r".*\.tid2eid", "I64"),
    (r".*", "F32"),
)
"""The first pattern that fits a published name gives its dtype in the released V4-Flash and V4-Pro."""


def released_dtype(name: str) -> str:
    """The safetensors dtype of a tensor in the released checkpoints; "I8" is packed FP4."""
    return next(dtype for pattern, dtype in _RELEASED if re.fullmatch(pattern, name))


def scale_name(name: str) -> str:
    """Published name of the scales of a quantised weight."""
    return name.removesuffix("weight") + "scale"


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a tensor of the file, and the elements of a parameter that they hold.

    `first` counts rows of the tensor (`shape`) as a matrix with its last axis. `axes` puts the parameter's
    axes in the order of the file; `index` then chooses along the first.
    """

    tensor: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    first: int = 0
    index: int | EllipsisType = ...

    def view(self, parameter: np.ndarray) -> np.ndarray:
        """The elements of `parameter`, with the axes in the order of the file."""
        return np.transpose(parameter, self.axes)[self.index]


def _pieces(name: str, how: As, shape: tuple[int, ...]) -> list[Piece]:
    """Where a parameter of `shape` lies."""
    match how:
        case As.SAME:
            return [Piece(name, shape, tuple(range(len(shape))))]
        case As.MATRIX:
            return [Piece(name, shape[::-1], (1, 0))]
    axes = (0, 2, 1)
    count, inputs, outputs = shape
    if how is As.GROUPED:
        return [Piece(name, (count * outputs, inputs), axes, g * outputs, g) for g in range(count)]
    if "{expert}" in name:
        return [Piece(name.format(expert=e), (outputs, inputs), axes, index=e) for e in range(count)]
    height = outputs if how is As.EXPERTS else 2 * outputs
    start = outputs if how is As.UP else 0
    return [
        Piece(name, (count, height, inputs), axes, first=e * height + start, index=e) for e in range(count)
    ]


def parameters(model: Model, names: str) -> Iterator[tuple[nnx.Variable, list[Piece]]]:
    """Every parameter of `model` and where it lies: nowhere, if the scheme has no name for it."""
    if names not in RULES:
        raise ValueError(f"{names=} must be one of {sorted(RULES)}")
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            layer = str(path[1]) if path[0] == "layers" else ""
            key = ".".join("*" if i == 1 and layer else str(step) for i, step in enumerate(path))
            name, how = RULES[names][key]
            named = not name.startswith(_UNNAMED)
            yield node, _pieces(name.replace("*", layer), how, node.shape) if named else []
