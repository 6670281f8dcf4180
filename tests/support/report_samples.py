"""Small hand-made inputs for the report tests: timelines of a greedy 1F1B run, and metrics rows."""

import dataclasses

import numpy as np

from evenload.report.run_files import METRIC_KEYS
from evenload.types.document import Document, MicroPack, PackPlan, Slice
from evenload.types.layout import even_layout
from evenload.types.plan import LeftOut, PackTimes, Prediction, Schedule, StepPlan
from evenload.types.timeline import CAUSE_LABELS, KINDS, MEMORY_KINDS, SIDE_KINDS, SideTasks, Timeline, TimeSplit


def make_timeline(
    num_dp=1, num_ranks=4, num_packs=8, seed=0, noise=0.0, memory=True, split=False, critical=None
) -> Timeline:
    """A 1F1B step with random pack times: dependencies and order are kept, so no two tasks of a rank overlap."""
    rng = np.random.default_rng(seed)
    tasks, samples = [], []
    for dp in range(num_dp):
        forward = 0.010 * (1 + rng.random(num_packs))
        done_f = np.zeros((num_packs, num_ranks))
        done_b = np.zeros((num_packs, num_ranks))
        free = np.zeros(num_ranks)
        orders = [_one_f_one_b(rank, num_ranks, num_packs) for rank in range(num_ranks)]
        held = [40 * 2**30] * num_ranks
        samples += [(dp, rank, 0.0, held[rank]) for rank in range(num_ranks)]
        at = [0] * num_ranks
        while any(at[rank] < len(orders[rank]) for rank in range(num_ranks)):
            for rank in range(num_ranks):
                while at[rank] < len(orders[rank]):
                    kind, pack = orders[rank][at[rank]]
                    if kind == "F":
                        ready = done_f[pack, rank - 1] if rank else 1e-12
                    else:
                        ready = done_b[pack, rank + 1] if rank < num_ranks - 1 else done_f[pack, rank]
                    if ready == 0:
                        break
                    start = max(free[rank], ready)
                    seconds = forward[pack] * (1 if kind == "F" else 2) * (1 + noise * rng.random())
                    end = start + seconds
                    free[rank] = end
                    (done_f if kind == "F" else done_b)[pack, rank] = end
                    held[rank] += (1 if kind == "F" else -1) * int(forward[pack] * 2**30 * 200)
                    samples.append((dp, rank, start if kind == "F" else end, held[rank]))
                    if split and kind == "B":
                        middle = (start + end) / 2
                        tasks += [(dp, rank, rank, "I", pack, start, middle), (dp, rank, rank, "W", pack, middle, end)]
                    else:
                        tasks.append((dp, rank, rank, kind, pack, start, end))
                    at[rank] += 1
    columns = columns_of(("dp_rank", "rank", "stage", "kind", "pack", "start_s", "end_s"), tasks)
    of_memory = ("memory_dp_rank", "memory_rank", "memory_time_s", "memory_bytes")
    return Timeline(
        **columns | {"kind": np.array([KINDS.index(kind) for kind in columns["kind"]], np.uint8)},
        **columns_of(of_memory, samples if memory else []),
        step_time_s=float(columns["end_s"].max()) * 1.01,
        is_critical=None if critical is None else np.isin(np.arange(len(tasks)), critical),
    )


def columns_of(names, rows) -> dict[str, np.ndarray]:
    """The columns of rows, in the types of a `Timeline`: "_s" seconds, "_bytes" bytes, else int32 or text."""
    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    types = {"s": np.float64, "bytes": np.int64}
    return {
        name: np.array(column, None if name == "kind" else types.get(name.split("_")[-1], np.int32))
        for name, column in zip(names, columns, strict=True)
    }


def side_tasks(rows) -> SideTasks:
    """Of replica 0, from rows of (kind, rank, peer, stage, pack, start, end)."""
    columns = columns_of(("kind", "rank", "peer", "stage", "pack", "start_s", "end_s"), rows)
    kind = np.array([SIDE_KINDS.index(name) for name in columns["kind"]], np.uint8)
    return SideTasks(dp_rank=np.zeros(len(rows), np.int32), **columns | {"kind": kind})


def _one_f_one_b(rank, num_ranks, num_packs):
    warmup = min(num_packs, num_ranks - 1 - rank)
    order = [("F", k) for k in range(warmup)]
    for k in range(num_packs - warmup):
        order += [("F", warmup + k), ("B", k)]
    return order + [("B", k) for k in range(num_packs - warmup, num_packs)]


def make_labels(num_dp=1, num_packs=8, text="doc 812 [0, 4096) of 20.0K, 813 (512)"):
    return {
        (dp, direction, pack): {"tokens": 4608 + pack, "documents": 2, "slices": 1, "content": text}
        for dp in range(num_dp)
        for direction in ("forward", "backward")
        for pack in range(num_packs)
    }


