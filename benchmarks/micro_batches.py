"""Micro-batches for ranks that wait for each other at every one (FSDP, ZeRO-3): `evenload.micro_batches` beside others.

    divide     predicted: one judge for all, llama-7b on H100 from data sheets (`Cost()`); a step takes the sum, over
               the micro-batches' index, of the longest of any rank. 8 ranks and 512 documents, 16 and 2,048, 64 and
               4,096, at most 16K, 32K and 64K tokens a micro-batch, drawn from tables of `examples/lengths` without
               what is longer. The bound of a step is the larger of the mean work of a rank and the longest document,
               and the constants of as few micro-batches as hold the tokens
    rules      what rules cost, by the same judge: groups of 8 and 16 whole on a rank, equally many documents a rank,
               costs that know tokens only or a wrong ratio; and ranks that wait once a step, by that step's time
    fsdp2      measured: a small Llama under `fully_shard` on four processes of one thread each trains the same batches
               by turns, divided by Evenload (at costs that the run measures first), verl and TRL, with equal losses

verl, transformers, TRL and Megatron-Core are the installed packages. slime, miles and prime-rl are not on PyPI; their
order of work is written anew from their sources: micro-batches first, by first fit (slime: as they arrive, the others:
longest first), the largest halved until every rank gets equally many, then dealt in turn (slime's default) or by verl's
differencing over tokens (miles) or work (slime by FLOPs, prime-rl).

    https://github.com/THUDM/slime/blob/main/slime/utils/dp_schedule.py
    https://github.com/radixark/miles/blob/main/miles/utils/dp_schedule.py
    https://github.com/PrimeIntellect-ai/prime-rl/blob/main/src/prime_rl/trainer/batch.py

    pip install 'evenload[bench]' && pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/micro_batches.py [--quick] [--append] [--part divide|rules|fsdp2]
"""

# pyright: reportMissingImports=false
import itertools
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from cpu_ranks import cpu_rank, leave, spawn_ranks
from engine_turns import new_model
from evenload.planning.micro_batches import Cost, micro_batches
from harness import Row, median_ratio, run
from loader_training import CONTEXT, read_scaled_lengths, tiny_config
from peers import PEERS, Batch, Replicas, verl_balancing
from setups import TABLES, table_lengths

SHAPES = ((8, 512), (16, 2_048), (64, 4_096))
LIMITS = (16_384, 32_768, 65_536)
DRAWS = 2
OURS, TRL = "evenload", "TRL token budget"
TRL_SHARE = 5
"""Every so many instances are divided by TRL, which takes a microsecond a token and more."""
RANKS, ROUNDS, QUICK_ROUNDS = 4, 12, 2
STEP_TOKENS = 3 * RANKS * CONTEXT
SAME_LOSS = 1e-4
"""Relative: float32, summed in another order."""

Divide = Callable[[NDArray[np.int64], int, int], Replicas]
"""Lengths, ranks and most tokens of a micro-batch to the micro-batches of every rank."""


def instances(ranks: int, documents: int, quick: bool) -> Iterator[tuple[NDArray[np.int64], int]]:
    """(lengths, most tokens of a micro-batch)."""
    for table, limit, draw in itertools.product(TABLES[: 1 if quick else None], LIMITS, range(1 if quick else DRAWS)):
        lengths = table_lengths(table)
        yield np.random.default_rng([ranks, draw]).choice(lengths[lengths <= limit], documents), limit


