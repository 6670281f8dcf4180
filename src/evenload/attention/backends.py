"""Select the attention backend by name, device and model."""

import torch

from evenload.attention import varlen_cuda
from evenload.attention.cpu_flash import CpuFlashAttention
from evenload.attention.range_attention import RangeAttention
from evenload.attention.reference import ReferenceAttention
from evenload.errors import ConfigError


def select_backend(
    name: str, device: str, soft_cap: float = 0.0, *, dtype: torch.dtype | None = None, head_dim: int | None = None
) -> RangeAttention:
    """Return the backend of that name; `auto` takes the fastest one for the device and the model.

    Args:
        soft_cap: of the model's attention scores, 0 = none.
        dtype, head_dim: of the model; needed for a GPU's kernels, which do not take all.

    Raises:
        ConfigError: unknown name, or a backend that does not run on this device, dtype, head dimension or soft cap.
    """
    if name == "auto":
        kernels = "cpu_flash" if device == "cpu" else "varlen_cuda"
        runs = device == "cpu" or not varlen_cuda.varlen_refusal(dtype, head_dim)
        name = kernels if runs and not soft_cap else "reference"
    if name == "reference":
        return ReferenceAttention(soft_cap)
    if soft_cap:
        raise ConfigError(
            f"attention backend {name} has no soft cap of scores, the model's is {soft_cap}; use 'auto' or 'reference'"
        )
    if name == "cpu_flash":
        if device != "cpu":
            raise ConfigError(f"attention backend cpu_flash runs on the CPU only, the device is {device}; use 'auto'")
        return CpuFlashAttention()
    if name in varlen_cuda.IMPLEMENTATIONS:
        if device == "cpu":
            raise ConfigError(f"attention backend {name} runs on a GPU only, the device is {device}; use 'auto'")
        if why := varlen_cuda.varlen_refusal(dtype, head_dim):
            raise ConfigError(f"attention backend {name} {why}")
        return varlen_cuda.VarlenCudaAttention(name)
    known = ", ".join(("auto", "reference", "cpu_flash", *varlen_cuda.IMPLEMENTATIONS))
    raise ConfigError(f"unknown attention backend '{name}'; choose one of {known}")
