"""Megatron-Core on the CPU: what it asks of CUDA is answered by the CPU. For tests; nothing of it is in the product.

Megatron-Core 0.16.1 names its device in two ways: `device="cuda"` in calls that make tensors, and
`torch.cuda.current_device()`. Besides, it synchronises with the device around transfers. Everything else it does by
`torch.distributed`, which has gloo. Checkpoints it writes in processes of its own, which ranks of a test pool, being
daemons, may not start.
"""

import contextlib
import multiprocessing
from collections.abc import Iterator
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        return function(*args, **kwargs)


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Inside, Megatron-Core runs on this process's CPU and over gloo."""
    answers = {"current_device": lambda: _CPU, "synchronize": lambda *_: None, "current_stream": lambda *_: None}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_CudaIsCpu())
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.dict(multiprocessing.current_process()._config, daemon=False))
        yield
