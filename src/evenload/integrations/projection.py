"""`project`: the micro-batches that an engine runs of a plan, for every data-parallel replica, with their lengths.

    StepPlan ─► packs of documents ─► order ─► empty micro-batches ─► padded lengths

Every document of the plan is trained once. Schedules and transfers are left to the engine; padding is added, and
micro-batches without documents where counts have to agree. Every rank projects alike from the plan alone. O(documents).
"""

import math

import msgspec

from evenload.errors import ConfigError
from evenload.integrations.engine_profile import EngineProfile, require_layout
from evenload.types.base import Frozen
from evenload.types.document import PackPlan
from evenload.types.plan import StepPlan


class StepShape(Frozen):
    """Holds what a run fixes of a step's micro-batches, in addition to what the engine needs.

    Args:
        micro_batches: of every rank, exactly; None = as many as the plan and the engine need.
        pack_multiple: padded lengths are a multiple of it.
        pack_tokens: length of all micro-batches; None = each its own, or the longest's where an engine's are all equal.
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
        pack: index of the replica's forward pack; -1 = without documents.
    """

    doc_ids: tuple[int, ...] = ()
    document_tokens: tuple[int, ...] = ()
    padded_tokens: int = 0
    pack: int = -1


def project(plan: StepPlan, profile: EngineProfile, shape: StepShape) -> tuple[tuple[EngineMicroBatch, ...], ...]:
    """Return the micro-batches of every replica, in order, as the engine runs them.

    Raises:
        ConfigError: the plan holds what the engine cannot run (slices, documents shared among replicas or whole on one
            rank of a context group, a pipeline); or `shape` allows too few micro-batches or tokens.
    """
    require_layout(profile, plan.layout)
    # A context-parallel group shares rows by a multiple of it; a document needs padding only where it is cut itself.
    group_rows = profile.document_chunks * plan.layout.cp if plan.layout.cp > 1 else 1
    chunk = group_rows if profile.context_parallel == "fixed" else 1
    replicas = [_replica(plan, packs, profile, chunk) for packs in plan.pack_plans]
    counts = _counts([len(replica) for replica in replicas], plan, profile, shape)
    length = shape.pack_tokens
    longest = max((one.padded_tokens for replica in replicas for one in replica), default=0)
    if length is None and profile.pads_in(plan.layout):
        length = max(1, longest)
    if length is not None and longest > length:
        at = f"engine {profile.name}: step {plan.step}"
        raise ConfigError(
            f"{at} has a micro-batch of {longest} tokens, and all have {length}; lower max_pack_tokens to it"
        )
    multiple = math.lcm(shape.pack_multiple, group_rows)

    def padded(one: EngineMicroBatch) -> EngineMicroBatch:
        tokens = max(1, one.padded_tokens) if length is None else length
        return msgspec.structs.replace(one, padded_tokens=-(-tokens // multiple) * multiple)

    return tuple(
        tuple(map(padded, [*replica, *[EngineMicroBatch()] * (count - len(replica))]))
        for replica, count in zip(replicas, counts, strict=True)
    )


def _replica(plan: StepPlan, packs: PackPlan, profile: EngineProfile, chunk: int) -> list[EngineMicroBatch]:
    """Return a replica's micro-batches in order, without the padding behind their documents."""
    if not profile.slices:
        _require_whole(plan, packs, profile)
    ordered = list(packs.forward)
    if profile.waits_in(plan.layout):
        # The ranks' first micro-batches wait for each other, then their second: equally long ones belong together.
        times = plan.times[packs.dp_rank]
        seconds = [sum(times.forward_s[at]) + sum(times.backward_s[at]) for at in range(len(ordered))]
        ordered = [ordered[at] for at in sorted(range(len(ordered)), key=lambda at: -seconds[at])]
    micro_batches = []
    for pack in ordered:
        tokens = tuple(-(-(pack.pad_to or piece.num_tokens) // chunk) * chunk for piece in pack.slices)
        doc_ids = tuple(piece.doc_id for piece in pack.slices)
        at = pack.index if doc_ids else -1
        one = EngineMicroBatch(doc_ids=doc_ids, document_tokens=tokens, padded_tokens=sum(tokens), pack=at)
        micro_batches.append(one)
    return micro_batches


def _require_whole(plan: StepPlan, packs: PackPlan, profile: EngineProfile) -> None:
    num_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
    name = f"step {plan.step} of strategy {plan.strategy}"
    for pack in packs.forward:
        for piece in pack.slices:
            if piece.num_tokens != (whole := num_tokens[piece.doc_id]):
                part = f"tokens [{piece.start}, {piece.stop}) of document {piece.doc_id}, which has {whole}"
                profile.refuse("slices", f"{name} holds {part}")
            if piece.cp > plan.layout.cp:
                profile.refuse("sharing", f"{name} shares document {piece.doc_id} among replicas")
        if plan.layout.cp > 1 and isinstance(pack.sharding, tuple) and max(pack.sharding, default=-1) >= 0:
            profile.refuse("mixed_context", f"{name} has documents whole on one rank of a context group")


def _counts(counts: list[int], plan: StepPlan, profile: EngineProfile, shape: StepShape) -> list[int]:
    multiple = profile.count_multiple_in(plan.layout)
    rounded = [-(-count // multiple) * multiple for count in counts]
    if (fixed := shape.micro_batches) is not None:
        if max(rounded) > fixed or fixed % multiple:
            raise ConfigError(
                f"engine {profile.name}: step {plan.step} needs {max(rounded)} micro-batches on a rank, micro_batches "
                f"is {fixed} and must be a multiple of {multiple} and at least as many; raise it or max_pack_tokens"
            )
        return [fixed] * len(counts)
    is_equal = profile.equal_counts if shape.equal_counts is None else shape.equal_counts
    return [max(rounded)] * len(counts) if is_equal else rounded
