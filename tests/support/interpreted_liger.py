"""What Triton's interpreter lacks for Liger's kernels: numbers that are no integers, functions of CUDA's library, and
arithmetic in bfloat16, whose bits it would take for integers.

`prepare` is to be called before a kernel runs, in a process with TRITON_INTERPRET=1. On a GPU nothing of this is used.
"""

import functools
from importlib import import_module

import numpy as np


@functools.cache
def prepare() -> None:
    """Give the interpreter what it lacks, once in a process."""
    import triton.language as tl
    from triton.runtime import interpreter

    def scalar_or_other(arg, other=interpreter._implicit_cvt):
        if isinstance(arg, float):  # as the compiler takes it
            return tl.tensor(interpreter.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
        return other(arg)

    interpreter._implicit_cvt = scalar_or_other
    builder = interpreter.InterpreterBuilder
    # Computed in fp32, and rounded to bfloat16.
    arithmetic = (np.add, np.subtract, np.multiply, np.divide, np.negative)

    def rounding(other):
        def run(self, *given):
            *handles, op = given
            if op not in arithmetic or handles[0].dtype.scalar != tl.bfloat16:
                return other(self, *given)
            wide = other(self, *(self.cast_impl(one, tl.float32) for one in handles), op)
            return self.cast_impl(wide, tl.bfloat16)

        return run

    builder.binary_op, builder.unary_op = rounding(builder.binary_op), rounding(builder.unary_op)

    def rsqrt(x):
        return tl.rsqrt(x)  # looked up when a kernel runs: only then is it the interpreter's

    import_module("liger_kernel.ops.rms_norm").rsqrt = rsqrt
    for file in ("geglu", "cross_entropy"):
        import_module(f"liger_kernel.ops.{file}").tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
