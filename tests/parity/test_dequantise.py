"""Quantised weights: a file that torch wrote, read here and by the FP8 code of transformers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from goldenkv.config import ModelConfig, micro
from goldenkv.model.checkpoint import load_checkpoint, save_checkpoint, state_dict
from goldenkv.model.weights import Model

torch = pytest.importorskip("torch")
finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
safetensors_torch = pytest.importorskip("safetensors.torch")


def dequantised_by_transformers(weight: "torch.Tensor", scale: "torch.Tensor") -> np.ndarray:
    step = finegrained.Fp8Dequantize(hf_quantizer=None)
    return step.convert({"weight": weight, "weight_scale_inv": scale})["weight"].float().numpy()


def random_file(folder: Path, config: ModelConfig) -> dict[str, "torch.Tensor"]:
    """A quantised checkpoint, rewritten by torch with random values and scales; its tensors."""
    save_checkpoint(Model(config), config, folder, quantised=True)
    file = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    draw = torch.Generator().manual_seed(0)

    def bytes_like(tensor: "torch.Tensor", low: int, high: int) -> "torch.Tensor":
        return torch.randint(low, high, tensor.shape, generator=draw, dtype=torch.int32).to(torch.uint8)

    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e8m0fnu:
            tensors[name] = bytes_like(tensor, 100, 150).view(tensor.dtype)
        elif tensor.dtype == torch.int8:
            tensors[name] = bytes_like(tensor, 0, 256).view(tensor.dtype)
        elif tensor.dtype == torch.float8_e4m3fn:
            finite = bytes_like(tensor, 0, 254)
            tensors[name] = (finite + (finite >= 127)).view(tensor.dtype)  # 127 and 255 are NaN
    safetensors_torch.save_file(tensors, file)
    return tensors


def test_every_quantised_matrix(tmp_path: Path) -> None:
    """Equal bits. transformers gives bfloat16, which holds each of these products exactly.

    The sizes are multiples of the blocks here: transformers takes the block from the shape of the scales, and
    so reads no matrix with a smaller block at an edge.
    """
    config = replace(
        micro(), hidden_size=256, q_lora_rank=256, moe_intermediate_size=128, head_dim=64, o_lora_rank=64
    )
    tensors = random_file(tmp_path, config)
    found = state_dict(load_checkpoint(tmp_path)[1])
    compared = 0
    for name, scale in tensors.items():
        if name.endswith(".scale") and scale.dtype == torch.float8_e8m0fnu:
            weight = name.removesuffix("scale") + "weight"
            theirs = dequantised_by_transformers(tensors[weight], scale)
            assert found[weight].tobytes() == theirs.tobytes(), weight
            compared += 1
    assert compared > 40
