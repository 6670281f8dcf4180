"""`PackedStep`: one optimizer step as micro-batches of this rank, in the format asked for.

Every rank runs equally many micro-batches where that is asked for: ranks short of work get packs of padding (see
`pack_padding`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from evenload.data.collate import PackBatch, collate_packs
from evenload.data.state import LoaderState
from evenload.data.step_maker import PlannedStep
from evenload.errors import ConfigError
from evenload.integrations.batch_formats import BatchFormat, format_pack
from evenload.integrations.pack_padding import pad_pack, zero_weight_pack
from evenload.plan.delay import DelayState
from evenload.types.plan import StepPlan


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedStep:
    """One step of this rank. Iterating gives the micro-batches.

    Args:
        plan: of all ranks.
        packs: forward packs of this rank, zero-weight ones last.
        backward_packs: other cuts of the same documents where the strategy cuts; else the same objects.
        batches: `packs` in the loader's format.
        num_label_tokens: of the global batch, all ranks together: what the sum of the losses is divided by.
        num_zero_weight: packs without work.
        ledger_lines: the account after this step.
        loader_state, planner_state: to go on after this step.
    """

    epoch: int
    plan: StepPlan
    packs: tuple[PackBatch, ...]
    backward_packs: tuple[PackBatch, ...]
    batches: tuple[Any, ...]
    num_label_tokens: int
    num_zero_weight: int
    ledger_lines: tuple[str, ...]
    plan_time_s: float
    loader_state: LoaderState
    planner_state: DelayState

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank trains, without padding."""
        return sum(pack.num_tokens - pack.num_padding_tokens for pack in self.packs)

    @property
    def num_padding_tokens(self) -> int:
        """Tokens that this rank computes for nothing."""
        return sum(pack.num_padding_tokens for pack in self.packs)

    def after(self, given: int) -> "PackedStep":
        """The step without its first micro-batches."""
        return replace(self, packs=self.packs[given:], batches=self.batches[given:])


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """How many micro-batches a step has.

    Args:
        rank, world_size: of the ranks that share the global batch.
        micro_batches: of every rank; None = as many as the plan has.
        equal: with None: as many as the rank with the most.
        max_tokens: of a pack.
        multiple: of which the tokens of every pack are one, by padding at its end.
    """

    rank: int
    world_size: int
    micro_batches: int | None
    equal: bool
    max_tokens: int
    multiple: int = 1

    def computed_tokens(self, num_tokens: int) -> int:
        """Tokens of a pack of so many, with the padding at its end."""
        return -(-num_tokens // self.multiple) * self.multiple


def pack_step(step: PlannedStep, shape: StepShape, format: BatchFormat) -> PackedStep:
    """This rank's micro-batches of a step.

    Raises:
        ConfigError: a rank needs more packs than `micro_batches`; on every rank.
    """
    counts = [len(packs.forward) for packs in step.plan.pack_plans]
    wanted = shape.micro_batches
    if wanted is not None and max(counts) > wanted:
        raise ConfigError(_too_many(step.plan, counts, shape))
    if wanted is None:
        wanted = max(counts) if shape.equal else counts[shape.rank]
    forward, backward = collate_packs(step.plan.pack_plans[shape.rank], step.tokens)
    missing = max(0, wanted - len(forward))
    packs = (*(pad_pack(pack, shape.multiple) for pack in forward), *(zero_weight_pack(shape.multiple),) * missing)
    return PackedStep(
        epoch=step.epoch,
        plan=step.plan,
        packs=packs,
        backward_packs=backward,
        batches=tuple(format_pack(pack, format, step.plan.num_label_tokens) for pack in packs),
        num_label_tokens=step.plan.num_label_tokens,
        num_zero_weight=missing,
        ledger_lines=step.ledger_lines,
        plan_time_s=step.plan_time_s,
        loader_state=step.loader_state,
        planner_state=step.planner_state,
    )


def _too_many(plan: StepPlan, counts: list[int], shape: StepShape) -> str:
    tokens = sum(document.num_tokens for document in plan.documents)
    rank = max(range(len(counts)), key=counts.__getitem__)
    room = (shape.micro_batches or 0) * shape.world_size * shape.max_tokens
    return (
        f"step {plan.step}: rank {rank} needs {counts[rank]} packs of at most max_tokens = {shape.max_tokens}, "
        f"micro_batches is {shape.micro_batches}. The batch has {tokens} tokens in {len(plan.documents)} documents; "
        f"{shape.world_size} ranks x {shape.micro_batches} x {shape.max_tokens} = {room} hold at most that many, and "
        f"less where whole documents leave gaps (strategy {plan.strategy}). Lower batch_tokens or batch_documents, or "
        "raise max_tokens or micro_batches"
    )
