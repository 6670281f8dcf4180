"""Twins of the kernels of fla, mamba_ssm and causal_conv1d in torch: their arguments, what they refuse, what they leave
out. Read in fla-core 0.6.0, mamba_ssm 2.3 and causal_conv1d 1.6; transformers passes on only what a kernel takes."""

import inspect
import sys

import torch
from torch import Tensor

from evenload.runtime.model import state_calls


def install(monkeypatch, model) -> set[str]:
    """Put twins in the place of a model's functions; return where names of those that are called will appear."""
    called: set[str] = set()
    monkeypatch.setattr(state_calls, "_has_kernel", lambda package, rows: not rows.is_meta)
    for name in {type(module).__module__ for module in model.modules()}:
        for function, make in _TWINS.items():
            module = sys.modules[name]
            own = getattr(module, function, None)
            if name.startswith("transformers.models.") and own is not None:
                plain = inspect.unwrap(own)
                twin = _passed_on(make(plain), called)
                monkeypatch.setattr(module, function, state_calls._dispatcher(function, twin))
    return called


def _passed_on(kernel, called):
    taken = inspect.signature(kernel).parameters

    def call(*args, **kwargs):
        called.add(kernel.__name__)
        return kernel(*args, **{key: one for key, one in kwargs.items() if key in taken})

    return call


def _delta(plain):
    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        cu_seqlens=None, cu_seqlens_cpu=None,
    ):  # fmt: skip
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        if cu_seqlens is None:
            return plain(q, k, v, g=g, beta=beta, initial_state=initial_state, **options)
        assert q.shape[0] == 1, "of documents the batch is expected to be 1"
        assert initial_state is None or initial_state.shape[0] == len(cu_seqlens) - 1
        assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
        assert cu_seqlens.dtype == torch.int64
        outs, ends = [], []
        for at, (first, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
            rows = (one[:, first:stop] for one in (q, k, v))
            start = None if initial_state is None else initial_state[at : at + 1]
            more = {"g": g[:, first:stop], "beta": beta[:, first:stop], "initial_state": start}
            out, end = plain(*rows, **more, **options)
            outs.append(out)
            ends.append(end)
        return torch.cat(outs, 1), torch.cat(ends) if output_final_state else None

    return chunk_gated_delta_rule


def _mamba2(plain):
    def mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
        dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
    ):  # fmt: skip
        options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        if seq_idx is None:
            more = {"initial_states": initial_states, "return_final_states": return_final_states}
            return plain(x, dt, A, B, C, chunk_size, **options, **more)
        assert initial_states is None, "are of rows of the batch"
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == x.shape[:2]
        sizes = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
        parts = zip(*(one.split(sizes, 1) for one in (x, dt, B, C)), strict=True)
        return torch.cat([plain(x, dt, A, b, c, chunk_size, **options) for x, dt, b, c in parts], 1)

    return mamba_chunk_scan_combined


def _mamba1(plain):
    def selective_scan_fn(
        u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
    ):
        options = {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
        out, end = plain(u, delta, A, B, C, **options, return_last_state=True)
        return (out, end.detach()) if return_last_state else out  # its backward leaves the state's gradient out

    return selective_scan_fn


def _convolution(plain):
    def causal_conv1d_fn(
        x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
        activation=None,
    ) -> Tensor:  # fmt: skip
        assert x.stride(2) == 1 or x.stride(1) == 1
        assert weight.shape[1] <= 4, "causal_conv1d only supports width between 2 and 4"
        assert activation in (None, "silu", "swish")
        return plain(x, weight, bias, activation=activation)

    return causal_conv1d_fn


_TWINS = {
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
    "causal_conv1d_fn": _convolution,
}
