import json

import msgspec
import pytest

from context_plans import RULES, context_plan
from cost_samples import documents, sample_coefficients, sample_model
from evenload.errors import InvalidPlanError
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.auto import AutoOptions
from evenload.planning.strategies.registry import STRATEGIES
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.plan import LeftOut, StepPlan, seal

LENGTHS = [200, 150, 40, 30, 20, 10, 1]

PIPELINED = [one.name for one in STRATEGIES.values() if not one.needs_one_stage]


def make_plans(dp: int = 2) -> list[StepPlan]:
    planner = StepPlanner(
        sample_model(),
        sample_coefficients(),
        even_layout(3, dp=dp, pp=3),
        None,
        PlanOptions(max_pack_tokens=300),
        host="unlimited",
    )
    left = (LeftOut(doc_id=90, num_tokens=5, reason="deferred"),)
    return [planner.plan(k, documents(LENGTHS), name, left if k else ()) for k, name in enumerate(PIPELINED)]


@pytest.mark.parametrize("dp", [1, 2, 9])
def test_plan_file_round_trips(dp: int) -> None:
    """dp 9 has replicas without documents."""
    plans = make_plans(dp)
    assert decode_plan_file(encode_plan_file(plans)) == tuple(plans)


def test_a_part_of_a_tree_that_is_a_single_sequence_round_trips() -> None:
    """It has no segments, but says what it computes again, and a plan's digest covers that."""
    plan = make_plans()[0]
    first, *others = plan.documents
    part = msgspec.structs.replace(first, num_recomputed_tokens=1)
    sealed = seal(msgspec.structs.replace(plan, documents=(part, *others)))
    assert decode_plan_file(encode_plan_file([sealed])) == (sealed,)
    assert b"num_recomputed_tokens" not in encode_plan_file([plan])


def test_plan_file_has_the_fixed_shape() -> None:
    data = json.loads(encode_plan_file(make_plans()))
    for plan in data["plans"]:
        assert {"step", "strategy", "layout", "num_label_tokens", "documents", "replicas", "predicted"} <= set(plan)
        assert {"dp", "cp", "pp", "tp", "stage_layers", "stage_to_rank"} <= set(plan["layout"])
        output = {"step_time_s", "per_replica_s", "peak_memory_bytes", "peak_host_bytes_per_node"}
        of_transfers = {f"{name}{part}_s" for name in ("reduction", "gather") for part in ("", "_hidden")}
        assert set(plan["predicted"]) == output | of_transfers
        assert all({"doc_id", "num_tokens"} <= set(document) for document in plan["documents"])
        for replica in plan["replicas"]:
            assert {
                "dp_rank", "forward", "backward", "schedule", "durations_forward_s", "durations_backward_s",
                "p2p_forward_s", "p2p_backward_s",
            } <= set(replica)  # fmt: skip
            assert all(set(piece) >= {"doc_id", "start", "stop", "cp"} for pack in replica["forward"] for piece in pack)
            assert len(replica["schedule"]) == 3
            assert len(replica["durations_forward_s"]) == len(replica["forward"]) == len(replica["p2p_forward_s"])
            assert all(len(row) == 3 for row in replica["durations_backward_s"])


RE_SIMULATED = {
    "pipeline": even_layout(3, dp=2, pp=3),
    "virtual stages": even_layout(4, dp=2, pp=2, virtual=2),
    "context parallel": even_layout(3, dp=2, cp=2),
    "no pipeline": even_layout(3, dp=4),
    "tensor parallel": even_layout(3, dp=2, pp=3, tp=2),  # parts take longer than a whole backward would
}


