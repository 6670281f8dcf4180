"""torchtitan 0.3.0 on CPU processes: to try it without GPUs, and for tests. On GPUs none of this is needed.

Import this before torchtitan, which looks for an accelerator when it is imported, and falls back to CUDA. What differs:

- the device: "cpu" is answered, and `torch.cpu` gets the questions about memory that torchtitan asks a GPU;
- attention: torchtitan's two kernels for packed documents do not train on a CPU (`varlen_attn` is a CUDA kernel in
  bfloat16, `flex_attention` has no backward pass there), so `LoopedAttention` runs the documents one after another, in
  the precision they come in, behind the same metadata;
- sums of gradients: torchtitan asks FSDP for a sum times 1, which gloo does not know; FSDP is told to sum;
- Triton, which PyTorch's wheels for CPUs come without: the one module of torchtitan that needs it when it is imported,
  kernels of expert parallelism on GPUs, is an empty one;
- `torch.distributed.set_timeout`, public only after PyTorch 2.13, which torchtitan 0.3.0 calls after the first step.
"""

import importlib.util
import itertools
import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda device=None: "cpu"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 34)
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout


class _NoKernels(ModuleType):
    """Every name is there and is nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):  # what Python asks of any module
            raise AttributeError(name)


if importlib.util.find_spec("triton") is None:
    _KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules[_KERNELS] = _NoKernels(_KERNELS)
# Only now: it asks for the device while it is imported.
from torchtitan.models.common.attention import FlexAttention, VarlenAttention  # noqa: E402


class LoopedAttention(VarlenAttention):
    """Causal attention, one document after another; without metadata everything is one document."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """torchtitan's, under a name of its own."""

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False, **_):
        """From and to [1, T, heads, head_dim]; torchtitan finds the arguments by its names."""
        edges = [0, q_BLNH.shape[1]] if attention_masks is None else attention_masks.cu_seq_q.tolist()
        parts = []
        for start, stop in itertools.pairwise(edges):
            document = (tensor[:, start:stop].transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(
                    *document, is_causal=True, scale=scale, enable_gqa=enable_gqa
                ).transpose(1, 2)
            )
        return torch.cat(parts, 1)


def on_cpu(config):
    """A trainer configuration of torchtitan, its model made to train on CPUs; the configuration itself."""
    spec = config.model_spec
    for kind in (FlexAttention.Config, VarlenAttention.Config):
        for _, _, parent, name in list(spec.model.traverse(kind)):
            setattr(parent, name, LoopedAttention.Config())

    def parallelize(model, **settings):
        model = spec.parallelize_fn(model, **settings)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    config.model_spec = replace(spec, parallelize_fn=parallelize)
    return config
