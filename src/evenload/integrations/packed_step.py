"""`PackedStep`: one optimizer step as micro-batches of this rank, in the format asked for."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from evenload.errors import ConfigError
from evenload.feed.collate import PackBatch, collate_packs
from evenload.feed.step_maker import PlannedStep
from evenload.integrations.batch_formats import format_pack
from evenload.integrations.loader_options import LoaderOptions
from evenload.integrations.loader_peers import LoaderPlace
from evenload.integrations.pack_padding import pad_pack, zero_weight_pack
from evenload.types.plan import StepPlan


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedStep:
    """One step of this rank. Iterating gives the micro-batches.

    Args:
        planned: plan of all ranks, account and states after this step.
        packs: forward packs of this rank, zero-weight ones last.
        backward_packs: other cuts of the same documents where the strategy cuts; else the same objects.
        batches: `packs` in the loader's format.
        num_zero_weight: packs without work.
    """

    planned: PlannedStep
    packs: tuple[PackBatch, ...]
    backward_packs: tuple[PackBatch, ...]
    batches: tuple[Any, ...]
    num_zero_weight: int

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def plan(self) -> StepPlan:
        """Of all ranks."""
        return self.planned.plan

    @property
    def num_label_tokens(self) -> int:
        """Of the global batch, all ranks together: what the sum of the losses is divided by."""
        return self.plan.num_label_tokens

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


def pack_step(step: PlannedStep, options: LoaderOptions, place: LoaderPlace) -> PackedStep:
    """This rank's micro-batches of a step; on every rank a `ConfigError` where one needs more than `micro_batches`."""
    counts = [len(packs.forward) for packs in step.plan.pack_plans]
    wanted = options.micro_batches
    if wanted is not None and max(counts) > wanted:
        raise ConfigError(_too_many(step.plan, counts, wanted, options.max_tokens))
    if wanted is None:
        wanted = max(counts) if options.equal_micro_batches else counts[place.rank]
    forward, backward = collate_packs(step.plan.pack_plans[place.rank], step.tokens)
    missing, multiple = max(0, wanted - len(forward)), options.pack_multiple
    packs = (*(pad_pack(pack, multiple) for pack in forward), *(zero_weight_pack(multiple),) * missing)
    num_label_tokens = step.plan.num_label_tokens
    return PackedStep(
        planned=step,
        packs=packs,
        backward_packs=backward,
        batches=tuple(format_pack(pack, options.format, num_label_tokens) for pack in packs),
        num_zero_weight=missing,
    )


def _too_many(plan: StepPlan, counts: list[int], micro_batches: int, max_tokens: int) -> str:
    tokens, world_size = sum(document.num_tokens for document in plan.documents), len(counts)
    rank = max(range(world_size), key=counts.__getitem__)
    return (
        f"step {plan.step}: rank {rank} needs {counts[rank]} packs of at most max_tokens = {max_tokens}, micro_batches "
        f"is {micro_batches}. The batch has {tokens} tokens in {len(plan.documents)} documents; {world_size} ranks x "
        f"{micro_batches} x {max_tokens} = {micro_batches * world_size * max_tokens} hold at most that many, and less "
        f"where whole documents leave gaps (strategy {plan.strategy}). Lower batch_tokens or batch_documents, or raise "
        "max_tokens or micro_batches"
    )
