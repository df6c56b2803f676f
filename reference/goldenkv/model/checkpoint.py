"""Checkpoints: a folder with `config.json` and safetensors, read into a `Model` and written from one.

Two name schemes are known: "published" (the released checkpoints) and "transformers" (its class
`DeepseekV4ForCausalLM`). This is the only file that knows names of checkpoint tensors. Matrices are stored
[outputs, inputs] there and [inputs, outputs] here. Tensors are read one at a time, so that loading takes the
memory of the model and of one parameter.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from ..config import ModelConfig, Numerics
from .checkpoint_files import INDEX, WEIGHTS, CheckpointError, listed, open_tensors
from .weights import Model

Names = Literal["published", "transformers"]


class _As(enum.Enum):
    """How a parameter lies in its tensor or tensors."""

    SAME = "as here"
    MATRIX = "the last two axes swapped"
    GROUPED = "one matrix, in which the groups follow each other"
    EXPERTS = "the last two axes swapped; published: one tensor an expert"
    GATE = "as EXPERTS; transformers: the first half of a tensor shared with UP"
    UP = "as EXPERTS; transformers: the second half of a tensor shared with GATE"


_Row = tuple[str, str, str, _As]


def _under(path: str, published: str, transformers: str, rows: Sequence[_Row]) -> tuple[_Row, ...]:
    """The rows of a module, with the names of that module before theirs."""
    return tuple((f"{path}.{a}", f"{published}.{b}", f"{transformers}.{c}", how) for a, b, c, how in rows)


# Path in `Model`, published name, transformers' name, how it lies.
_MIXING = (("weight", "fn", _As.MATRIX), ("base", "base", _As.SAME), ("scale", "scale", _As.SAME))
_COMPRESSOR: tuple[_Row, ...] = (
    ("kv", "wkv.weight", "kv_proj.weight", _As.MATRIX),
    ("gate", "wgate.weight", "gate_proj.weight", _As.MATRIX),
    ("position_bias", "ape", "position_bias", _As.SAME),
    ("norm", "norm.weight", "kv_norm.weight", _As.SAME),
)
_ATTENTION: tuple[_Row, ...] = (
    ("q_down", "wq_a.weight", "q_a_proj.weight", _As.MATRIX),
    ("q_norm", "q_norm.weight", "q_a_norm.weight", _As.SAME),
    ("q_up", "wq_b.weight", "q_b_proj.weight", _As.MATRIX),
    ("kv", "wkv.weight", "kv_proj.weight", _As.MATRIX),
    ("kv_norm", "kv_norm.weight", "kv_norm.weight", _As.SAME),
    ("sinks", "attn_sink", "sinks", _As.SAME),
    ("out_group", "wo_a.weight", "o_a_proj.weight", _As.GROUPED),
    ("out", "wo_b.weight", "o_b_proj.weight", _As.MATRIX),
    *_under("compressor", "compressor", "compressor", _COMPRESSOR),
    ("indexer.q", "indexer.wq_b.weight", "compressor.indexer.q_b_proj.weight", _As.MATRIX),
    ("indexer.head_weight", "indexer.weights_proj.weight",
     "compressor.indexer.scorer.weights_proj.weight", _As.MATRIX),
    *_under("indexer.compressor", "indexer.compressor", "compressor.indexer", _COMPRESSOR),
)  # fmt: skip
_MOE: tuple[_Row, ...] = (
    ("router", "gate.weight", "gate.weight", _As.MATRIX),
    ("bias", "gate.bias", "gate.e_score_correction_bias", _As.SAME),
    ("table", "gate.tid2eid", "gate.tid2eid", _As.SAME),
    ("gate", "experts.{expert}.w1.weight", "experts.gate_up_proj", _As.GATE),
    ("up", "experts.{expert}.w3.weight", "experts.gate_up_proj", _As.UP),
    ("down", "experts.{expert}.w2.weight", "experts.down_proj", _As.EXPERTS),
    ("shared_gate", "shared_experts.w1.weight", "shared_experts.gate_proj.weight", _As.MATRIX),
    ("shared_up", "shared_experts.w3.weight", "shared_experts.up_proj.weight", _As.MATRIX),
    ("shared_down", "shared_experts.w2.weight", "shared_experts.down_proj.weight", _As.MATRIX),
)
_LAYER: tuple[_Row, ...] = (
    *((f"attention_mixing.{a}", f"hc_attn_{b}", f"attn_hc.{b}", how) for a, b, how in _MIXING),
    ("attention_norm", "attn_norm.weight", "input_layernorm.weight", _As.SAME),
    *_under("attention", "attn", "self_attn", _ATTENTION),
    *((f"moe_mixing.{a}", f"hc_ffn_{b}", f"ffn_hc.{b}", how) for a, b, how in _MIXING),
    ("moe_norm", "ffn_norm.weight", "post_attention_layernorm.weight", _As.SAME),
    *_under("moe", "ffn", "mlp", _MOE),
)
_TABLE: tuple[_Row, ...] = (
    ("embed", "embed.weight", "model.embed_tokens.weight", _As.SAME),
    *_under("layers.*", "layers.*", "model.layers.*", _LAYER),
    *((f"head_mixing.{a}", f"hc_head_{b}", f"model.hc_head.hc_{b}", how) for a, b, how in _MIXING),
    ("norm", "norm.weight", "model.norm.weight", _As.SAME),
    ("head", "head.weight", "lm_head.weight", _As.MATRIX),
)
_RULES: dict[str, dict[str, tuple[str, _As]]] = {
    "published": {path: (published, how) for path, published, _, how in _TABLE},
    "transformers": {path: (transformers, how) for path, _, transformers, how in _TABLE},
}
_MTP = "mtp."
_FLOATS = ("BF16", "F16", "F32", "F64")
_INTEGERS = ("I32", "I64")
_QUANTISED = ("F4", "F6", "F8", "I4", "I8", "U8")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor of the file (or `part` of one) and the elements of a parameter that it holds.

    `axes` puts the parameter's axes in the order of the file; `index` then chooses along the first.
    """

    tensor: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    part: tuple[slice, ...] = ()
    index: int | EllipsisType = ...

    def view(self, parameter: np.ndarray) -> np.ndarray:
        """The elements of `parameter`, with the axes in the order of the file."""
        return np.transpose(parameter, self.axes)[self.index]


