"""Attention of micro-batches of trees: `tree_attention`, and how transformers' models get it and are proven.

    sequences       rows             ranges of rows, and the keys of each
    a b c d         a b c d f e      a b c d  sees  a b c d        the masks of both end bottom-right, as those of
    a b c f                          f        sees  a b c f        kernels with cumulative lengths do
    a b e                            e        sees  a b e

Only keys before a range are copied, once a layer; autograd adds up the gradients of shared ones.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evenload.errors import ConfigError, UnsupportedModelError

_NAME = "evenload_tree"
_BEFORE = "_evenload_attention_before"
"""The attribute of transformers' models that names the attention they had; copies of a model have it, too."""
_PATHS = "train its sequences one by one, without TreePacker"
_KNOWN_TENSORS = {"key_index", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "cache_position"}


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, inputs: Mapping[str, Any], *, window: int = 0, scale: float | None = None
) -> Tensor:
    """Return the attention of the rows of a micro-batch, each to its path up to itself; [n, heads, dim of values].

    On GPUs in half precision it is one call of torch's `varlen_attn`, else one of scaled dot products a range of rows.

    Args:
        query: [n, heads, dim].
        key, value: [n, as many heads or fewer that divide them, dim], turned by `position_ids` where positions turn.
        inputs: `TreeBatch.inputs`, or any mapping with its `key_index`, `cu_seq_lens_*` and `max_length_*`.
        window: keys that a row sees along its path, its own too; 0 = all.
        scale: of scores; default: 1 / sqrt(dim).
    """
    index, edges = inputs["key_index"], (inputs["cu_seq_lens_q"], inputs["cu_seq_lens_k"])
    if len(index) != len(key):  # else nothing lies before any range
        key, value = key.index_select(0, index), value.index_select(0, index)
    options: dict[str, Any] = {"scale": scale} | ({"enable_gqa": True} if query.shape[1] != key.shape[1] else {})
    if _has_kernel(query):
        from torch.nn.attention.varlen import varlen_attn

        wide = nn.functional.pad(value, (0, query.shape[-1] - value.shape[-1]))  # the kernel has one width for all
        longest, seen = (inputs["max_length_q"], inputs["max_length_k"]), (window - 1 if window else -1, 0)
        out = varlen_attn(query, key, wide, *edges, *longest, window_size=seen, **options)
        assert isinstance(out, Tensor)
        return out[..., : value.shape[-1]]
    # Not slices: the gradient of each would be as large as all rows.
    (rows, keys), found = (one.diff().tolist() for one in edges), []
    for q, k, v in zip(query.split(rows), key.split(keys), value.split(keys), strict=True):
        first = max(0, len(k) - len(q) - window + 1) if window else 0
        is_square = len(k) - first == len(q) and not 0 < window < len(q)
        mask = None if is_square else _visible(len(q), len(k) - first, window, q.device)
        given = (one.transpose(0, 1)[None] for one in (q, k[first:], v[first:]))
        out = nn.functional.scaled_dot_product_attention(*given, attn_mask=mask, is_causal=is_square, **options)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def _has_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _visible(rows: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Which keys rows see whose own keys are the last ones, bool[rows, keys]."""
    row, key = torch.arange(keys - rows, keys, device=device)[:, None], torch.arange(keys, device=device)
    return (key <= row) & (key > row - window) if window else key <= row


def hf_model(model: nn.Module) -> Any:
    """Return transformers' model in a model and its wrappers; None = there is none."""
    transformers = sys.modules.get("transformers")
    is_theirs = (one for one in model.modules() if transformers and isinstance(one, transformers.PreTrainedModel))
    return next(is_theirs, None)


def take_tree_attention(model: nn.Module) -> None:
    """Give the model in `model` that is transformers' `tree_attention`; an `UnsupportedModelError` for one whose paths
    would not be trained as alone."""
    hf = hf_model(model)
    if why := _reason_against(model, hf):
        raise UnsupportedModelError(f"{type(hf or model).__name__} {why}")
    if hf is not None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _window_of_mask)
        if (before := hf.config._attn_implementation) != _NAME:
            setattr(hf, _BEFORE, before)
        elif not hasattr(hf, _BEFORE):  # made of the configuration of a model that had been given to a packer
            setattr(hf, _BEFORE, hf.get_correct_attn_implementation(None))
        hf.set_attn_implementation(_NAME)


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Give the model its own attention meanwhile."""
    if (hf := hf_model(model)) is not None:
        hf.set_attn_implementation(getattr(hf, _BEFORE))
    try:
        yield
    finally:
        if hf is not None:
            hf.set_attn_implementation(_NAME)


def prove_paths(model: nn.Module, run: Callable[[bool, bool], tuple[Tensor, ...]]) -> None:
    """Raise an `UnsupportedModelError`, and give the model its attention back, where a path gets anything of its
    sibling or is not as alone.

    Args:
        run: (with other tokens in the first one, alone) -> logits of two paths of a tree.
    """
    name = type(model).__name__
    try:
        (first, second), (_, moved), alone = run(False, False), run(True, False), run(False, True)
        # What other tokens in other rows change by rounding, and what other kernels do.
        units = [torch.finfo(one.dtype).eps for one in model.parameters() if one.is_floating_point()]
        unit = max(torch.finfo(torch.float32).eps, *units)
        leak, error = _relative(moved, second), max(map(_relative, (first, second), alone))
        if not (leak <= max(1e-5, 4 * unit) and error <= max(1e-3, 12 * unit)):
            raise UnsupportedModelError(
                f"{name} lets a path see its sibling ({leak:.1e} of its logits), or computes it otherwise than alone "
                f"(off by {error:.1e}): a layer goes from row to row, attends without tree_attention, or has other "
                f"positions than position_ids; {_PATHS}"
            )
    except Exception as error:  # of any kind: models from elsewhere
        if (hf := hf_model(model)) is not None:
            hf.set_attn_implementation(getattr(hf, _BEFORE))
        if isinstance(error, UnsupportedModelError):
            raise
        raise UnsupportedModelError(
            f"{name} cannot run a micro-batch of trees ({type(error).__name__}: {error}); let it take TreeBatch.inputs "
            f"as keyword arguments and attend by tree_attention, or {_PATHS}"
        ) from error


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).double().norm() / expected.double().norm())


def _reason_against(model: nn.Module, hf: Any) -> str:
    """Why paths would not be trained as alone, with what works instead; "" = nothing is known."""
    dropout = (name for name, one in model.named_modules() if isinstance(one, nn.Dropout) and one.p > 0)
    if name := next(dropout, None):
        return f"has dropout in {name}, which paths would share; set its p to 0"
    if hf is None:
        return ""
    text = hf.config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if hf.config.is_encoder_decoder:
        why = "is an encoder-decoder, whose decoder sees rows of another model"
    elif chunk := getattr(text, "attention_chunk_size", None):
        why = f"attends in chunks of {chunk} tokens, which is no window"
    elif kinds or hf._is_stateful:
        why = f"has layers ({', '.join(sorted(kinds)) or 'recurrent'}) whose state goes from row to row"
    elif cap := getattr(text, "attn_logit_softcapping", None):
        why = f"caps attention scores at {cap:g}, which scaled dot products do not"
    elif getattr(text, "output_router_logits", False):
        why = "trains a balance loss of experts, a product over each path's tokens; set output_router_logits = False"
        return f"{why}, or {_PATHS}"
    elif not hf._can_set_attn_implementation():
        why = "does not attend through transformers' AttentionInterface"
    else:
        return ""
    return f"{why}; {_PATHS}"


def _window_of_mask(*_: Any, local_size: int | None = None, **__: Any) -> Tensor:
    """Stand in for a mask: its window, 0 = all, on the CPU, so that reading it does not wait for a GPU."""
    return torch.tensor(local_size or 0)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attend as one of transformers' functions does: query [1, heads, n, dim] -> [1, n, heads, dim]."""
    if given.get("key_index") is None:
        raise ConfigError(
            "TreePacker has given this model the attention of trees; run it on TreeBatch.inputs, or on anything else "
            "under `with packer.paused():`"
        )
    window, name = sliding_window or 0, type(module).__name__
    what = [key for key, one in given.items() if isinstance(one, Tensor) and key not in _KNOWN_TENSORS]
    what += [key for key in ("softcap", "cache") if given.get(key) is not None]
    what += [f"dropout = {dropout:g}"] if dropout else []
    if given.get("is_causal") is False or not getattr(module, "is_causal", True):
        what.append("no causal mask")
    if attention_mask is not None and (attention_mask.ndim or int(attention_mask) != window):
        what.append(f"a mask that is not of its window ({window}; 0 = none)")
    if what:
        fix = "set the configuration's dropout to 0" if dropout else _PATHS
        raise UnsupportedModelError(f"{name} attends with {', '.join(what)}, as no tree's attention does; {fix}")
    query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
    return tree_attention(query, key, value, given, window=window, scale=scaling)[None], None
