"""Rules in the place of attention masks: which keys a row sees, read from what transformers would make a mask of.

A model that runs under one of our names makes no mask [T, T]: it gets a `MaskRule` and passes it on to the attention of
its layers. Where documents begin is known from the plan: `WholeModel.run` gives models a mask of ones, with which
transformers does not look for documents in the positions.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from evenload.errors import UnsupportedModelError

TRAINED_MASKS = "only causal attention of a document's tokens to each other is trained, all, in a window or in chunks"

# Of the tensors that models pass to their attention, those that change nothing between tokens, or are known.
_KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position"}
_LONGEST = 1 << 24  # tokens of a document; a longer window is none


def unknown_tensors(options: Mapping[str, Any]) -> list[str]:
    """Return names of further tensors that a call of attention gets, and that range attention does not know."""
    return sorted(key for key, one in options.items() if isinstance(one, Tensor) and key not in _KNOWN_TENSORS)


def is_causal(module: object, options: Mapping[str, Any]) -> bool:
    """Say whether a call of attention without a mask hides later tokens: what it says itself, else its module."""
    own = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if own is None else own)


@dataclass(frozen=True)
class MaskRule:
    """Stands for a mask: a row sees the keys up to its own, of the last `window` tokens, or of its own chunk of `chunk`
    tokens (0 = no limit); or `refusal` says why it is no such rule, which is an error where a layer reads it. What
    models do with a mask on its way to a layer leaves it as it is."""

    window: int = 0
    chunk: int = 0
    refusal: str = ""

    def __getitem__(self, _: object) -> "MaskRule":
        return self

    def to(self, *_: object, **__: object) -> "MaskRule":
        return self

    def clone(self) -> "MaskRule":
        return self

    def dense(self, count: int, like: Tensor) -> Tensor:
        """Return the mask [1, 1, count, count] that transformers' eager attention adds to scores."""
        places = torch.arange(count, device=like.device)
        hidden = ~self.shows(places[:, None], places)
        return torch.zeros(1, 1, count, count, dtype=like.dtype, device=like.device).masked_fill(
            hidden, torch.finfo(like.dtype).min
        )

    def shows(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return which keys rows see, of positions that can be broadcast against each other."""
        visible = keys <= rows
        if self.window:
            visible &= keys > rows - self.window
        if self.chunk:
            visible &= keys // self.chunk == rows // self.chunk
        return visible


_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Says whether a row sees a key: (batch, head, row, key) -> bool, of tensors that can be broadcast."""


def mask_rule(
    *, mask_function: _MaskFunction, q_length: int, kv_length: int, config: PretrainedConfig, **_: object
) -> MaskRule:
    """Return the rule of a mask function; transformers calls this where it would make a mask. Packs have no padding, so
    a mask of it is not read."""
    if q_length != kv_length:
        what = f"{q_length} rows and {kv_length} keys"
        return MaskRule(refusal=f"{config.model_type} asks for an attention mask of {what}; {TRAINED_MASKS}")
    try:
        key, function = _of_cell("mask_function", mask_function)
    except UnsupportedModelError as error:
        return MaskRule(refusal=str(error))
    if key not in _KNOWN:
        _KNOWN[key] = _read_rule(function)
    rule = _KNOWN[key]
    return replace(rule, refusal=f"{config.model_type} {rule.refusal}") if rule.refusal else rule


_KNOWN: dict[Hashable, MaskRule] = {}
"""By code and constants of mask functions, of which models make a new one a pack."""


def _of_cell(name: str, value: Any) -> tuple[Hashable, Any]:
    """Return what makes a mask function, or a value that it reads, equal to others, and the same without tensors."""
    if isinstance(value, FunctionType):
        read = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        cells = [_of_cell(name, cell.cell_contents) for name, cell in read]
        closure = tuple(CellType(one) for _, one in cells)
        own = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
        return (value.__code__, value.__defaults__, *(key for key, _ in cells)), own
    if isinstance(value, tuple):
        each = [_of_cell(name, one) for one in value]
        return tuple(key for key, _ in each), tuple(one for _, one in each)
    if isinstance(value, Tensor):
        if name != "left_padding":
            raise UnsupportedModelError(
                f"an attention mask depends on tensor {name} {tuple(value.shape)}; {TRAINED_MASKS}"
            )
        return None, torch.zeros(value.shape, dtype=torch.int64, device="cpu")  # packs have none
    return value, value


def _read_rule(function: _MaskFunction) -> MaskRule:
    """Find the first row that does not see key 0, then compare rows around it with a window and with chunks."""
    zero = torch.zeros((), dtype=torch.int64, device="cpu")

    def shows(rows: Tensor, keys: Tensor) -> Tensor:
        return function(zero, zero, rows, keys).expand(torch.broadcast_shapes(rows.shape, keys.shape))

    far = 2 ** torch.arange(_LONGEST.bit_length(), device="cpu")
    unseen = (~shows(far, zero)).nonzero()
    size, rules = 0, [MaskRule()]
    if len(unseen):
        between = torch.arange(int(far[unseen[0]]) // 2, int(far[unseen[0]]) + 1, device="cpu")
        size = int(between[~shows(between, zero)][0])
        rules = [MaskRule(window=size), MaskRule(chunk=size)]
    edges = {n * size + i for n in (1, 2, 3) for i in (-1, 0, 1)} if size else set()
    rows = torch.tensor(sorted({0, 1, 2, 63, 1000} | edges), device="cpu")[:, None]
    keys = torch.arange(int(rows.max()) + 10, device="cpu")
    visible = shows(rows, keys)
    wrong = {}
    for rule in rules:
        differs = (visible != rule.shows(rows, keys)).any(dim=1).nonzero()
        if not len(differs):
            return rule
        wrong[rule] = int(differs[0])
    first = max(wrong.values())
    seen = keys[visible[first]].tolist()
    said = f"{len(seen)} of keys {seen[0]} to {seen[-1]}" if seen else "no key"
    what = f"makes an attention mask in which row {int(rows[first])} sees {said}"
    return MaskRule(refusal=f"{what}; {TRAINED_MASKS}")
