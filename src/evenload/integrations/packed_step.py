"""`PackedStep`: one optimizer step as micro-batches of this rank, in the format asked for, padded where need be.

A pack without work makes a forward and a backward pass like any other, so collectives inside a model meet, and its
gradient is exactly 0. Which pack is trained when, how many there are and how long they are says `engines.projection`;
here they get their tokens. The padding at the end of a pack is a document of its own: no other document sees it, no
position goes beyond those of real documents, and it carries no loss. Who needs a multiple: sequence parallelism of
Megatron-Core splits the rows of a pack evenly over the tensor-parallel ranks and stops at one that they do not divide.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenload.data.encoders import IGNORE_INDEX
from evenload.engines.projection import project
from evenload.errors import ConfigError
from evenload.feed.collate import PADDING_TOKEN, PackBatch, collate_packs
from evenload.feed.step_maker import PlannedStep
from evenload.integrations.batch_formats import format_pack
from evenload.integrations.loader_options import LoaderOptions
from evenload.integrations.loader_peers import LoaderPlace
from evenload.types.plan import StepPlan

_COLUMNS = ("doc_ids", "starts", "stops", "token_ids", "targets", "positions")


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedStep:
    """One step of this rank. Iterating gives the micro-batches.

    Args:
        planned: plan of all ranks, account and states after this step.
        packs: forward packs of this rank in the order in which they are trained, zero-weight ones last.
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
    if options.micro_batches is not None and max(counts) > options.micro_batches:
        raise ConfigError(_too_many(step.plan, counts, options.micro_batches, options.max_tokens))
    projected = project(step.plan, options.profile, options.shape)
    forward, backward = collate_packs(step.plan.pack_plans[place.rank], step.tokens)
    micro_batches = projected.ranks[place.rank * options.sequence_ranks]
    packs = tuple(
        pad_pack(forward[one.pack], one.padded_tokens) if one.doc_ids else zero_weight_pack(one.padded_tokens)
        for one in micro_batches
    )
    return PackedStep(
        planned=step,
        packs=packs,
        backward_packs=backward,
        batches=tuple(format_pack(pack, options.batch_format, projected.num_label_tokens) for pack in packs),
        num_zero_weight=sum(not one.doc_ids for one in micro_batches),
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


def zero_weight_pack(num_tokens: int = 1) -> PackBatch:
    """Padding tokens, one document, without a loss."""
    edges = np.array([0, num_tokens], np.int32)
    return PackBatch(
        doc_ids=np.array([-1], np.int64),
        starts=np.zeros(1, np.int64),
        stops=np.full(1, num_tokens, np.int64),
        token_ids=np.full(num_tokens, PADDING_TOKEN, np.int64),
        targets=np.full(num_tokens, IGNORE_INDEX, np.int64),
        positions=np.arange(num_tokens, dtype=np.int64),
        cu_seqlens_q=edges,
        cu_seqlens_k=edges,
        max_seqlen_q=num_tokens,
        max_seqlen_k=num_tokens,
        num_label_tokens=0,
        num_padding_tokens=num_tokens,
    )


def pad_pack(pack: PackBatch, num_tokens: int) -> PackBatch:
    """The pack with a document of padding at its end, so that it has so many tokens; itself where it has them."""
    missing = num_tokens - pack.num_tokens
    if not missing:
        return pack
    padding = zero_weight_pack(missing)
    columns: dict[str, Any] = {name: np.concatenate([getattr(pack, name), getattr(padding, name)]) for name in _COLUMNS}
    return replace(
        pack,
        **columns,
        cu_seqlens_q=np.append(pack.cu_seqlens_q, pack.cu_seqlens_q[-1:] + missing),
        cu_seqlens_k=np.append(pack.cu_seqlens_k, pack.cu_seqlens_k[-1:] + missing),
        max_seqlen_q=max(pack.max_seqlen_q, missing),
        max_seqlen_k=max(pack.max_seqlen_k, missing),
        num_padding_tokens=pack.num_padding_tokens + missing,
    )
