"""What the engines of engine_steps.py have in common: documents, loaders, prices, and variants that train by turns."""

import itertools
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
from evenload.data.hub import model_from_config
from evenload.integrations.catalog import engine_named
from evenload.integrations.packed_loader import PackedLoader, PackedStep
from evenload.integrations.price import engine_price
from evenload.planning.packing import assign_in_turn
from evenload.planning.problem import ReplicaChoice, StepProblem
from evenload.planning.strategies.registry import register
from evenload.planning.strategies.strategy import Strategy
from evenload.types.layout import even_layout
from loader_training import CONTEXT, PER_DOCUMENT


def packs_in_order(num_tokens: list[int], max_pack_tokens: int) -> list[list[int]]:
    """Documents as they come, into a pack until the next one does not fit."""
    packs: list[list[int]] = []
    room = 0
    for index, tokens in enumerate(num_tokens):
        if tokens > room:
            packs.append([])
            room = max_pack_tokens
        packs[-1].append(index)
        room -= tokens
    return packs


def plan_in_order(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    """As engines with a packing of their own do; packs are dealt to replicas in turn."""
    return assign_in_turn(problem, packs_in_order(problem.num_tokens.tolist(), problem.window_tokens("in_order")))


IN_ORDER = Strategy(
    name="in_order",
    description="documents as they come, into a pack until the next one does not fit: a baseline of benchmarks",
    plan=plan_in_order,
    ignores_memory=True,
    # No solver, but what has a limit runs where it is named only: `auto` must not choose among more than users have.
    solver_limit_s=lambda options: 0.0,
)
register(IN_ORDER)

RANKS = 2
STEP_TOKENS = 6 * CONTEXT
"""Of a global batch: three full packs a rank."""
OURS = "auto"
BASELINES: dict[str, dict[str, Any]] = {
    "best_fit": {"strategy": "best_fit"},
    "in_order": {"strategy": IN_ORDER.name},
    "in_order, padded": {"strategy": IN_ORDER.name, "fixed_shapes": True},
}
"""Loader settings of what users of the engines get where they do nothing about it."""


class Trained(NamedTuple):
    """One step of this rank: its loss is that of the global batch."""

    seconds: float
    loss: float
    predicted_s: float


class ReadySteps:
    """A loader whose steps are made before any of them is timed: reading and planning are not what is measured."""

    def __init__(self, loader: PackedLoader, num_steps: int) -> None:
        self.loader = loader
        self.made = list(itertools.islice(loader.steps(), num_steps))
        self._left = iter(self.made)

    def steps(self) -> Iterator[PackedStep]:
        """What is left of them."""
        return self._left

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Race(NamedTuple):
    """What every rank of a measurement knows.

    Args:
        directory: of the documents and the cost file.
        engine: in `integrations.catalog`; config: of its model.
        baseline: of `BASELINES`; turns: variants, one a step.
    """

    directory: Path
    engine: str
    config: LlamaConfig
    baseline: str
    turns: Sequence[str]

    @property
    def variants(self) -> tuple[str, str]:
        """In the order of the first round."""
        return self.baseline, OURS

    def settings(self, variant: str, **further: Any) -> dict[str, Any]:
        """Of a variant's `PackedLoader`."""
        own = {"strategy": "auto"} if variant == OURS else BASELINES[variant]
        if variant != OURS and not engine_named(self.engine).constant_counts:
            further = {"equal_micro_batches": True} | further
        return {
            "max_tokens": CONTEXT, "engine": self.engine, "model": model_from_config(self.config.to_dict(), "llama"),
            "costs": str(self.directory / "cost.json"), **own, **further,
        }  # fmt: skip

    def documents(self) -> DataConfig:
        """The same global batches for every variant."""
        return DataConfig(
            sources=(str(self.directory / "documents.bin"),), format="memmap", record="tokens", seed=1,
            batch_tokens=STEP_TOKENS, max_document_tokens=CONTEXT, workers=0,
        )  # fmt: skip

    def ready(self, variant: str, **further: Any) -> ReadySteps:
        """A variant's loader on this rank, its steps made."""
        loader = PackedLoader(self.documents(), **self.settings(variant, **further))
        return ReadySteps(loader, list(self.turns).count(variant))

    def price(self, step: PackedStep, loader: Any) -> float:
        """Predicted seconds of a step on the engine, by what was profiled on this machine."""
        spec = model_from_config(self.config.to_dict(), "llama")
        layout = even_layout(spec.num_layers, dp=dist.get_world_size())
        costs = PackCosts(spec, read_coefficients(self.directory / "cost.json"), layout)
        return engine_price(step.plan, engine_named(self.engine), costs, loader.options.shape).step_time_s


Train = Callable[[Race], list[Trained]]
"""Called on every rank inside a process group; a step of each turn."""


def by_turns(variants: Mapping[str, Iterator[Trained]], turns: Sequence[str]) -> list[Trained]:
    """A step of every turn; ranks begin it together."""
    result = []
    for variant in turns:
        dist.barrier()
        result.append(next(variants[variant]))
    return result


def loop_steps(race: Race, variant: str, make_loop: Callable[[Any], Any], **further: Any) -> Iterator[Trained]:
    """Steps of an `EngineLoop`, or of another with `accumulate` and `update`."""
    ready = race.ready(variant, **further)
    loop = make_loop(ready.loader)
    for step in ready.steps():
        start_s = time.perf_counter()
        loss = loop.accumulate(step)
        loop.update()
        seconds = time.perf_counter() - start_s
        yield Trained(seconds, float(loss), race.price(step, ready))


def loops_by_turns(race: Race, make_loop: Callable[[Any], Any], **further: Any) -> list[Trained]:
    """All turns of loops over one engine."""
    return by_turns({one: loop_steps(race, one, make_loop, **further) for one in race.variants}, race.turns)


def new_model(config: LlamaConfig) -> nn.Module:
    """The same weights on all ranks."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=PER_DOCUMENT)
