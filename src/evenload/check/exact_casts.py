"""`exact_casts`: a float64 model computes in float64 throughout, inside transformers' own modules too.

transformers casts to float32 whatever the model's precision: in norms, softmax, routers, rotary angles and its loss.
Which way a value on the edge of that rounding goes depends on the processor and on the order of the sums before it, so
two exact computations of a float64 model differ by 1e-8 and more, here or there. Under `exact_casts` such a cast gives
float64. Nothing is known of architectures: what matters is who casts (a module that computes in float64) and to what.

Price: inside such modules torch's functions pass through Python; a small model takes a quarter longer.
"""

import functools
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def exact_casts() -> Iterator[None]:
    """Let modules whose first floating input, or else parameter, is float64 cast to float64 instead of float32.

    In all threads of the process; models of other precisions are left alone.
    """
    plain, thread = nn.Module.__call__, threading.local()

    @functools.wraps(plain)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_inside = getattr(thread, "is_inside", False)
        if is_inside or type(module).__module__.startswith("torch.") or not _is_float64(module, args, kwargs):
            return plain(module, *args, **kwargs)
        thread.is_inside = True
        try:
            with Float64Casts():
                return plain(module, *args, **kwargs)
        finally:
            thread.is_inside = False

    nn.Module.__call__ = call
    try:
        yield
    finally:
        nn.Module.__call__ = plain


def _is_float64(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = itertools.chain(args, kwargs.values(), module.parameters())
    dtypes = (value.dtype for value in given if isinstance(value, Tensor) and value.is_floating_point())
    return next(dtypes, None) is torch.float64


class Float64Casts(TorchFunctionMode):
    """Who asks torch for float32 gets float64, by whatever function, except of what is narrower already."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, asks = kwargs or {}, func is Tensor.float
        for value in (*args, *kwargs.values()):
            asks = asks or value is torch.float32
        if asks and not (args and isinstance(args[0], Tensor) and args[0].dtype in _NARROW):
            func = Tensor.double if func is Tensor.float else func
            args, kwargs = map(_wider, args), {key: _wider(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
