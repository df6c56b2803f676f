"""The GPU that kernels are lowered and compiled for, which need not be there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

DEVICE = "NVIDIA H200"
PROCESSORS = 132
REGISTERS, SHARED, THREADS, PROGRAMS = 65536, 233472, 2048, 32
"""What one processor has: registers, bytes of shared memory, and threads and programs at a time."""

RESERVED = 1024
"""Bytes of shared memory that each program takes besides its own."""

TARGET = f"""
gpu_device_info {{
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: {PROCESSORS}
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {THREADS}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: {REGISTERS}
  registers_per_block_limit: {REGISTERS}
  shared_memory_per_core: {SHARED}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {SHARED - RESERVED}
}}
platform_name: "CUDA"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{DEVICE}"
"""
"""What XLA must know of it to compile for it: the data sheet, as a `GpuTargetConfigProto`."""


def absent_device() -> AbstractContextManager[Any]:
    """Within it Pallas lowers for this GPU; from JAX 0.11 on it asks for the device's name and size."""
    device = AbstractDevice(device_kind=DEVICE, platform="cuda", num_cores=PROCESSORS)
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))
