"""`project`: a plan of all ranks as an engine takes it: per rank micro-batches of documents, a context group, a length.

    StepPlan ─► packs of documents ─► order, splits ─► empty micro-batches ─► padded lengths ─► EngineStep

Nothing is trained that the plan does not train, and nothing twice: a projection only leaves out what an engine decides
itself (schedules, transfers), adds micro-batches without documents where counts have to agree, and padding. It is pure,
so every rank may make it from the plan alone. O(documents).
"""

import itertools
import math
from collections.abc import Sequence

import msgspec

from evenload.engines.profile import EngineProfile
from evenload.engines.refusals import require_plan_layout
from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.micropack import MicroPack, PackPlan
from evenload.types.plan import StepPlan


class StepShape(Frozen):
    """What the caller's run fixes of a step's micro-batches, beside what the engine needs.

    Args:
        micro_batches: of every rank, exactly; None = as many as the plan and the engine need.
        pack_multiple: padded lengths are a multiple of it.
        pack_tokens: length of all micro-batches; None = each its own, or that of the longest where the engine's shapes
            are fixed.
        equal_counts: on all ranks; None = as the engine needs.
    """

    micro_batches: int | None = None
    pack_multiple: int = 1
    pack_tokens: int | None = None
    equal_counts: bool | None = None


class EngineMicroBatch(Frozen, gc=False):
    """What one rank computes in one forward and backward.

    Args:
        doc_ids: in order; () = padding alone, whose gradient is 0.
        context_ranks: that share each of its documents.
        document_tokens: of every document its rows, its own padding included.
        padded_tokens: rows of all its documents together and of the padding behind them, over all ranks that share
            them.
        pack: forward pack of the rank's replica that it comes from; -1 = without documents.
    """

    doc_ids: tuple[int, ...]
    context_ranks: int = 1
    document_tokens: tuple[int, ...] = ()
    padded_tokens: int
    pack: int = -1


class EngineStep(Frozen):
    """One optimizer step as an engine runs it.

    Args:
        ranks: of every rank of the data-parallel times the context-parallel dimension its micro-batches in order; place
            `dp_rank * cp + cp_rank`, so without context parallelism one a data-parallel rank. A micro-batch that a
            context group shares stands on all its ranks, at the same place.
        num_label_tokens: of the global batch: what the sum of all losses is divided by.
    """

    ranks: tuple[tuple[EngineMicroBatch, ...], ...]
    num_label_tokens: int


def project(plan: StepPlan, profile: EngineProfile, shape: StepShape | None = None) -> EngineStep:
    """The plan as the engine runs it.

    Args:
        shape: what the run fixes; None = nothing.

    Raises:
        ConfigError: the plan holds what the engine cannot run (slices, documents shared by replicas or in a way that it
            does not know, a pipeline), named with the nearest thing that works; or a rank needs more micro-batches, or
            a pack more tokens than `shape` says.
    """
    shape = shape or StepShape()
    require_plan_layout(profile, plan.layout)
    replicas = [_replica(plan, packs, profile) for packs in plan.pack_plans]
    counts = [len(groups) for groups in replicas]
    wanted = _counts(counts, plan, profile, shape)
    length = _fixed_length(replicas, plan, profile, shape)
    cp, shares_all = plan.layout.cp, profile.context_parallel == "heads"
    # Each rank of a group that shares heads has equally many rows of every micro-batch, of those without documents too.
    empty = EngineMicroBatch(doc_ids=(), context_ranks=cp if shares_all else 1, padded_tokens=0)
    multiple = math.lcm(shape.pack_multiple, cp) if shares_all else shape.pack_multiple
    ranks: list[tuple[EngineMicroBatch, ...]] = []
    for groups, count in zip(replicas, wanted, strict=True):
        groups = groups + [[empty] * cp] * (count - len(groups))
        for rank in range(cp):
            ranks.append(tuple(_padded(group[rank], length, multiple) for group in groups))
    return EngineStep(ranks=tuple(ranks), num_label_tokens=plan.num_label_tokens)


def _replica(plan: StepPlan, packs: PackPlan, profile: EngineProfile) -> list[list[EngineMicroBatch]]:
    """Micro-batches of a replica in order, each of all its context-parallel ranks; lengths without padding."""
    order: Sequence[int] = range(len(packs.forward))
    if profile.waits_in(plan.layout):
        # The ranks' first micro-batches wait for each other, then their second: alike ones belong together.
        times = plan.times[packs.dp_rank]
        seconds = [sum(times.forward_s[at]) + sum(times.backward_s[at]) for at in order]
        order = sorted(order, key=lambda at: -seconds[at])
    num_tokens = {} if profile.slices else {document.doc_id: document.num_tokens for document in plan.documents}
    groups = (_micro_batches(packs.forward[at], num_tokens, plan, profile) for at in order)
    return list(itertools.chain.from_iterable(groups))


