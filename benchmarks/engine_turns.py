"""What the engines of engine_steps.py have in common: documents, loaders, prices, and variants that train by turns."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from evenload.cost.coefficients import read_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.data.config import DataConfig
from evenload.engines.catalog import engine_named
from evenload.engines.price import engine_price
from evenload.integrations.packed_loader import PackedLoader
from evenload.integrations.packed_step import PackedStep
from evenload.types.hf_config import model_from_hf_config
from evenload.types.layout import even_layout
from loader_training import CONTEXT, PER_DOCUMENT

RANKS = 2
DOCUMENTS = 64
BASELINE = "best_fit"
VARIANTS: dict[str, dict[str, Any]] = {
    BASELINE: {"strategy": "best_fit", "equal_micro_batches": True},
    "balanced": {"strategy": "balanced"},
    "auto": {"strategy": "auto"},
}
"""Loader settings: what users of these engines pack (every rank as many micro-batches), and plans for the engine."""


class Trained(NamedTuple):
    """One step of this rank: its loss is that of the global batch."""

    seconds: float
    loss: float
    predicted_s: float


Train = Callable[[Path, Sequence[str]], list[Trained]]
"""Called on every rank inside a process group with a folder and the variants by turns; a step of each turn."""


def documents(directory: Path) -> DataConfig:
    """Where every variant's loader reads."""
    return DataConfig(
        sources=(str(directory / "documents.bin"),), format="memmap", record="tokens", seed=1,
        batch_documents=DOCUMENTS, max_document_tokens=CONTEXT, workers=0,
    )  # fmt: skip


def open_loader(directory: Path, engine: str, config: LlamaConfig, **settings: Any) -> PackedLoader:
    """This rank's loader of an engine."""
    return PackedLoader(
        documents(directory), max_tokens=CONTEXT, engine=engine, model=config, costs=str(directory / "cost.json"),
        **settings,
    )  # fmt: skip


def pricer(directory: Path, engine: str, config: LlamaConfig) -> Callable[[PackedStep, PackedLoader], float]:
    """Predicted seconds of a step on the engine, by what was profiled on this machine."""
    spec = model_from_hf_config(config.to_dict(), "llama")
    layout = even_layout(spec.num_layers, dp=dist.get_world_size())
    costs = PackCosts(spec, read_coefficients(directory / "cost.json"), layout)

    def price(step: PackedStep, loader: PackedLoader) -> float:
        return engine_price(step.plan, engine_named(engine), costs, loader.options.shape).step_time_s

    return price


def by_turns(variants: Mapping[str, Iterator[Trained]], turns: Sequence[str]) -> list[Trained]:
    """A step of every turn; ranks begin it together."""
    found = []
    for variant in turns:
        dist.barrier()
        found.append(next(variants[variant]))
    return found


def loop_steps(
    directory: Path, engine: str, config: LlamaConfig, variant: str, make_loop: Callable[[PackedLoader], Any]
) -> Iterator[Trained]:
    """Steps of an `EngineLoop`."""
    loader = open_loader(directory, engine, config, **VARIANTS[variant])
    loop, price = make_loop(loader), pricer(directory, engine, config)
    for step in loader.steps():
        start_s = time.perf_counter()
        loss = loop.accumulate(step)
        loop.update()
        yield Trained(time.perf_counter() - start_s, loss.item(), price(step, loader))


def new_model(config: LlamaConfig) -> nn.Module:
    """The same weights on all ranks."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=PER_DOCUMENT)
