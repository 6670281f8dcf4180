"""Project a plan to what an engine runs: for every data-parallel replica its micro-batches of documents, with lengths.

    StepPlan ─► packs of documents ─► order ─► empty micro-batches ─► padded lengths

A projection trains every document of the plan once. It leaves out what an engine decides itself (schedules, transfers)
and adds padding, and micro-batches without documents where counts have to agree. Every rank can make it from the plan
alone. O(documents).
"""

import math
from collections.abc import Sequence

import msgspec

from evenload.errors import ConfigError
from evenload.integrations.engine_profile import EngineProfile, require_layout
from evenload.types.base import Frozen
from evenload.types.document import PackPlan
from evenload.types.plan import StepPlan


class StepShape(Frozen):
    """Holds what the caller's run fixes of a step's micro-batches, in addition to what the engine needs.

    Args:
        micro_batches: of every rank, exactly; None = as many as the plan and the engine need.
        pack_multiple: padded lengths are a multiple of it.
        pack_tokens: length of all micro-batches; None = each its own, or the longest's where the engine's shapes are
        fixed.
        equal_counts: on all ranks; None = as the engine needs.
    """

    micro_batches: int | None = None
    pack_multiple: int = 1
    pack_tokens: int | None = None
    equal_counts: bool | None = None


class EngineMicroBatch(Frozen, gc=False):
    """Holds what a replica computes in one forward and backward; its context-parallel ranks share all of it.

    Args:
        doc_ids: in order; () = padding alone, whose gradient is 0.
        document_tokens: rows of every document, its own padding included.
        padded_tokens: rows of all documents and of the padding behind them.
        pack: forward pack of the replica that it comes from; -1 = without documents.
    """

    doc_ids: tuple[int, ...] = ()
    document_tokens: tuple[int, ...] = ()
    padded_tokens: int = 0
    pack: int = -1


def project(plan: StepPlan, profile: EngineProfile, shape: StepShape) -> tuple[tuple[EngineMicroBatch, ...], ...]:
    """Return the micro-batches of every replica, in order, as the engine runs them.

    Raises:
        ConfigError: the plan holds what the engine cannot run (slices, documents shared among replicas or kept on one
            rank of a context group, a pipeline); or a rank needs more micro-batches, or a pack more tokens than
            `shape` has.
    """
    require_layout(profile, plan.layout)
    # The rows that a context-parallel group shares are a multiple of it.
    group_rows = profile.document_chunks * plan.layout.cp if plan.layout.cp > 1 else 1
    # Where a group shares heads, or there is none, a document needs no padding of its own.
    chunk = group_rows if profile.context_parallel == "fixed" else 1
    replicas = [_replica(plan, packs, profile, chunk) for packs in plan.pack_plans]
    counts = _counts([len(replica) for replica in replicas], plan, profile, shape)
    length = _fixed_length(replicas, plan, profile, shape)
    multiple = math.lcm(shape.pack_multiple, group_rows)

    def padded(one: EngineMicroBatch) -> EngineMicroBatch:
        tokens = max(1, one.padded_tokens) if length is None else length
        return msgspec.structs.replace(one, padded_tokens=-(-tokens // multiple) * multiple)

    return tuple(
        tuple(map(padded, [*replica, *[EngineMicroBatch()] * (count - len(replica))]))
        for replica, count in zip(replicas, counts, strict=True)
    )


def _replica(plan: StepPlan, packs: PackPlan, profile: EngineProfile, chunk: int) -> list[EngineMicroBatch]:
    """Micro-batches of a replica in order; lengths without the padding behind the documents."""
    order: Sequence[int] = range(len(packs.forward))
    if profile.waits_in(plan.layout):
        # The ranks' first micro-batches wait for each other, then their second: alike ones belong together.
        times = plan.times[packs.dp_rank]
        seconds = [sum(times.forward_s[at]) + sum(times.backward_s[at]) for at in order]
        order = sorted(order, key=lambda at: -seconds[at])
    if not profile.slices:
        _require_whole(plan, packs, profile)
    found = []
    for pack in (packs.forward[at] for at in order):
        tokens = tuple(-(-(pack.pad_to or piece.num_tokens) // chunk) * chunk for piece in pack.slices)
        doc_ids = tuple(piece.doc_id for piece in pack.slices)
        index = pack.index if doc_ids else -1
        found.append(EngineMicroBatch(doc_ids=doc_ids, document_tokens=tokens, padded_tokens=sum(tokens), pack=index))
    return found


def _require_whole(plan: StepPlan, packs: PackPlan, profile: EngineProfile) -> None:
    num_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
    name = f"step {plan.step} of strategy {plan.strategy}"
    for pack in packs.forward:
        for piece in pack.slices:
            if piece.num_tokens != num_tokens[piece.doc_id]:
                request = (
                    f"{name} holds tokens [{piece.start}, {piece.stop}) of document {piece.doc_id}, which has "
                    f"{num_tokens[piece.doc_id]}"
                )
                profile.refuse("slices", request)
            if piece.cp > plan.layout.cp:
                profile.refuse("sharing", f"{name} shares document {piece.doc_id} among replicas")
        if plan.layout.cp > 1 and isinstance(pack.sharding, tuple) and max(pack.sharding, default=-1) >= 0:
            profile.refuse("mixed_context", f"{name} has documents whole on one rank of a context group")


def _counts(counts: Sequence[int], plan: StepPlan, profile: EngineProfile, shape: StepShape) -> list[int]:
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
    replicas: Sequence[Sequence[EngineMicroBatch]], plan: StepPlan, profile: EngineProfile, shape: StepShape
) -> int | None:
    """Of all micro-batches of the step; None = each has its own."""
    if shape.pack_tokens is None and not profile.pads_in(plan.layout):
        return None
    longest = max((one.padded_tokens for replica in replicas for one in replica), default=0)
    if shape.pack_tokens is not None and longest > shape.pack_tokens:
        raise ConfigError(
            f"engine {profile.name}: step {plan.step} has a micro-batch of {longest} tokens, and all have "
            f"{shape.pack_tokens}; raise it, or lower max_pack_tokens to it"
        )
    return max(longest, 1) if shape.pack_tokens is None else shape.pack_tokens
