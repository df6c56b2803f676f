"""What a model is (`ModelConfig`) and how it is computed (`Numerics`)."""

from .model import CSA_RATIO, ConfigError, LayerKind, ModelConfig, Yarn
from .numerics import Numerics
from .presets import bench, flash, micro, pro, tiny, with_mtp

__all__ = [
    "CSA_RATIO",
    "ConfigError",
    "LayerKind",
    "ModelConfig",
    "Numerics",
    "Yarn",
    "bench",
    "flash",
    "micro",
    "pro",
    "tiny",
    "with_mtp",
]