def _pieces(name: str, how: _As, shape: tuple[int, ...]) -> list[_Piece]:
    """Where a parameter of `shape` lies."""
    match how:
        case _As.SAME:
            return [_Piece(name, shape, tuple(range(len(shape))))]
        case _As.MATRIX:
            return [_Piece(name, shape[::-1], (1, 0))]
        case _As.GROUPED:
            groups, inputs, rank = shape
            return [_Piece(name, (groups * rank, inputs), (0, 2, 1))]
    axes = (0, 2, 1)
    experts, inputs, outputs = shape
    if "{expert}" in name:
        return [_Piece(name.format(expert=e), (outputs, inputs), axes, index=e) for e in range(experts)]
    if how is _As.EXPERTS:
        return [_Piece(name, (experts, outputs, inputs), axes)]
    half = slice(0, outputs) if how is _As.GATE else slice(outputs, 2 * outputs)
    return [_Piece(name, (experts, 2 * outputs, inputs), axes, part=(slice(None), half))]


def _parameters(model: Model, names: str) -> Iterator[tuple[nnx.Variable, list[_Piece]]]:
    """Every parameter of `model` and where it lies."""
    if names not in _RULES:
        raise ValueError(f"{names=} must be one of {sorted(_RULES)}")
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            layer = str(path[1]) if path[0] == "layers" else ""
            key = ".".join("*" if i == 1 and layer else str(step) for i, step in enumerate(path))
            name, how = _RULES[names][key]
            yield node, _pieces(name.replace("*", layer), how, node.shape)


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    numerics: Numerics | None = None,
    config: ModelConfig | None = None,
) -> tuple[ModelConfig, Model]:
    """Reads a checkpoint folder under either name scheme.

    `Model` has no MTP layers yet: tensors named `mtp.*` are accepted and not read.

    Args:
        directory: holds `config.json` and `model.safetensors`, or shards and `model.safetensors.index.json`.
        numerics: its dtype is that of the model's matrices, whatever the file holds.
        config: instead of the folder's `config.json`.

    Raises:
        CheckpointError: a file or tensor is missing, a tensor is unknown, has another shape, or is quantised.
        ConfigError: `config.json` is not a DeepSeek-V4 configuration.
    """
    folder = Path(directory)
    if config is None:
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{os.fspath(folder)!r} holds no config.json, and no config was given")
        config = ModelConfig.load(folder)
    model = Model(config, numerics)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(folder, stack, skip=_MTP)
        found = {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in tensors.items()}
        parameters = list(_parameters(model, _scheme(model, found)))
        _check(folder, parameters, found)
        for parameter, pieces in parameters:
            values = np.empty(parameter.shape, parameter.dtype)
            for piece in pieces:
                view = piece.view(values)
                view[...] = tensors[piece.tensor][piece.part or ...].reshape(view.shape)
            if np.issubdtype(values.dtype, np.integer):
                _check_experts(pieces[0].tensor, values, config)
            parameter.set_value(jnp.asarray(values))
    return config, model


