"""Objects as JAX arrays: on a device, or in host memory that the device reaches by itself.

Every object is one array, put and taken whole: a scatter into `pinned_host` aborts the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .errors import Full, Unavailable
from .memory import Held, MemoryStore


class DeviceStore(MemoryStore):
    """Objects in a JAX memory kind. What is put is copied: no array of the caller is ever kept.

    Args:
        capacity: bytes of all heads and payloads together, at most. Memory is taken as objects come; where
            the device has none left, that is `Full` too.
        kind: "device", "pinned_host" or "unpinned_host", where the device has it.
        device: by default the first.
        clock, verify: see `VerifiedStore`.

    Raises:
        ValueError: the device has no such memory.
    """

    def __init__(
        self,
        capacity: int,
        kind: str = "device",
        *,
        device: jax.Device | None = None,
        clock: Callable[[], float] = time.time,
        verify: bool = True,
    ) -> None:
        super().__init__(capacity, clock, verify)
        device = jax.devices()[0] if device is None else device
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if kind not in kinds:
            raise ValueError(f"{kind=} must be among {kinds}, the memories of {device}")
        self.name = kind
        self._sharding = SingleDeviceSharding(device, memory_kind=kind)

    def _copy_in(self, entry: Held, payload: np.ndarray) -> None:
        # device_put makes no copy of an aligned numpy array, may_alias=False or not: it gets one of its own.
        own = np.array(payload)
        try:
            entry.memory = jax.device_put(own, self._sharding)
            entry.memory.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise Full(f"the device has no room for {len(payload)} bytes") from error
            raise Unavailable("the device failed") from error
        assert entry.memory.sharding.memory_kind == self._sharding.memory_kind

    def _copy_out(self, entry: Held, buffer: np.ndarray) -> None:
        try:
            # Of the array itself, JAX would keep the copy in host memory for as long as the object is here.
            np.copyto(buffer, np.asarray(entry.memory.addressable_data(0)))
        except jax.errors.JaxRuntimeError as error:
            raise Unavailable("the device failed") from error

    def _free(self, entry: Held) -> None:
        if entry.memory is not None:
            entry.memory.delete()
