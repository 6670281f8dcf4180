"""Stand-ins for `aten::addmm.dtype_out`, products added to wider sums, which torch has for GPUs alone."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def wide_gradients(key):
    """On devices of that dispatch key, "CPU" or "Meta": torch 2.11's own meta kernel of it fails."""

    def addmm(total, left, right, out_dtype, *, beta=1, alpha=1, out):
        assert total.dtype == out.dtype == out_dtype == torch.float32
        assert left.dtype == right.dtype == torch.bfloat16
        assert total.shape == (left.shape[0], right.shape[1])
        if out.device.type == "meta":
            return out
        assert out.data_ptr() == total.data_ptr()
        return out.copy_(beta * total + alpha * (left.float() @ right.float()))

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in place of torch's own meta kernel
        library.impl("addmm.dtype_out", addmm, key, allow_override=True)
    yield
    library._destroy()
