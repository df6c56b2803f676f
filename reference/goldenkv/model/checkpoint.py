"""Checkpoints: a folder with `config.json` and safetensors, read into a `Model` and written from one.

Tensors are read some rows at a time, dequantised where they are quantised, straight into the parameter they
belong to: loading takes the memory of the model and little more. `checkpoint_names` knows the names,
`checkpoint_quantised` the formats, `checkpoint_files` the files.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from ..config import ModelConfig, Numerics
from .checkpoint_files import INDEX, WEIGHTS, CheckpointError, StoredTensor, listed, open_tensors
from .checkpoint_names import RULES, Names, Piece, parameters, released_dtype, scale_name
from .checkpoint_quantised import FORMATS, SCALE_DTYPES, Format, dequantise, quantise, read_scale
from .weights import Model

_Placed = list[tuple[nnx.Variable, list[Piece]]]
_FLOATS = ("BF16", "F16", "F32", "F64")
_INTEGERS = ("I32", "I64")
_READ_VALUES = 1 << 20
"""Values read at a time."""

_ALIGNMENT = 64
"""JAX on a CPU takes memory so aligned as it is; anything else it copies."""

_QUANTISED_CONFIG = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
"""What `config.json` of a quantised checkpoint says besides; the loader goes by the tensors."""


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    numerics: Numerics | None = None,
    config: ModelConfig | None = None,
) -> tuple[ModelConfig, Model]:
    """Reads a checkpoint folder under either name scheme; under the published one it may be quantised.

    Tensors of an MTP layer are not read if the configuration has none.

    Args:
        directory: holds `config.json` and `model.safetensors`, or shards and `model.safetensors.index.json`.
        numerics: its dtype is that of the model's matrices, whatever the file holds.
        config: instead of the folder's `config.json`.

    Raises:
        CheckpointError: a file or tensor is missing, a tensor is unknown or has another shape or dtype,
            scales do not fit their weight, or a quantised value is NaN.
        ConfigError: `config.json` is not a DeepSeek-V4 configuration.
    """
    folder = Path(directory)
    if config is None:
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{os.fspath(folder)!r} holds no config.json, and no config was given")
        config = ModelConfig.load(folder)
    model = Model(config, numerics, seed=None)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(folder, stack, skip=() if config.num_nextn_predict_layers else ("mtp.",))
        placed = _placed(model, _scheme(model, tensors))
        _check(folder, placed, tensors)
        for parameter, pieces in placed:
            values = _aligned(parameter.shape, parameter.dtype)
            for piece in pieces:
                _fill(piece.view(values), piece, tensors)
            if np.issubdtype(values.dtype, np.integer):
                _check_experts(pieces[0].tensor, values, config)
            parameter.set_value(jax.device_put(values))
    return config, model


def _placed(model: Model, names: str) -> _Placed:
    """Every parameter and where it lies, which must be somewhere."""
    placed = list(parameters(model, names))
    if not all(pieces for _, pieces in placed):
        raise CheckpointError(
            f"the name scheme {names!r} has no MTP layer: it needs a configuration with "
            "num_nextn_predict_layers=0"
        )
    return placed


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that JAX need not copy, so that no parameter is held twice."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _fill(view: np.ndarray, piece: Piece, tensors: dict[str, StoredTensor]) -> None:
    """Reads a piece into its elements of a parameter, cast to the dtype of the parameter."""
    tensor, form = tensors[piece.tensor], None
    if tensor.dtype in FORMATS:
        name = scale_name(piece.tensor)
        form, scale = FORMATS[tensor.dtype], read_scale(name, tensors[name])
    step = max(1, _READ_VALUES // int(np.prod(view.shape[1:])))
    for at in range(0, len(view), step):
        target = view[at : at + step]
        first = piece.first + at
        rows = tensor.read(first, first + len(target))
        if form is not None:
            rows = dequantise(piece.tensor, rows, form, scale, first=first, inputs=view.shape[1])
        target[...] = rows


def _scheme(model: Model, found: Iterable[str]) -> str:
    """The name scheme that explains most of the names."""
    held = set(found)

    def known(names: str) -> int:
        return len({piece.tensor for _, pieces in parameters(model, names) for piece in pieces} & held)

    return max(RULES, key=known)


def _check(folder: Path, placed: _Placed, found: dict[str, StoredTensor]) -> None:
    """Raises CheckpointError unless `found` is exactly what is expected."""
    expected = {p.tensor: (p.shape, parameter.dtype) for parameter, pieces in placed for p in pieces}
    scales: dict[str, tuple[int, ...]] = {}
    shapes, dtypes = [], []
    for name in sorted(expected.keys() & found.keys()):
        (shape, want), has = expected[name], found[name]
        form = FORMATS.get(has.dtype) if len(shape) == 2 and name.endswith(".weight") else None
        if form is not None:
            scales[scale_name(name)] = form.scale_shape(shape)
            shape = form.stored_shape(shape)
        elif has.dtype not in (_INTEGERS if np.issubdtype(want, np.integer) else _FLOATS):
            dtypes.append(f"{name} expected {want}, found {has.dtype}")
        if shape != has.shape:
            shapes.append(f"{name} expected {list(shape)}, found {list(has.shape)}")
    for name in sorted(scales.keys() & found.keys()):
        if scales[name] != found[name].shape:
            shapes.append(f"{name} expected {list(scales[name])}, found {list(found[name].shape)}")
        if found[name].dtype not in SCALE_DTYPES:
            dtypes.append(f"{name} expected {' or '.join(SCALE_DTYPES)}, found {found[name].dtype}")
    extra = sorted(found.keys() - expected.keys() - scales.keys())
    alone = sorted({scale_name(name) for name in expected if name.endswith(".weight")} & set(extra))
    problems = {
        "missing": [f"{n} {list(expected[n][0])}" for n in sorted(expected.keys() - found.keys())],
        "unknown": [f"{n} {list(found[n].shape)}" for n in extra if n not in alone],
        "other shape": shapes,
        "other dtype": dtypes,
        "quantised without its scale": sorted(scales.keys() - found.keys()),
        "scale of no quantised weight": alone,
    }
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
    """A tensor to be written (with its scales, if quantised), and the parameters that fill it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    form: Format | None
    parts: list[tuple[nnx.Variable, Piece]]

    @property
    def tensors(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Dtype and shape of what `build` makes."""
        if self.form is None:
            return {self.name: (self.dtype, self.shape)}
        scales = (np.dtype(ml_dtypes.float8_e8m0fnu), self.form.scale_shape(self.shape))
        return {self.name: (self.dtype, self.form.stored_shape(self.shape)), scale_name(self.name): scales}

    @property
    def bytes(self) -> int:
        return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in self.tensors.values())

    def build(self) -> dict[str, np.ndarray]:
        """The arrays by name, contiguous: safetensors writes memory as it lies and ignores strides."""
        out = np.empty(self.shape, self.dtype if self.form is None else np.float32)
        rows = out.reshape(-1, *self.shape[-1:]) if out.ndim > 1 else out
        for parameter, piece in self.parts:
            part = piece.view(np.asarray(parameter[...]))
            rows[piece.first : piece.first + len(part)] = part
        if self.form is None:
            return {self.name: out}
        return dict(zip(self.tensors, quantise(self.name, out, self.form), strict=True))


_RELEASED = {
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "I64": np.dtype(np.int64),
}


def _plans(model: Model, names: str, quantised: bool = False) -> list[_Plan]:
    if quantised and names != "published":
        raise ValueError(f"quantised=True needs names='published', got {names=}")
    plans: dict[str, _Plan] = {}
    for parameter, pieces in _placed(model, names):
        for piece in pieces:
            released = released_dtype(piece.tensor) if quantised else ""
            dtype = _RELEASED.get(released, np.dtype(parameter.dtype))
            new = _Plan(piece.tensor, piece.shape, dtype, FORMATS.get(released), [])
            plans.setdefault(piece.tensor, new).parts.append((parameter, piece))
    return [plans[name] for name in sorted(plans)]


def state_dict(model: Model, names: Names = "published") -> dict[str, np.ndarray]:
    """All weights by the names and in the shapes of a checkpoint."""
    return {name: array for plan in _plans(model, names) for name, array in plan.build().items()}


def layout(
    model: Model, names: Names = "published", *, quantised: bool = False
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor that `save_checkpoint` would write; the model needs no values."""
    return {name: entry for plan in _plans(model, names, quantised) for name, entry in plan.tensors.items()}


def save_checkpoint(
    model: Model,
    config: ModelConfig,
    directory: str | os.PathLike[str],
    *,
    names: Names = "published",
    shard_bytes: int | None = None,
    quantised: bool = False,
) -> None:
    """Writes `config.json` and the weights to a folder that holds no weights yet.

    Args:
        names: the name scheme.
        shard_bytes: the most tensor bytes in a file (a tensor with its scales can exceed it alone); None
            writes one file.
        quantised: in the dtypes of the released checkpoints: FP8 and FP4 matrices with their scales, most
            others in BF16. Otherwise in the dtypes the weights have.

    Raises:
        CheckpointError: the folder holds safetensors already (old shards beside new ones mislead readers),
            the scheme has no names for an MTP layer, or a matrix to be quantised holds NaN.
    """
    folder = Path(directory)
    if shard_bytes is not None and shard_bytes < 1:
        raise ValueError(f"{shard_bytes=} must be at least 1")
    plans = _plans(model, names, quantised)
    folder.mkdir(parents=True, exist_ok=True)
    old = sorted(path.name for path in folder.glob("*.safetensors*"))
    if old:
        raise CheckpointError(f"{os.fspath(folder)!r} already holds {listed(old)}")
    said = {key: value for key, value in config.to_json().items() if key not in _QUANTISED_CONFIG}
    said |= _QUANTISED_CONFIG if quantised else {}
    (folder / "config.json").write_text(json.dumps(said, indent=1) + "\n")
    shards: list[list[_Plan]] = [[]]
    size = 0
    for plan in plans:
        if shard_bytes is not None and shards[-1] and size + plan.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.bytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = WEIGHTS if shard_bytes is None else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        arrays = {name: array for plan in shard for name, array in plan.build().items()}
        save_file(arrays, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(arrays, file)
    if shard_bytes is not None:
        index = {"metadata": {"total_size": sum(p.bytes for p in plans)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
