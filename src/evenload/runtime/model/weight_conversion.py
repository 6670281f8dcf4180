"""Convert between the tensors of files and those of a model, by transformers' own tables and operations.

Files may name tensors differently, keep experts one by one that a module holds in one tensor, or keep in one tensor
what are several: transformers knows it for every architecture. Its interface for that is private, and this file has all
we use of it; tests/runtime/test_weight_conversion.py names what is no longer as it was.
"""

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


@dataclass(frozen=True, eq=False)
class Conversion:
    """Makes one or more tensors of a model from stored ones.

    Args:
        name: of the first tensor that it makes.
        sources: names of stored tensors, in order, by the pattern of the rule that they match.
        rule: transformers'; None = the one stored tensor as it is.
    """

    name: str
    sources: Mapping[str, list[str]]
    rule: WeightConverter | None

    @property
    def stored_names(self) -> list[str]:
        """Names of all stored tensors that it reads."""
        return [name for names in self.sources.values() for name in names]

    def absent_name(self) -> str | None:
        """Return the name of a tensor that is missing among numbered ones (experts 0, 1, 3), which would be joined
        without a sign; None = there is none."""
        lists = [[name.split(".") for name in names] for pattern, names in self.sources.items() if "*" in pattern]
        columns = enumerate(zip(*(parts for names in lists for parts in names), strict=False))
        numbers = {at: set(map(int, column)) for at, column in columns if all(part.isdigit() for part in column)}
        for at, seen in numbers.items():
            for names in lists if len(seen) > 1 else ():
                if absent := set(range(max(seen) + 1)) - {int(parts[at]) for parts in names}:
                    return ".".join([*names[0][:at], str(min(absent)), *names[0][at + 1 :]])
        return None

    def convert(self, whole: PreTrainedModel, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the model's tensors by name, of stored ones that `read` returns by name; on the meta device, too."""
        if self.rule is None:
            return {self.name: read(self.stored_names[0])}
        rule: Any = copy.deepcopy(self.rule)
        for pattern, names in self.sources.items():
            for name in names:
                rule.add_tensor(self.name, name, pattern, partial(read, name))
        made = rule.convert(self.name, model=whole, config=whole.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def find_conversions(whole: PreTrainedModel, stored: Iterable[str]) -> tuple[list[Conversion], list[str]]:
    """Return the conversions that make tensors of a model from stored ones, by their names, and the names that have no
    part in any. `ValueError`: two names are those of one tensor."""
    state = whole.state_dict()
    rules = get_model_conversion_mapping(whole)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern: dict[str | None, WeightConverter] = {
        pattern: rule for rule in converters for pattern in rule.source_patterns
    }
    found: dict[str, Conversion] = {}
    others = []
    # Rules may depend on the order, and experts are joined in it.
    for name in sorted(stored, key=dot_natural_key):
        own_name = _name_in_text_part(name, whole.base_model_prefix)
        target, pattern = rename_source_key(own_name, renamings, converters, whole.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None  # it is stored as it is in memory
        if target not in state:
            others.append(name)
            continue
        rule = by_pattern.get(pattern)
        one = found.setdefault(target, Conversion(target, {}, rule))
        if one.sources and (rule is None or one.rule is not rule):
            raise ValueError(f"'{one.stored_names[0]}' and '{name}' are both '{target}' of the model")
        one.sources.setdefault(pattern or "", []).append(name)  # type: ignore[attr-defined]
    return list(found.values()), others


_TEXT_PART = re.compile(r"^(model\.)?language_model\.(model\.)?")


def _name_in_text_part(stored: str, prefix: str) -> str:
    """Return what the text part of a model of text and pictures calls a stored tensor; other names as they are."""
    part = _TEXT_PART.sub("", stored)
    return stored if part == stored else part if part.startswith("lm_head") else f"{prefix}.{part}"


def of_other_parts(stored: Collection[str]) -> set[str]:
    """Return the tensors of pictures and the like where files hold a model of text and pictures; else none."""
    texts = {name for name in stored if _TEXT_PART.match(name)}
    return {name for name in stored if name not in texts and not name.startswith("lm_head")} if texts else set()


def stored_tensors(whole: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by which transformers' `save_pretrained` stores these of a model, such as those of a unit."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in (whole._keys_to_ignore_on_save or ())}
    return revert_weight_conversion(whole, kept)


def is_ignored(whole: PreTrainedModel, stored: str) -> bool:
    """Say whether the model does without a stored tensor, which is then neither trained nor exported: layers that
    predict further tokens, causal masks, and rotary frequencies, which older versions of transformers stored."""
    patterns = (r"rotary_emb\.inv_freq$", r"attn\.masked_bias$", *(whole._keys_to_ignore_on_load_unexpected or ()))
    return any(re.search(pattern, stored) for pattern in patterns)


def keep_precise_buffers(whole: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make buffers fp32 that transformers keeps so in a model of a lower precision: biases that choose experts."""
    patterns = [pattern.replace("*", ".*") for pattern in whole._get_dtype_plan(dtype)]
    for name, buffer in list(whole.named_buffers()):
        if any(re.search(pattern, name) for pattern in patterns):
            owner, _, key = name.rpartition(".")
            setattr(whole.get_submodule(owner), key, buffer.float())
