"""`exact_casts`: float64 models compute in float64 throughout, inside transformers' own modules too.

transformers casts to float32 in norms, softmax, routers, rotary angles and losses, whatever the model's precision. The
processor decides where a value on the edge of that rounding goes: two exact computations differ by 1e-8. Casts are told
apart by who casts, a module in float64, so no architecture needs an entry. A small model takes a quarter longer.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def exact_casts() -> Iterator[None]:
    """Put every module whose first floating input, or else parameter, is float64 under `Float64Casts`; all threads."""
    plain, thread = nn.Module.__call__, threading.local()

    @functools.wraps(plain)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = chain(args, kwargs.values(), module.parameters())
        dtypes = (value.dtype for value in given if isinstance(value, Tensor) and value.is_floating_point())
        is_known = getattr(thread, "is_inside", False) or type(module).__module__.startswith("torch.")
        if is_known or next(dtypes, None) is not torch.float64:
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


class Float64Casts(TorchFunctionMode):
    """Who asks torch for float32 gets float64, by whatever function, except of what is narrower already."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, asks = kwargs or {}, func is Tensor.float
        for value in (*args, *kwargs.values()):
            asks = asks or value is torch.float32
        if asks and getattr(next(iter(args), None), "dtype", None) not in _NARROW:
            func = Tensor.double if func is Tensor.float else func
            args = [torch.float64 if value is torch.float32 else value for value in args]
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
