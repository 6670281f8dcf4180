"""Functions of transformers' recurrent layers as GPU kernels and loops of others have them, and broken on purpose.

`stand_ins` replaces the module-global functions through which transformers calls kernels: what tells a kernel where
documents begin (`BOUNDARY`) is honoured, piece by piece, also where documents are cut further. A mutant is one known
bug of somebody's loop or kernel.
"""

import importlib
import itertools
from contextlib import ExitStack, contextmanager
from typing import Literal
from unittest.mock import patch

import torch

BOUNDARY = {
    "causal_conv1d_fn": "seq_idx",  # causal_conv1d
    "mamba2_chunk_scan": "seq_idx",  # mamba_ssm: mamba_chunk_scan_combined
    "mamba2_split_conv1d_scan_combined": "seq_idx",
    "torch_chunk_gated_delta_rule": "cu_seqlens",  # fla: chunk_gated_delta_rule
    "chunk_kimi_delta_attention": "cu_seqlens",  # fla: chunk_kda
    "mamba_selective_scan": None,  # mamba_ssm: selective_scan_fn knows no documents
}
"""The argument of the kernel behind each function that tells where documents begin."""
_PIECES = (5, 1, 2, 4)  # tokens of slices; some shorter than a convolution's window

Mutant = Literal[
    "",
    "state into the next document",
    "conv into the next document",
    "state reset at cuts",
    "conv tail reset at cuts",
    "gradient of the state dropped at cuts",
    "gradient of the conv tail dropped at cuts",
    "backward from a zero state",
    "short slices lose the older tail",
]


@contextmanager
def stand_ins(model, *, cuts=False, mutant: Mutant = "", lengths=None):
    """Replace the functions of a model's module; `lengths` of documents where no argument tells them."""
    module = importlib.import_module(type(model).__module__)
    with ExitStack() as stack:
        for name in (one for one in BOUNDARY if hasattr(module, one)):
            replaced = _stand_in(name, getattr(module, name), cuts, mutant, lengths)
            stack.enter_context(patch.object(module, name, replaced))
        yield


def _stand_in(name, original, cuts, mutant, lengths):
    if name == "mamba2_split_conv1d_scan_combined":
        return lambda *_, **__: None  # then transformers calls the parts
    run = _conv if name == "causal_conv1d_fn" else _scan

    def call(*args, **kwargs):
        told = kwargs.get(BOUNDARY[name]) if BOUNDARY[name] else None
        kwargs = {key: value for key, value in kwargs.items() if key not in ("seq_idx", "cu_seqlens")}
        tokens = args[0].shape[2 if run is _conv or name == "mamba_selective_scan" else 1]
        edges = [0, *itertools.accumulate(lengths)] if lengths else _edges(told, tokens)
        if edges == [0, tokens] and not cuts:
            return original(*args, **kwargs)
        return run(original, args, kwargs, _pieces(edges, cuts), mutant)

    return call


def _edges(told, tokens):
    if told is None:
        return [0, tokens]
    if told.ndim == 1:
        return told.tolist()
    return [0, *(told[0].diff().nonzero()[:, 0] + 1).tolist(), tokens]


def _pieces(edges, cuts):
    """(start, stop, whether a document begins there)."""
    for first, last in itertools.pairwise(edges):
        start, sizes = first, itertools.cycle(_PIECES if cuts else (last - first,))
        while start < last:
            stop = min(last, start + next(sizes))
            yield start, stop, start == first
            start = stop


def _conv(original, args, kwargs, pieces, mutant):
    x, *rest = args
    weight = rest[0] if rest else kwargs["weight"]
    window, outs, tail = weight.shape[-1] - 1, [], None
    for start, stop, is_first in pieces:
        if tail is None or (is_first and mutant != "conv into the next document"):
            tail = torch.zeros_like(x[..., :1]).expand(-1, -1, window)
        if not is_first and mutant == "conv tail reset at cuts":
            tail = torch.zeros_like(tail)
        if not is_first and mutant == "gradient of the conv tail dropped at cuts":
            tail = tail.detach()
        piece = x[..., start:stop]
        outs.append(original(torch.cat([tail, piece], -1), *rest, **kwargs)[..., window:])
        if mutant == "short slices lose the older tail":
            tail = torch.zeros_like(tail)
        tail = torch.cat([tail, piece], -1)[..., -window:]
    return torch.cat(outs, -1)


def _scan(original, args, kwargs, pieces, mutant):
    is_mamba = "initial_states" in kwargs
    start_key, end_key = (
        ("initial_states", "return_final_states") if is_mamba else ("initial_state", "output_final_state")
    )
    tokens, outs, state = args[0].shape[1], [], None

    def cut(value, start, stop):
        per_token = isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == tokens
        return value[:, start:stop] if per_token else value

    def run(start, stop, state):
        own = {key: cut(value, start, stop) for key, value in kwargs.items()} | {start_key: state, end_key: True}
        return original(*(cut(value, start, stop) for value in args), **own)

    for start, stop, is_first in pieces:
        if is_first and mutant != "state into the next document":
            state = None
        if not is_first and mutant == "state reset at cuts":
            state = None
        if not is_first and mutant == "gradient of the state dropped at cuts":
            state = state.detach()
        out, end = run(start, stop, state)
        if not is_first and mutant == "backward from a zero state":
            zero, zero_end = run(start, stop, torch.zeros_like(state))
            out, end = zero + (out - zero).detach(), zero_end + (end - zero_end).detach()
        outs.append(out)
        state = end
    out = torch.cat(outs, 1)
    return out if is_mamba and not kwargs[end_key] else (out, None)
