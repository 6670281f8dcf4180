"""What everything else on a GPU rests on, a line each: "NAME: ok" or "NAME: failed: ..."; under a minute.

    python tests/gpu/smoke.py [NAME ...]      in `make gpu`; exit code 1 where a check failed

Every check runs in a process of its own, forked before CUDA is touched: one that hangs, dies or leaves the GPU unusable
takes no other one with it, and torch is imported once. Other packages may touch CUDA when they are imported.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

DEVICE = "cuda"
LIMIT_S = 30.0
TOLERANCE = 2e-2
"""Relative error of bf16 in norm, with room."""


def device() -> str:
    """A GPU that torch can use."""
    found = torch.cuda.get_device_properties(0)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "transformers"))
    return f"{found.name}, {found.total_memory / 2**30:.1f} GiB, {versions}"


def core() -> str:
    """The compiled core, without a GPU."""
    from evenload import _native

    return str(Path(_native.__file__).name)


def flash_attention() -> str:
    """A document, a slice with a prefix and one token in one call of FlashAttention 2, forward and backward."""
    from evenload.attention.range_attention import Scoring
    from evenload.attention.reference import ReferenceAttention
    from evenload.attention.varlen_cuda import VarlenCudaAttention
    from single_range import random_pack

    pack, results = random_pack([(0, 700), (1000, 1130), (5, 6)], 8, 2, 128, 0, 0, device=DEVICE), []
    for backend in (VarlenCudaAttention(), ReferenceAttention()):
        out, lse = backend.forward(pack.q, pack.seen, pack.sizes, Scoring(128**-0.5))
        gradients = backend.backward(pack.grad, pack.q, pack.seen, out, lse, pack.sizes, Scoring(128**-0.5))
        results.append([out, *gradients])
    return worst_error(*results)


def wide_product() -> str:
    """Gradients of bf16 rows summed in fp32 by the product."""
    from evenload.runtime.replay.weight_products import add_product

    left, right = (torch.randn(4096, size, device=DEVICE).bfloat16() for size in (512, 768))
    total = torch.ones(512, 768, device=DEVICE)
    expected = 1 + left.double().t() @ right.double()
    add_product(total, left, right)
    error = float((total.double() - expected).norm() / expected.norm())
    assert error < 1e-5, f"relative error {error:.1e}: summed in bf16"
    return f"relative error {error:.1e}"


def rotary_kernel() -> str:
    """Liger's rotary embedding in place of transformers'."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = (torch.randn(1, heads, 300, 128, device=DEVICE).bfloat16() for heads in (8, 2))
    angles = torch.randn(1, 300, 64, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    return worst_error(liger_rotary_pos_emb(q.clone(), k.clone(), cos, sin), expected)


def swiglu_kernel() -> str:
    """Liger's SwiGLU, forward and backward."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate, up, grad = (torch.randn(300, 768, device=DEVICE).bfloat16() for _ in range(3))
    results = []
    for function in (LigerSiLUMulFunction.apply, lambda a, b: torch.nn.functional.silu(a) * b):
        leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        out = function(*leaves)
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return worst_error(*results)


def page_locked_memory() -> str:
    """A segment of host memory that CUDA page-locks, to the device and back."""
    from evenload.runtime.replay.host_copies import SEGMENT_BYTES, PageLockedMemory

    memory = PageLockedMemory()
    segment = memory.new_segment(SEGMENT_BYTES)
    sent = torch.randint(0, 256, (SEGMENT_BYTES,), dtype=torch.uint8, device=DEVICE)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    segment.copy_(sent, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    assert torch.equal(segment.cuda(), sent), "other bytes came back"
    memory.close()
    return f"{SEGMENT_BYTES / 2**20:.0f} MiB at {SEGMENT_BYTES / begin.elapsed_time(end) / 1e6:.1f} GB/s"


def growing_segments() -> str:
    """The allocator takes memory as runs ask it to."""
    from evenload.cli.worker_setup import set_cuda_defaults

    set_cuda_defaults(os.environ)
    held = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    segments = torch.cuda.memory_snapshot()
    assert segments, f"no segment holds {held.nbytes} bytes"
    assert all(one["is_expandable"] for one in segments), f"PYTORCH_ALLOC_CONF={os.environ['PYTORCH_ALLOC_CONF']}"
    return f"{len(segments)} of {len(segments)} segments"


def masters_in_halves() -> str:
    """What `optimizer.moments = "bfloat16"` keeps of fp32 masters."""
    from evenload.runtime.optim.optimizer import joined, split

    master = torch.randn(2**20, device=DEVICE)
    weights, lower = (torch.empty(2**20, dtype=dtype, device=DEVICE) for dtype in (torch.bfloat16, torch.int16))
    split(master.clone(), weights, lower)
    assert torch.equal(joined(weights, lower), master), "masters differ from the two halves"
    differ = int((weights != master.bfloat16()).sum())
    assert differ < 64, f"{differ} weights are not the rounded masters (ties are rounded another way)"
    return f"{differ} ties of {master.numel():,}"


def worst_error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> str:
    errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(ours, theirs, strict=True)]
    assert max(errors) < TOLERANCE, f"relative errors {errors}"
    return f"relative error {max(errors):.1e}"


CHECKS: Mapping[str, Callable[[], str]] = {
    check.__name__: check
    for check in (
        *(device, core, flash_attention, wide_product, rotary_kernel, swiglu_kernel, page_locked_memory),
        *(growing_segments, masters_in_halves),
    )
}


def outcome_of(check: Callable[[], str], limit_s: float = LIMIT_S) -> str:
    """ "ok (...)", or "failed: ..." of a check in a process of its own."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_send_outcome, args=(check, there), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(limit_s) else f"failed: took longer than {limit_s:.0f} s"
    except EOFError:
        process.join()
        return f"failed: its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _send_outcome(check: Callable[[], str], there) -> None:
    try:
        there.send(f"ok ({check()})")
    except Exception as error:
        there.send(f"failed: {type(error).__name__}: {' '.join(str(error).split())}")


def main(checks: Mapping[str, Callable[[], str]], names: list[str]) -> int:
    """Exit code."""
    has_failed = False
    for name in names or checks:
        outcome = outcome_of(checks[name])
        has_failed |= not outcome.startswith("ok")
        print(f"{name}: {outcome}", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(CHECKS, sys.argv[1:]))
