"""A model with LoRA adapters, as we build it and as `peft` trains it."""

from pathlib import Path

import peft
import torch
from torch import nn

from evenload.config.sections import LoraConfig
from evenload.runtime.model.lora import write_adapter
from reference_training import plain_model, stage_model

LORA = LoraConfig(rank=3, alpha=6.0)


def all_tensors(model) -> dict[str, torch.Tensor]:
    """Of a stage that holds the whole model, by name; the base's under transformers' names."""
    return {n.replace(".base_layer", ""): p.detach().clone() for named in model.named_units() for n, p in named}


def peft_model(config, tensors, directory, dtype) -> peft.PeftModel:
    """transformers' model of the base tensors with the adapter that we exported."""
    adapters = {n: t for n, t in tensors.items() if ".lora_" in n}
    write_adapter(directory, adapters, LORA, "somewhere")
    base = plain_model(config, {n: t for n, t in tensors.items() if n not in adapters}, dtype)
    return peft.PeftModel.from_pretrained(base, directory, is_trainable=True, autocast_adapter_dtype=False)


def make_adapters_matter(model):
    """B begins as zeros, which would hide any error in A's gradient."""
    torch.manual_seed(1)
    for layer in model.layers.values():
        for name, parameter in layer.named_parameters():
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.3)


def adapter_tensors(config, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A model with adapters that matter, by name."""
    model = stage_model(config, dtype, lora=LORA)
    make_adapters_matter(model)
    return all_tensors(model)


def adapter_loss_and_gradients(config, tensors, directory: Path, tokens: dict[int, torch.Tensor], dtype: torch.dtype):
    """Adapters written to `directory`, and the loss and gradients of peft's training of them, document by document."""
    plain = peft_model(config, tensors, directory, dtype)
    labels = max(1, sum(len(t) - 1 for t in tokens.values()))
    loss = sum(
        nn.functional.cross_entropy(plain(t[None]).logits[0, :-1], t[1:], reduction="sum") / labels
        for t in tokens.values()
    )
    loss.backward()
    named = {n.removeprefix("base_model.model."): p.grad for n, p in plain.named_parameters() if p.grad is not None}
    return loss.item(), named
