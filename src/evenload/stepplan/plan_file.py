"""Write and read the plan file of `evenload plan --emit-plan`, JSON of StepPlans that others can simulate too.

The shape is fixed. Optional keys: `num_label_tokens` of a document, of a tree its `segments` (pairs of tokens and the
parent's place, -1 = root), `num_path_tokens` and `num_recomputed_tokens`, `pad_to` of a padded slice, `policies` of a
replica, `left_out`, `mean_token_delay_steps`, `is_cut_short`, `digest`; of slices of a shared forward pack `sharding`,
its rule, or `owner`, the rank that computes the slice whole, -1 = all ranks. Readers ignore unknown keys. `cost_s` of a
pack is the largest of its durations.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from evenload.errors import ConfigError, InvalidPlanError
from evenload.stepplan.validate import check_replica
from evenload.types.document import Direction, Document, MicroPack, PackPlan, PackSharding, Slice
from evenload.types.layout import ParallelLayout
from evenload.types.plan import LeftOut, PackTimes, Prediction, Schedule, StepPlan, parse_action, plan_digest, seal

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def encode_plan_file(plans: Sequence[StepPlan]) -> bytes:
    return json.dumps({"plans": [_plan_to_json(plan) for plan in plans]}, separators=(",", ":")).encode() + b"\n"


def decode_plan_file(data: bytes) -> tuple[StepPlan, ...]:
    """Decode what `encode_plan_file` gives; `InvalidPlanError` where a key is missing or a digest does not match."""
    try:
        return tuple(_plan_from_json(plan) for plan in json.loads(data)["plans"])
    except (KeyError, IndexError) as error:
        raise InvalidPlanError(f"plan file: key {error} is missing") from error
    except (TypeError, AttributeError, ValueError, msgspec.MsgspecError, ConfigError) as error:
        raise InvalidPlanError(f"plan file: not a plan file: {error}") from error


def _plan_to_json(plan: StepPlan) -> dict[str, Any]:
    out = {
        "step": plan.step,
        "strategy": plan.strategy,
        "layout": msgspec.to_builtins(plan.layout),
        "num_label_tokens": plan.num_label_tokens,
        "documents": [_document_to_json(document) for document in plan.documents],
        "replicas": [
            _replica_to_json(*replica) for replica in zip(plan.pack_plans, plan.schedules, plan.times, strict=True)
        ],
        "predicted": msgspec.to_builtins(plan.predicted),
        "digest": plan.digest,
    }
    optional = {name: msgspec.to_builtins(getattr(plan, name)) for name in _OPTIONAL}
    return out | {name: value for name, value in optional.items() if value}


_OPTIONAL = ("left_out", "mean_token_delay_steps", "is_cut_short")
_OF_TREES = ("segments", "num_path_tokens", "num_recomputed_tokens")


def _document_to_json(document: Document) -> dict[str, Any]:
    # A part of a tree may be a single sequence, which has no segments but tokens that are computed again.
    return {key: value for key, value in msgspec.to_builtins(document).items() if value or key not in _OF_TREES}


def _replica_to_json(packs: PackPlan, schedule: Schedule, times: PackTimes) -> dict[str, Any]:
    out: dict[str, Any] = {
        "dp_rank": packs.dp_rank,
        "forward": [_pack_to_json(pack) for pack in packs.forward],
        "backward": [_pack_to_json(pack) for pack in packs.backward],
        "schedule": [[str(action) for action in row] for row in schedule.ranks],
        "durations_forward_s": times.forward_s,
        "durations_backward_s": times.backward_s,
        "p2p_forward_s": times.p2p_forward_s,
        "p2p_backward_s": times.p2p_backward_s,
    }
    if times.input_s:
        out["durations_input_s"], out["durations_weight_s"] = times.input_s, times.weight_s
    if packs.policies:
        out["policies"] = {str(doc_id): policy for doc_id, policy in packs.policies.items()}
    return out


def _pack_to_json(pack: MicroPack) -> list[dict[str, Any]]:
    of_pack = {"pad_to": pack.pad_to, "sharding": "" if isinstance(pack.sharding, tuple) else pack.sharding}
    extra = {name: value for name, value in of_pack.items() if value}
    slices: list[dict[str, Any]] = [msgspec.to_builtins(piece) | extra for piece in pack.slices]
    if isinstance(pack.sharding, tuple):
        slices = [one | {"owner": owner} for one, owner in zip(slices, pack.sharding, strict=True)]
    return slices


def _plan_from_json(data: dict[str, Any]) -> StepPlan:
    replicas = data["replicas"]
    plan = StepPlan(
        step=data["step"],
        strategy=data["strategy"],
        layout=msgspec.convert(data["layout"], ParallelLayout),
        documents=tuple(map(_document_from_json, data["documents"])),
        num_label_tokens=data["num_label_tokens"],
        pack_plans=tuple(
            PackPlan(
                dp_rank=replica["dp_rank"],
                forward=_direction_from_json(replica, "forward"),
                backward=_direction_from_json(replica, "backward"),
                policies={int(doc_id): policy for doc_id, policy in replica.get("policies", {}).items()},
            )
            for replica in replicas
        ),
        schedules=tuple(
            Schedule(ranks=tuple(tuple(map(parse_action, row)) for row in replica["schedule"])) for replica in replicas
        ),
        times=tuple(msgspec.convert(_times_from_json(replica), PackTimes) for replica in replicas),
        predicted=msgspec.convert(data["predicted"], Prediction),
        left_out=msgspec.convert(data.get("left_out", []), tuple[LeftOut, ...]),
        mean_token_delay_steps=data.get("mean_token_delay_steps", 0.0),
        is_cut_short=data.get("is_cut_short", False),
        digest=data.get("digest", ""),
    )
    if plan.digest and plan.digest != plan_digest(plan):
        raise InvalidPlanError(
            f"plan file: step {plan.step} says digest {plan.digest}, its content gives {plan_digest(plan)}; "
            "the file was changed after planning"
        )
    return plan


def _document_from_json(document: dict[str, Any]) -> Document:
    return _from_known({"num_label_tokens": document["num_tokens"] - 1} | document, Document)


def _from_known(tree: dict[str, Any], kind: type[_Struct]) -> _Struct:
    """Convert the keys that are fields of a struct; readers ignore others."""
    return msgspec.convert({key: tree[key] for key in kind.__struct_fields__ if key in tree}, kind)


def _times_from_json(replica: dict[str, Any]) -> dict[str, Any]:
    optional = {f"{part}_s": replica.get(f"durations_{part}_s", []) for part in ("input", "weight")}
    whole = {f"{part}_s": replica[f"durations_{part}_s"] for part in ("forward", "backward")}
    return whole | optional | {name: replica[name] for name in ("p2p_forward_s", "p2p_backward_s")}


def _direction_from_json(replica: dict[str, Any], direction: Direction) -> tuple[MicroPack, ...]:
    packs, durations = replica[direction], replica[f"durations_{direction}_s"]
    if len(packs) != len(durations):
        raise InvalidPlanError(f"plan file: {len(packs)} {direction} packs but {len(durations)} rows of durations")
    return tuple(
        MicroPack(
            index=index,
            direction=direction,
            slices=tuple(_from_known(piece, Slice) for piece in pack),
            pad_to=pack[0].get("pad_to", 0) if pack else 0,
            sharding=_sharding_from_json(pack, f"{direction} pack {index}"),
            cost_s=max(durations[index], default=0.0),
        )
        for index, pack in enumerate(packs)
    )


def _sharding_from_json(pack: list[dict[str, Any]], where: str) -> PackSharding:
    if any("owner" in piece for piece in pack):
        return tuple(piece["owner"] for piece in pack)
    rule = pack[0].get("sharding", "") if pack else ""
    if rule not in ("", "per_sequence", "per_document"):
        raise InvalidPlanError(
            f"plan file: {where} has sharding '{rule}', which does not say which rank computes what; choose "
            "per_sequence, per_document or an owner for every slice (a file of an older evenload: plan again)"
        )
    return rule


def forward_only(plan: StepPlan) -> StepPlan:
    """Return the plan without its backwards, for validation; `InvalidPlanError` as of `check_schedule`."""
    replace = msgspec.structs.replace
    schedules = tuple(
        Schedule(ranks=tuple(tuple(action for action in row if action.kind == "F") for row in one.ranks))
        for one in plan.schedules
    )
    packs = tuple(replace(one, backward=()) for one in plan.pack_plans)
    for one, schedule in zip(packs, schedules, strict=True):
        check_replica(plan.layout, one, schedule)
    times = tuple(replace(one, backward_s=(), p2p_backward_s=(), input_s=(), weight_s=()) for one in plan.times)
    return seal(replace(plan, pack_plans=packs, schedules=schedules, times=times))