def make_plan(num_dp=1, num_packs=8, num_ranks=4, step=3, reason="") -> StepPlan:
    """Every pack holds 4,096 tokens of the replica's long document (800 + dp) and a whole one of 512 + pack tokens.

    Documents and packs are those of `make_timeline`; schedules and times are left empty, as reports do not read them.
    """
    documents, replicas = [], []
    for dp in range(num_dp):
        long = Document(doc_id=800 + dp, num_tokens=4096 * num_packs, num_label_tokens=1)
        short = [
            Document(doc_id=1000 * (dp + 1) + pack, num_tokens=512 + pack, num_label_tokens=1)
            for pack in range(num_packs)
        ]
        documents += [long, *short]
        packs = {}
        for direction in ("forward", "backward"):
            order = range(num_packs) if direction == "forward" else range(num_packs - 1, -1, -1)
            packs[direction] = tuple(
                MicroPack(
                    index=index,
                    direction=direction,
                    slices=(
                        Slice(doc_id=long.doc_id, start=4096 * k, stop=4096 * (k + 1)),
                        Slice(doc_id=short[index].doc_id, start=0, stop=short[index].num_tokens),
                    ),
                )
                for index, k in enumerate(order)
            )
        replicas.append(PackPlan(dp_rank=dp, **packs, policies={long.doc_id: "recompute"}))
    return StepPlan(
        step=step,
        strategy="slimpack",
        layout=even_layout(num_ranks, dp=num_dp, pp=num_ranks),
        documents=tuple(documents),
        num_label_tokens=1,
        pack_plans=tuple(replicas),
        schedules=(Schedule(ranks=()),) * num_dp,
        times=(PackTimes(forward_s=(), backward_s=(), p2p_forward_s=(), p2p_backward_s=()),) * num_dp,
        predicted=Prediction(step_time_s=1.0, per_replica_s=(1.0,), peak_memory_bytes=1),
        left_out=(LeftOut(doc_id=7, num_tokens=99, reason=reason),) if reason else (),
    )


def with_details(t):
    """The timeline as the simulator makes it: samples at 0 and at start and end of every task, kinds, side tasks."""
    lanes = sorted(set(zip(t.dp_rank.tolist(), t.rank.tolist(), strict=True)))
    samples = []
    for dp, rank in lanes:
        own = np.flatnonzero((t.dp_rank == dp) & (t.rank == rank))
        times = [0.0, *np.stack([t.start_s[own], t.end_s[own]], axis=1).ravel()]
        samples += [(dp, rank, time) for time in times]
    kinds = np.zeros((len(samples), len(MEMORY_KINDS)), np.int64)
    kinds[:, 0] = 5 * 2**30
    kinds[:, 4] = np.arange(len(kinds)) % 7 * 2**20
    side = [("reduction", 0, -1, 0, 0, t.end_s.max(), t.step_time_s)]
    first, second = np.flatnonzero(t.kind == 1)[:2]
    for kind, at, seconds in (
        *(("recompute", first, 0.001), ("recompute", second, 0.001)),
        *(("reload", first, 0.002), ("send_backward", second, 0.002)),
    ):
        side.append((kind, t.rank[at], -1, t.stage[at], t.pack[at], t.start_s[at], t.start_s[at] + seconds))
    memory = {"memory_bytes": kinds.sum(axis=1), "memory_kind_bytes": kinds, "side": side_tasks(side)}
    return dataclasses.replace(t, **columns_of(("memory_dp_rank", "memory_rank", "memory_time_s"), samples), **memory)


def make_split(**seconds: float) -> TimeSplit:
    return TimeSplit(**(dict.fromkeys(CAUSE_LABELS, 0.0) | seconds))


def make_row(step: int, **values):
    seconds = 1.30 + 0.05 * float(np.sin(step))
    row = dict.fromkeys(METRIC_KEYS, None) | {
        "loss": 11.0 / (1 + 0.02 * step) + 0.05 * float(np.sin(step * 1.7)),
        **{"step": step, "grad_norm": 1.25, "lr": 3e-4, "layout": "dp=2 pp=4 cp=1 tp=1", "deferred_documents": 0},
        **{"tokens": 65536, "label_tokens": 65000, "padding_tokens": 0, "documents": 64, "data_wait_s": 0.0012},
        **{"step_time_s": seconds, "predicted_step_time_s": 1.25, "tokens_per_s": 65536 / seconds},
        **{"reduction_s": 0.2, "reduction_hidden_s": 0.15},
        **{"predicted_reduction_s": 0.25, "predicted_reduction_hidden_s": 0.125, "bubble_fraction": 0.073},
        **{"imbalance_forward": 1.041, "imbalance_backward": 1.052, "imbalance_dp": 1.003},
        **{"peak_memory_bytes": 61 * 2**30, "predicted_peak_memory_bytes": 60 * 2**30},
    }
    return row | values