def _scheme(model: Model, found: Iterable[str]) -> str:
    """The name scheme that explains most of the names."""
    held = set(found)

    def known(names: str) -> int:
        return len({piece.tensor for _, pieces in _parameters(model, names) for piece in pieces} & held)

    return max(_RULES, key=known)


def _check(
    folder: Path,
    parameters: Sequence[tuple[nnx.Variable, list[_Piece]]],
    found: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    """Raises CheckpointError unless `found` (dtype and shape by name) is exactly what is expected."""
    quantised = [f"{n} ({dtype})" for n, (dtype, _) in sorted(found.items()) if dtype.startswith(_QUANTISED)]
    if quantised:
        raise CheckpointError(f"quantised checkpoints are not supported yet: {listed(quantised)}")
    expected = {p.tensor: (p.shape, parameter.dtype) for parameter, pieces in parameters for p in pieces}
    missing = [f"{n} {list(expected[n][0])}" for n in sorted(expected.keys() - found.keys())]
    extra = [f"{n} {list(found[n][1])}" for n in sorted(found.keys() - expected.keys())]
    shapes, dtypes = [], []
    for name in sorted(expected.keys() & found.keys()):
        (shape, want), (dtype, has) = expected[name], found[name]
        if shape != has:
            shapes.append(f"{name} expected {list(shape)}, found {list(has)}")
        if dtype not in (_INTEGERS if np.issubdtype(want, np.integer) else _FLOATS):
            dtypes.append(f"{name} expected {want}, found {dtype}")
    problems = {"missing": missing, "unknown": extra, "other shape": shapes, "other dtype": dtypes}
    if any(problems.values()):
        text = "; ".join(f"{what}: {listed(items)}" for what, items in problems.items() if items)
        raise CheckpointError(f"the tensors of {os.fspath(folder)!r} do not fit the configuration. {text}")


def _check_experts(name: str, table: np.ndarray, config: ModelConfig) -> None:
    """A gather would clamp a number that is no expert without a word."""
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= config.n_routed_experts:
        raise CheckpointError(f"{name} holds {low} to {high}, expected 0 to {config.n_routed_experts - 1}")


@dataclass(frozen=True, slots=True)
class _Plan:
    """A tensor to be written, and the parameters that fill it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: list[tuple[nnx.Variable, _Piece]]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def build(self) -> np.ndarray:
        """The tensor, contiguous: safetensors writes memory as it lies and ignores strides."""
        out = np.empty(self.shape, self.dtype)
        for parameter, piece in self.parts:
            target = out[piece.part]
            target[...] = piece.view(np.asarray(parameter[...])).reshape(target.shape)
        return out


def _plans(model: Model, names: str) -> dict[str, _Plan]:
    plans: dict[str, _Plan] = {}
    for parameter, pieces in _parameters(model, names):
        for piece in pieces:
            plan = plans.setdefault(piece.tensor, _Plan(piece.shape, np.dtype(parameter.dtype), []))
            plan.parts.append((parameter, piece))
    return dict(sorted(plans.items()))


def state_dict(model: Model, names: Names = "published") -> dict[str, np.ndarray]:
    """All weights by the names and in the shapes of a checkpoint."""
    return {name: plan.build() for name, plan in _plans(model, names).items()}


def save_checkpoint(
    model: Model,
    config: ModelConfig,
    directory: str | os.PathLike[str],
    *,
    names: Names = "published",
    shard_bytes: int | None = None,
) -> None:
    """Writes `config.json` and the weights, in the dtypes they have, to a folder that holds no weights yet.

    Args:
        names: the name scheme.
        shard_bytes: the most tensor bytes in a file (one tensor can exceed it alone); None writes one file.

    Raises:
        CheckpointError: the folder holds safetensors already (old shards beside new ones mislead readers).
    """
    folder = Path(directory)
    if shard_bytes is not None and shard_bytes < 1:
        raise ValueError(f"{shard_bytes=} must be at least 1")
    plans = _plans(model, names)
    folder.mkdir(parents=True, exist_ok=True)
    old = sorted(path.name for path in folder.glob("*.safetensors*"))
    if old:
        raise CheckpointError(f"{os.fspath(folder)!r} already holds {listed(old)}")
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=1) + "\n")
    shards: list[list[str]] = [[]]
    size = 0
    for name, plan in plans.items():
        if shard_bytes is not None and shards[-1] and size + plan.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += plan.bytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = WEIGHTS if shard_bytes is None else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: plans[name].build() for name in shard}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if shard_bytes is not None:
        index = {"metadata": {"total_size": sum(p.bytes for p in plans.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