def step_over_bound(work_s: NDArray[np.float64], lengths: NDArray[np.int64], limit: int, ranks: Replicas) -> float:
    """Judge a division. Empty micro-batches at a rank's end are what engines run where ranks have fewer."""
    count = max(map(len, ranks))
    longest_s = [max(work_s[rank[at]].sum() if at < len(rank) else 0.0 for rank in ranks) for at in range(count)]
    least = max(1, -(-int(lengths.sum()) // (len(ranks) * limit)))
    bound_s = max(work_s.sum() / len(ranks), work_s.max()) + least * Cost().micro_batch_s
    return (sum(longest_s) + count * Cost().micro_batch_s) / bound_s


def broken_limits(lengths: NDArray[np.int64], limit: int, ranks: Replicas) -> int:
    """Micro-batches above the limit."""
    return sum(int(lengths[one].sum()) > limit for rank in ranks for one in rank)


# Divisions of others


def pack_first(order: str, weight: str, lengths: NDArray[np.int64], ranks: int, limit: int) -> Replicas:
    """Divide as slime, miles and prime-rl do.

    Args:
        order: of first fit, "arrival" or "longest".
        weight: what is halved and dealt evenly, "tokens" or "work"; "turn": tokens are halved, and dealt in turn.
    """
    balancing, tokens = verl_balancing(), lengths.tolist()
    weights = [24_576 * one + one * one for one in tokens] if weight == "work" else tokens
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(tokens)), key=lambda i: -tokens[i]) if order == "longest" else range(len(tokens)):
        at = next((at for at, left in enumerate(room) if left >= tokens[item]), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(limit)
        bins[at].append(item)
        room[at] -= tokens[item]
    while len(bins) % ranks:
        largest = max(
            (at for at in range(len(bins)) if len(bins[at]) > 1), key=lambda at: sum(weights[i] for i in bins[at])
        )
        halves: tuple[list[int], list[int]] = [], []
        for item in sorted(bins[largest], key=lambda i: -weights[i]):
            min(halves, key=lambda half: sum(weights[i] for i in half)).append(item)
        bins[largest] = halves[0]
        bins.append(halves[1])
    if weight == "turn":
        return [bins[rank::ranks] for rank in range(ranks)]
    sums = [sum(weights[item] for item in one) for one in bins]
    dealt = balancing.get_seqlen_balanced_partitions(sums, ranks, equal_size=True)
    return [[bins[at] for at in rank] for rank in dealt]


def trl_token_budget(lengths: NDArray[np.int64], ranks: int, limit: int) -> Replicas:
    """TRL's batcher of asynchronous GRPO; it never emits its last row of ranks, which is one more micro-batch here."""
    from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

    ids = np.arange(int(lengths.sum()), dtype=np.int64)  # no two documents share a prefix
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    samples = [
        {"input_ids": torch.from_numpy(part), "completion_mask": torch.ones(len(part)), "group_id": index}
        for index, part in enumerate(parts)
    ]
    rows = [[[one["group_id"] for one in row.samples] for row in step]
            for step in TokenBudgetBatcher(samples, ranks, limit, {})]  # fmt: skip
    seen = {index for step in rows for row in step for index in row}
    left = [index for index in range(len(lengths)) if index not in seen]
    last: list[list[int]] = [[] for _ in range(ranks)]
    for index in left:
        min(last, key=lambda row: sum(lengths[i] ** 2 for i in row)).append(index)
    return [[step[rank] for step in rows] + [last[rank]] * bool(left) for rank in range(ranks)]


def transformers_rebalance(lengths: NDArray[np.int64], ranks: int, limit: int) -> Replicas:
    """The Trainer's `batch_rebalance`, whose number of micro-batches the user gives: as few as hold the tokens."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    count = max(1, -(-int(lengths.sum()) // (ranks * limit)))
    sampler = BatchRebalanceSampler(lengths.tolist(), len(lengths), ranks, count)
    return sampler._assign(list(range(len(lengths))), lengths.tolist())


def others(packages: Sequence[str] = ("verl", "megatron-core balanced CP")) -> dict[str, Divide]:
    """Divisions of somebody else, those of `packages` where they are installed; a line for each that is not."""

    def of(calls: Any) -> Divide:
        def divide(lengths: NDArray[np.int64], ranks: int, limit: int) -> Replicas:
            batch = Batch(lengths, limit, ranks, 1)
            return calls.read(calls.pack(calls.prepare(batch)), batch)

        return divide

    divisions: dict[str, Divide] = {}
    for peer in PEERS:
        if peer.name in packages:
            try:
                divisions[f"{peer.name} {version(peer.package)}"] = of(peer.load())
            except (ImportError, PackageNotFoundError) as error:
                print(f"left out: {peer.name}: {peer.package} cannot be imported ({error})")
    if any(name.startswith("verl") for name in divisions):  # the others deal by a copy of its differencing
        divisions |= {
            "slime, default": partial(pack_first, "arrival", "turn"),
            "slime, by FLOPs": partial(pack_first, "arrival", "work"),
            "miles": partial(pack_first, "longest", "tokens"),
            "prime-rl": partial(pack_first, "longest", "work"),
        }
    return divisions | {TRL: trl_token_budget, "transformers batch_rebalance": transformers_rebalance}


def ours(lengths: NDArray[np.int64], ranks: int, limit: int) -> Replicas:
    """Evenload's, with defaults."""
    return micro_batches(lengths, ranks, limit).ranks


# Parts


class Judged(NamedTuple):
    """A division of one instance."""

    over_bound: float
    broken: int
    seconds: float


def judged(divide: Divide, lengths: NDArray[np.int64], ranks: int, limit: int) -> Judged | None:
    """Divide and judge; None where the division refuses."""
    start_s = time.perf_counter()
    try:
        made = divide(lengths, ranks, limit)
    except Exception as error:  # whatever a peer raises is said, and ends none of the others
        print(f"{ranks} ranks x {len(lengths)}, {limit} tokens: {type(error).__name__}: {error}")
        return None
    seconds = time.perf_counter() - start_s
    assert sorted(index for rank in made for one in rank for index in one) == list(range(len(lengths)))
    return Judged(
        step_over_bound(Cost().work_s(lengths), lengths, limit, made), broken_limits(lengths, limit, made), seconds
    )


def divide_rows(quick: bool) -> Iterator[Row]:
    """Everybody's division of the same instances."""
    warnings.simplefilter("ignore")  # of the peers' imports
    logging.disable(logging.WARNING)
    divisions = {OURS: ours} | others()
    for ranks, documents in SHAPES[: 1 if quick else None]:
        cases = list(instances(ranks, documents, quick))
        own = [judged(ours, lengths, ranks, limit) for lengths, limit in cases]
        for name, divide in divisions.items():
            share = slice(0, None, TRL_SHARE if name == TRL else 1)
            every = own if name == OURS else [judged(divide, lengths, ranks, limit) for lengths, limit in cases[share]]
            pairs = [(one, mine) for one, mine in zip(every, own[share], strict=True) if one and mine]
            if not pairs:
                continue
            row = partial(Row, "micro_batches", f"{ranks} ranks x {documents:,} documents, {name}")
            over = [one.over_bound for one, _ in pairs]
            yield row("step over bound", statistics.geometric_mean(over), "x", "bound", max(over) / min(over))
            yield row("step over bound, worst", max(over), "x", "bound")
            yield row("instances", len(pairs), "")
            yield row("micro-batches above the limit", sum(one.broken for one, _ in pairs), "")
            milliseconds = statistics.median(one.seconds for one, _ in pairs) * 1e3
            yield row(
                "time", milliseconds, "ms", f"{OURS} {statistics.median(m.seconds for _, m in pairs) * 1e3:.3g} ms"
            )
            if name != OURS:
                ahead = sum(one.over_bound < mine.over_bound * (1 - 1e-9) for one, mine in pairs)
                yield row("instances ahead of evenload", ahead, "")


def rule_rows(quick: bool) -> Iterator[Row]:
    """What constraints and wrong costs add to the step, geometric means over the instances of 16 ranks."""
    ranks, documents = SHAPES[1]
    cases = list(instances(ranks, documents, quick))
    groups = {size: np.arange(documents) // size for size in (8, 16)}
    true = Cost()
    variants: dict[str, dict[str, Any]] = {
        "groups of 8 whole on a rank": {"groups": groups[8]},
        "groups of 16 whole on a rank": {"groups": groups[16]},
        "equally many documents a rank": {"equal_documents": True},
        "costs that know tokens only": {"cost": Cost(true.linear_s, 0.0, true.micro_batch_s)},
        "quadratic cost twice too high": {"cost": Cost(true.linear_s, 2 * true.quadratic_s, true.micro_batch_s)},
    }
    for name, rules in variants.items():
        ratios = []
        for lengths, limit in cases:
            work_s = true.work_s(lengths)
            plain, ruled = (
                step_over_bound(work_s, lengths, limit, micro_batches(lengths, ranks, limit, **given).ranks)
                for given in ({}, rules)
            )
            ratios.append(ruled / plain)
        case = f"{ranks} ranks x {documents:,} documents, {name}"
        yield Row("micro_batch_rules", case, "step", statistics.geometric_mean(ratios), "x", "without the rule")
    for ranks, documents in SHAPES[: 1 if quick else None]:
        over = []
        for lengths, limit in instances(ranks, documents, quick):
            made = micro_batches(lengths, ranks, limit, waits="step")
            work_s = made.seconds.sum(axis=1) - made.seconds.shape[1] * true.micro_batch_s
            over.append(float(work_s.max() / max(work_s.mean(), true.work_s(lengths).max())))
        case = f"{ranks} ranks x {documents:,} documents, waits once a step"
        yield Row("micro_batch_rules", case, "work over bound, worst", max(over), "x", "bound")


Documents = list[torch.Tensor]
"""Token ids of each, int64[L]."""


class ShardedModel:
    """A small Llama under `fully_shard`, layer by layer, that trains micro-batches of whole documents."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model: Any = new_model(tiny_config())
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)

    def step(self, own: Sequence[Documents]) -> tuple[float, float]:
        """Train this rank's micro-batches; return the seconds until the slowest rank has updated, and the loss."""
        dist.barrier()
        start_s, loss = time.perf_counter(), torch.zeros(1)
        for at, documents in enumerate(own):
            self.model.set_requires_gradient_sync(at == len(own) - 1)
            loss += self._pass(documents)
        self.optimizer.step()
        self.optimizer.zero_grad()
        took_s = torch.tensor([time.perf_counter() - start_s])
        dist.all_reduce(took_s, dist.ReduceOp.MAX)
        dist.all_reduce(loss)
        return took_s.item(), loss.item()

    def _pass(self, documents: Documents) -> torch.Tensor:
        sizes = [len(one) for one in documents] or [1]
        tokens = torch.cat(documents) if documents else torch.zeros(1, dtype=torch.long)
        edges = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
        positions = torch.cat([torch.arange(size) for size in sizes])
        labels = tokens.roll(-1).masked_fill(positions.roll(-1) == 0, -100)  # the last token of a document has none
        output = self.model(tokens[None], position_ids=positions[None], cu_seq_lens_q=edges, use_cache=False)
        loss = torch.nn.functional.cross_entropy(output.logits[0], labels, reduction="sum")
        loss.backward()
        return loss.detach()

    def cost(self) -> Cost:
        """Fit what micro-batches of one and of four documents take here; the same on every rank."""
        shapes = [[8], *([size] * count for size in (128, 512, 2_048) for count in (1, 4) if size * count <= CONTEXT)]
        rows = np.array([[sum(own), sum(size**2 for size in own), 1.0] for own in shapes])
        repeats = [[self.step([random_documents(own)])[0] for own in shapes] for _ in range(6)]
        target = np.median(repeats[1:], axis=0)  # the first makes buffers
        return Cost(*np.linalg.lstsq(rows / target[:, None], np.ones(len(target)))[0].clip(0).tolist())


def random_documents(lengths: Sequence[int]) -> Documents:
    """Token ids that depend on a document's place alone."""
    return [torch.randint(0, 4_096, (size,), generator=torch.manual_seed(at)) for at, size in enumerate(lengths)]


def fsdp2_rank(rank: int, directory: str, rounds: int) -> None:
    """One rank; rank 0 leaves seconds of every step by division."""
    with cpu_rank():
        logging.disable(logging.WARNING)
        model = ShardedModel()
        cost = model.cost()
        divisions: dict[str, Divide] = {OURS: lambda *given: micro_batches(*given, cost=cost).ranks}
        divisions |= {name: divide for name, divide in others(("verl",)).items() if name.startswith(("verl", TRL))}
        lengths, steps = read_scaled_lengths(STEP_TOKENS * (rounds + 2) // 8), []
        for step in range(rounds):
            count = int(np.searchsorted(np.cumsum(lengths), STEP_TOKENS)) // RANKS * RANKS  # as verl needs it
            batch, lengths = lengths[:count], lengths[count:]
            documents, trained = random_documents(batch.tolist()), {}
            for name in list(divisions)[:: -1 if step % 2 else 1]:
                made = divisions[name](batch, RANKS, CONTEXT)
                most = max(map(len, made))  # a rank with fewer runs a token without a label
                own = [[documents[at] for at in one] for one in made[rank]] + [[]] * (most - len(made[rank]))
                trained[name] = model.step(own)
            losses = [loss for _, loss in trained.values()]
            assert max(losses) - min(losses) <= SAME_LOSS * max(losses), f"not the same training: {losses}"
            steps.append({name: seconds for name, (seconds, _) in trained.items()})
        leave(directory, steps)


def fsdp2_rows(quick: bool) -> Iterator[Row]:
    """Measured steps; the first round does not count."""
    with tempfile.TemporaryDirectory() as directory:
        spawn_ranks(RANKS, fsdp2_rank, directory, QUICK_ROUNDS if quick else ROUNDS)
        steps = msgspec.json.decode(Path(directory, "found.json").read_bytes())[1:]
    case = f"{RANKS} processes, {STEP_TOKENS:,} tokens of github_dirs/32 a step, at most {CONTEXT:,} a micro-batch"
    for name in steps[0].keys() - {OURS}:
        ratio = median_ratio([step[name] for step in steps], [step[OURS] for step in steps])
        yield Row("fsdp2", case, f"{OURS} faster", ratio, "x", name)


PARTS = {"divide": divide_rows, "rules": rule_rows, "fsdp2": fsdp2_rows}

if __name__ == "__main__":
    sys.exit(run(PARTS))
