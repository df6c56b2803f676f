"""goldenkv: a readable JAX reference of CSA+HCA attention whose state reloads bit for bit.

`goldenkv.ops` holds the mathematics, `goldenkv.config` the presets, `goldenkv.engine` the engine,
`goldenkv.state` components and snapshots, `goldenkv.gate` the reload gate. They load when first used.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_MODULES = ("config", "engine", "figures", "gate", "model", "ops", "parity", "state", "text")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