def _micro_batches(
    pack: MicroPack, num_tokens: dict[int, int], plan: StepPlan, profile: EngineProfile
) -> list[list[EngineMicroBatch]]:
    """Of one pack: one micro-batch, or one of documents whole on their ranks and one of shared documents."""
    cp = plan.layout.cp
    for piece in pack.slices:
        if not profile.slices and piece.num_tokens != num_tokens[piece.doc_id]:
            asked = (
                f"step {plan.step} of strategy {plan.strategy} holds tokens [{piece.start}, {piece.stop}) of document "
                f"{piece.doc_id}, which has {num_tokens[piece.doc_id]}"
            )
            profile.refuse("slices", asked)
        if piece.cp > cp:
            asked = f"step {plan.step} of strategy {plan.strategy} shares document {piece.doc_id} among replicas"
            profile.refuse("sharing", asked)
    if cp == 1:
        return [[_of(pack, range(len(pack.slices)), 1, profile)]]
    owners = pack.sharding if isinstance(pack.sharding, tuple) else (-1,) * len(pack.slices)
    local = [at for at, owner in enumerate(owners) if owner >= 0]
    shared = [at for at, owner in enumerate(owners) if owner < 0]
    if local and profile.context_parallel != "group":
        asked = f"step {plan.step} of strategy {plan.strategy} has documents whole on one rank of a context group"
        profile.refuse("mixed_context", asked)
    found = []
    if local:
        found.append([_of(pack, [at for at in local if owners[at] == rank], 1, profile) for rank in range(cp)])
    if shared:
        found.append([_of(pack, shared, cp, profile)] * cp)
    return found


def _of(pack: MicroPack, places: Sequence[int], context_ranks: int, profile: EngineProfile) -> EngineMicroBatch:
    pieces = [pack.slices[at] for at in places]
    # Shared documents are cut into equal chunks, each of them by itself, where ranks do not share their heads.
    is_cut = context_ranks > 1 and profile.context_parallel != "heads"
    chunk = profile.document_chunks * context_ranks if is_cut else 1
    tokens = tuple(-(-(pack.pad_to or piece.num_tokens) // chunk) * chunk for piece in pieces)
    return EngineMicroBatch(
        doc_ids=tuple(piece.doc_id for piece in pieces),
        context_ranks=context_ranks,
        document_tokens=tokens,
        padded_tokens=sum(tokens),
        pack=pack.index if pieces else -1,
    )


def _counts(counts: Sequence[int], plan: StepPlan, profile: EngineProfile, shape: StepShape) -> list[int]:
    """Micro-batches of every replica."""
    multiple = profile.count_multiple_in(plan.layout)
    most = -(-max(counts) // multiple) * multiple
    if shape.micro_batches is not None:
        if most > shape.micro_batches or shape.micro_batches % multiple:
            raise ConfigError(
                f"engine {profile.name}: step {plan.step} needs {most} micro-batches on a rank, micro_batches is "
                f"{shape.micro_batches} and must be a multiple of {multiple} and at least as many; raise it, or "
                "max_pack_tokens, or plan smaller batches"
            )
        return [shape.micro_batches] * len(counts)
    if profile.equal_counts if shape.equal_counts is None else shape.equal_counts:
        return [most] * len(counts)
    return [-(-count // multiple) * multiple for count in counts]


def _fixed_length(
    replicas: Sequence[Sequence[Sequence[EngineMicroBatch]]], plan: StepPlan, profile: EngineProfile, shape: StepShape
) -> int | None:
    """Of all micro-batches of the step; None = each has its own."""
    if shape.pack_tokens is None and not profile.pads_in(plan.layout):
        return None
    longest = max((one.padded_tokens for groups in replicas for group in groups for one in group), default=0)
    if shape.pack_tokens is not None and longest > shape.pack_tokens:
        raise ConfigError(
            f"engine {profile.name}: step {plan.step} has a micro-batch of {longest} tokens, and all have "
            f"{shape.pack_tokens}; raise it, or lower max_pack_tokens to it"
        )
    return max(longest, 1) if shape.pack_tokens is None else shape.pack_tokens


def _padded(one: EngineMicroBatch, length: int | None, multiple: int) -> EngineMicroBatch:
    tokens = max(1, one.padded_tokens) if length is None else length
    tokens = -(-tokens // multiple) * multiple
    return msgspec.structs.replace(one, padded_tokens=tokens)
