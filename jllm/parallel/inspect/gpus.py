"""GPUs that a step can be compiled and estimated for, whether they are here or not."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import jax
from jax.experimental import topologies

from jllm.gpu_memory import memory_fraction
from jllm.roofline import HARDWARE, Hardware


@dataclass(frozen=True)
class GPU:
    """One kind of GPU, several of which stand in one host.

    Attributes:
      hardware: its reachable rates.
      memory_bytes: as CUDA reports them.
      link: what joins it to the others.
      link_bytes_per_s: of that, in one direction, from the datasheet.
      compute_capability: 90 for 9.0.
      cores: streaming multiprocessors.
      threads_per_core, fpus_per_core, shared_memory_per_core, l2_cache_bytes, clock_ghz: what else
        XLA's compiler wants to know of it.
    """

    hardware: Hardware
    memory_bytes: int
    link: str
    link_bytes_per_s: float
    compute_capability: int
    cores: int
    threads_per_core: int
    fpus_per_core: int
    shared_memory_per_core: int
    l2_cache_bytes: int
    clock_ghz: float

    @property
    def name(self) -> str:
        return self.hardware.name

    @property
    def limit_bytes(self) -> int:
        """What an engine finds as ``bytes_limit``: JAX's share of the memory."""
        return int(self.memory_bytes * memory_fraction())

    def description(self) -> str:
        """The GPU in the words of XLA's compiler (a TargetConfigProto)."""
        major, minor = divmod(self.compute_capability, 10)
        extension = "feature_extension: ACCELERATED_FEATURES" if major == 9 else ""
        per_block = self.shared_memory_per_core - 1024  # CUDA keeps 1 KiB for itself
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_memory_per_core}
              threads_per_core_limit: {self.threads_per_core}
              core_count: {self.cores}
              fpus_per_core: {self.fpus_per_core}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {int(self.hardware.read_bytes_per_s)}
              l2_cache_size: {self.l2_cache_bytes}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory_bytes}
              shared_memory_per_block_optin: {per_block}
              cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "NVIDIA {self.name.upper()}"
        """


_H200 = GPU(
    HARDWARE["h200"],
    150_111_000_000,
    "NVLink 4",
    450e9,
    compute_capability=90,
    cores=132,
    threads_per_core=2048,
    fpus_per_core=128,
    shared_memory_per_core=228 << 10,
    l2_cache_bytes=50 << 20,
    clock_ghz=1.98,
)
GPUS = {
    "h200": _H200,
    "h100": replace(_H200, hardware=HARDWARE["h100"], memory_bytes=85_000_000_000),
    "a100": GPU(
        HARDWARE["a100"],
        85_000_000_000,
        "NVLink 3",
        300e9,
        compute_capability=80,
        cores=108,
        threads_per_core=2048,
        fpus_per_core=64,
        shared_memory_per_core=164 << 10,
        l2_cache_bytes=40 << 20,
        clock_ghz=1.41,
    ),
    "l40s": GPU(
        HARDWARE["l40s"],
        47_600_000_000,
        "PCIe 4.0 x16",
        32e9,
        compute_capability=89,
        cores=142,
        threads_per_core=1536,
        fpus_per_core=128,
        shared_memory_per_core=100 << 10,
        l2_cache_bytes=96 << 20,
        clock_ghz=2.52,
    ),
}


def named(name: str) -> GPU:
    """The GPU of this name; raises ValueError if it is not known."""
    if name not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, not {name!r}.")
    return GPUS[name]


def compile_only(gpu: GPU, count: int) -> list[jax.Device] | None:
    """So many of these GPUs in one host, to compile for and not to run on; None where JAX's plugin
    for NVIDIA GPUs, which holds the compiler, is not installed."""
    # Else the plugin looks for CUDA's libraries, which only running needs.
    skip = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(skip)
    os.environ[skip] = "1"
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=gpu.description(), topology=f"1x1x{count}"
        )
    except NotImplementedError:
        return None
    finally:
        if before is None:
            del os.environ[skip]
        else:
            os.environ[skip] = before
    return list(topology.devices)