@pytest.mark.parametrize("layout", RE_SIMULATED.values(), ids=RE_SIMULATED.keys())
@pytest.mark.parametrize("split", [False, True], ids=["whole backwards", "split backwards"])
def test_plan_file_can_be_re_simulated_without_our_simulator(layout, split) -> None:
    """The promise of --emit-plan, to the bit: every strategy, split backwards, virtual stages, DP-Merge, policies."""
    link = LinkSpec(bandwidth_bytes_per_s=2e4, latency_s=0.1)
    planner = StepPlanner(
        sample_model(num_layers=layout.num_layers),
        sample_coefficients(intra_node=link, inter_node=link, host_link=link, devices_per_node=8),
        layout,
        160_000 // layout.tp,
        PlanOptions(max_pack_tokens=300, dp_merge=True, strategies=(AutoOptions(split_backward=split),)),
        host="unlimited",
    )
    step = tuple(Document(doc_id=7 * i, num_tokens=n, num_label_tokens=n // 2) for i, n in enumerate(LENGTHS * 3))
    names = STRATEGIES if layout.pp == 1 else PIPELINED
    plans = [planner.propose(k, step, name).plan for k, name in enumerate(names)]
    plans.append(planner.propose(99, documents([300, 20, 10, 5]), "slimpack").plan)
    seen = set()
    for plan in json.loads(encode_plan_file(plans))["plans"]:
        predicted = plan["predicted"]
        for replica in (one for one in plan["replicas"] if "durations_input_s" in one):
            columns = (replica[f"durations_{name}_s"] for name in ("backward", "input", "weight"))
            for whole, *parts in zip(*columns, strict=True):
                assert whole == pytest.approx([sum(pair) for pair in zip(*parts, strict=True)])
        result = [re_simulate(replica, plan["layout"]["stage_to_rank"]) for replica in plan["replicas"]]
        assert result == predicted["per_replica_s"], plan["strategy"]
        assert max(result) <= predicted["step_time_s"]
        seen |= {"split" for r in plan["replicas"] for row in r["schedule"] for action in row if "W" in action}
        seen |= {"merged" for r in plan["replicas"] for pack in r["forward"] for p in pack if p["cp"] > layout.cp}
        seen |= {"policies" for replica in plan["replicas"] if "policies" in replica}
    assert ("split" in seen) == (split and layout.pp > 1)
    assert "policies" in seen
    assert "merged" in seen or layout.cp > 1


def re_simulate(replica: dict, stage_to_rank: list[int]) -> float:
    """Makespan of a replica from its JSON alone: an action starts when its rank is free and its inputs are there."""
    last = {piece["doc_id"]: k for k, pack in enumerate(replica["forward"]) for piece in pack}
    needed = [1 + max(last[piece["doc_id"]] for piece in pack) for pack in replica["backward"]]
    stages, end, clock = len(stage_to_rank), {}, [0.0] * len(replica["schedule"])
    rows = [list(row) for row in replica["schedule"]]
    while any(rows):
        progressed = False
        for rank, row in enumerate(rows):
            while row:
                kind = next(letter for letter in "FBIW" if letter in row[0])
                stage, pack = map(int, row[0].split(kind))
                if kind == "F":
                    inputs = [("F", stage - 1, pack, replica["p2p_forward_s"][pack])] if stage else []
                    duration = replica["durations_forward_s"][pack][stage]
                elif kind == "W":
                    inputs, duration = [("B", stage, pack, 0.0)], replica["durations_weight_s"][pack][stage]
                else:
                    inputs = [("F", stage, k, 0.0) for k in range(needed[pack])]
                    if stage < stages - 1:
                        inputs.append(("B", stage + 1, pack, replica["p2p_backward_s"][pack]))
                    duration = replica["durations_input_s" if kind == "I" else "durations_backward_s"][pack][stage]
                if any(key[:3] not in end for key in inputs):
                    break
                start = max([clock[rank], *(end[key[:3]] + key[3] for key in inputs)])
                # The gradient that I hands on is that of B.
                end["B" if kind == "I" else kind, stage, pack] = clock[rank] = start + duration
                row.pop(0)
                progressed = True
        assert progressed, "deadlock"
    return max(end.values(), default=0.0)


def test_unknown_keys_are_ignored_and_missing_keys_named() -> None:
    data = json.loads(encode_plan_file(make_plans()[:1]))
    data["plans"][0]["comment"] = "made by hand"
    assert len(decode_plan_file(json.dumps(data).encode())) == 1
    del data["plans"][0]["replicas"][0]["schedule"]
    with pytest.raises(InvalidPlanError, match="schedule"):
        decode_plan_file(json.dumps(data).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"plans": [3]}', b"\xff"])
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidPlanError, match="plan file"):
        decode_plan_file(content)


def test_shared_packs_name_a_rule_or_an_owner_of_every_slice() -> None:
    for rule in RULES:
        plan = msgspec.structs.replace(context_plan(4, cp=3, rule=rule), digest="")
        (read,) = decode_plan_file(encode_plan_file([plan]))
        for ours, theirs in zip(plan.pack_plans, read.pack_plans, strict=True):
            for listed, again in ((ours.forward, theirs.forward), (ours.backward, theirs.backward)):
                assert [(p.slices, p.sharding) for p in listed] == [(p.slices, p.sharding) for p in again]
        (replica,) = json.loads(encode_plan_file([plan]))["plans"][0]["replicas"]
        key, values = ("sharding", {rule}) if rule.startswith("per_") else ("owner", {-1, 0, 1, 2})
        assert {piece[key] for pack in replica["forward"] for piece in pack} <= values
        assert not any({"sharding", "owner"} & piece.keys() for pack in replica["backward"] for piece in pack)


@pytest.mark.parametrize("rule", ["mixed", "dacp:0,-1"])
def test_a_sharding_that_the_run_would_have_to_decide_is_refused(rule: str) -> None:
    """Files of versions that left it to the run, or named owners in a string."""
    written = json.loads(encode_plan_file([context_plan(4, cp=2, rule="per_document")]))
    for pack in written["plans"][0]["replicas"][0]["forward"]:
        for piece in pack:
            piece["sharding"] = rule
    with pytest.raises(InvalidPlanError, match=f"forward pack 0 has sharding '{rule}', which does not say which rank"):
        decode_plan_file(json.dumps(written).encode())
