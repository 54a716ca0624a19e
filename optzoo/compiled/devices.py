"""Compile-only devices: TPU slices and GPUs that this machine does not have."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from ..core.extras import how_to_install

# The chips that libtpu supports, and their available slices.
_TPUS = {
    "v4": "2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4",
    "v5e": "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16",
    "v5p": "2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4",
    "v6e": "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16",
    "tpu7x": "2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4",
}
_SLICE = re.compile(rf"({'|'.join(_TPUS)}):(\d+(?:x\d+){{1,2}})")
_GPU = re.compile(r"h100(?::(\d+))?")
# The properties of an absent GPU that XLA needs: NVIDIA's data sheet of the H100 SXM5, in the
# format of `stream_executor/device_description.proto`.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices_of(device: str) -> list[Any]:
    """The devices with a name, to make a mesh of them and to compile for it.

    Example:
        >>> import optzoo
        >>> optzoo.compiled.devices_of("cpu")[0].platform
        'cpu'

    Args:
        device: ``"cpu"``; a TPU slice, such as ``"v5e:4x4"``; or ``"h100"`` and ``"h100:8"``, GPUs
            of one host. TPUs and GPUs need not be present.

    Raises:
        ImportError: if the compiler for the device is not installed.
        TypeError: if ``device`` is not a string.
        ValueError: if the device is unknown.
    """
    if not isinstance(device, str):
        raise TypeError(f"device must be a string such as 'v5e:4x4', got {device!r}")
    return list(_devices_of(device))


@functools.cache
def _devices_of(device: str) -> tuple[Any, ...]:
    if device == "cpu":
        return tuple(jax.devices("cpu"))
    if _SLICE.fullmatch(device):
        _need("libtpu", "tpu", device)
        # Do not query the metadata server, and allow other processes to load the compiler.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
        return _topology(device, platform="tpu", topology_name=device)
    if found := _GPU.fullmatch(device):
        _need("jax_cuda12_plugin", "gpu", device)
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        shape = f"1x{found[1] or 1}x1"  # hosts, GPUs of a host, and parts of a GPU
        return _topology(device, shape, platform="cuda", target_config=_H100, topology=shape)
    slices = "; ".join(f"{chip}: {shapes}" for chip, shapes in _TPUS.items())
    raise ValueError(
        f"device must be 'cpu', 'h100', 'h100:8' or a TPU slice, got {device!r}; known slices are "
        f"{slices}"
    )


def _topology(device: str, *args: str, **kwargs: Any) -> tuple[Any, ...]:
    try:
        return tuple(topologies.get_topology_desc(*args, **kwargs).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device={device!r} is not supported by its compiler: {reason}") from error


def _need(module: str, extra: str, device: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"device={device!r} needs {module}: {how_to_install(extra)}")
