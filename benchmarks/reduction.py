"""Transfers between replicas beside packs: what a step takes with and without, what is hidden, what was predicted.

Two CPU processes of one thread each train the same global batches of a Llama of 8 layers (`dp = 2`) by turns with
nothing beside packs, with sums of gradients (`train.overlap_reduction`), and with gathers of updated weights, too
(`train.overlap_gather`); in one run of one set of processes, at learning rate 0. Of every turn the second step counts:
the gathers that run in it are those of a step of its kind. Costs, also what transfers and compute cost each other, are
those that a run measures at its start, just before.

    time          step time with transfers beside packs, over that without; median of ratios of neighbouring steps
    hidden        of the seconds in which gradients are summed, or weights gathered, those while packs are computed and
                  nothing waits: as the ranks tell it (`reduction_hidden_s`, `gather_hidden_s` of metrics.jsonl), and as
                  the simulator predicts it
    account       seconds told over seconds predicted, in all and hidden, median of steps; of variant `after`, too
    loss          whether all train the same, to the bit

gloo moves bytes on the cores that compute, so with a thread a core what is hidden still has to be computed: there the
time tells what is gained, and the hidden share alone says little. Over a link with a speed of its own
(`shaped_link.py`) both do.

    python benchmarks/reduction.py [--quick] [--append]
    python benchmarks/shaped_link.py 2gbit benchmarks/reduction.py [--quick] [--append]
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cpu_ranks import llama, spawn_ranks, write_token_run
from evenload.cli.worker_setup import run_coefficients, started_rank
from evenload.config.planner import make_planner
from evenload.config.train_config import TrainConfig, layout_of, load_train_config
from evenload.cost.coefficients import CostCoefficients, OverlapCost
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.planning.planner import RunPlanner
from evenload.runtime.step_source import PreparedStep, prepare_step
from evenload.runtime.trainer import Trainer
from harness import Row, median_ratio, run
from shaped_link import link_name

DP, LAYERS = 2, 8
LENGTHS = [512] * 4
BATCH_TOKENS = 2_048
ROUNDS, QUICK_ROUNDS = 24, 2
KEYS = (
    "step_time_s", "predicted_step_time_s", "loss",
    "reduction_s", "reduction_hidden_s", "predicted_reduction_s", "predicted_reduction_hidden_s",
    "gather_s", "gather_hidden_s", "predicted_gather_s", "predicted_gather_hidden_s",
)  # fmt: skip
VARIANTS = {"after": (False, False), "sums": (True, False), "both": (True, True)}
"""Whether sums and gathers may run beside packs."""


@dataclass(frozen=True, eq=False)
class BenchRank:
    """One process of a benchmark.

    Args:
        costs: as a run measures them at its start, just before.
    """

    config: TrainConfig
    trainer: Trainer
    costs: CostCoefficients
    memory_cap_bytes: int

    def planned_step(self, costs: CostCoefficients, config: TrainConfig | None = None) -> PlannedStep:
        """The first global batch, with its tokens, planned under these costs."""
        config, trainer, mesh = config or self.config, self.trainer, self.trainer.mesh
        planner = make_planner(config, trainer.model, mesh.layout, costs, self.memory_cap_bytes, mesh.ranks_per_machine)
        source = trainer.new_loader()
        maker = StepMaker(
            source,
            RunPlanner(planner, config.plan.strategy, may_delay=False),
            replicas=lambda layout: layout.replicas(mesh.num_ranks),
            max_pack_tokens=config.max_pack_tokens,
            waiting=mesh.watch.waiting,
        )
        step = maker.next()
        source.close()
        assert step is not None
        return step

    def by_turns(
        self,
        steps: Mapping[str, tuple[TrainConfig, PlannedStep]],
        rounds: int,
        costs: CostCoefficients,
        keys: Sequence[str],
        *,
        repeats: int = 1,
        goes_on: bool = False,
    ) -> dict[str, list[dict[str, Any]]]:
        """Rows of metrics by variant, at learning rate 0; every other round in the other order, one before does not
        count. Rows on rank 0 only.

        Args:
            repeats: steps of a variant in a row, of which the last counts.
            goes_on: weights are gathered in the next step.
        """
        result: dict[str, list[dict[str, Any]]] = {name: [] for name in steps}
        for turn in range(rounds + 1):
            for name, (config, step) in sorted(steps.items(), reverse=bool(turn % 2)):
                self.trainer.step_trainer.settings = config.train
                for repeat in range(repeats):
                    prepared = PreparedStep(step, prepare_step(step.plan, step.tokens, self.trainer.mesh))
                    trained = self.trainer.step_trainer.run(prepared, costs, learning_rate=0.0, goes_on=goes_on)
                    report = trained.report
                    if report is not None and turn and repeat == repeats - 1:
                        result[name].append({key: report.row[key] for key in keys})
        return result


@contextmanager
def bench_rank(directory: str, num_layers: int, settings: list[str]) -> Iterator[BenchRank]:
    """A rank of a run in float32, a thread a process, with costs measured now."""
    settings = ["model.dtype=float32", "train.threads_per_process=1", *settings]
    config = load_train_config(Path(directory) / "config.toml", settings)
    with started_rank(config, layout_of(config.parallel, num_layers)) as setup:
        trainer = Trainer(config, setup.mesh)
        costs = run_coefficients(trainer, Path(directory) / "cache", setup)
        yield BenchRank(config, trainer, costs, setup.memory_cap_bytes)


def run_rank(rank: int, directory: str, rounds: int) -> None:
    """One replica; rank 0 leaves rows of all steps that count, by variant, and what was measured before."""
    with bench_rank(directory, LAYERS, [f"parallel.dp={DP}", "plan.strategy=balanced"]) as bench:
        steps: dict[str, tuple[TrainConfig, PlannedStep]] = {}
        # As if it paid in any case: what is measured says whether it does.
        assert bench.costs.overlap is not None
        costs = msgspec.structs.replace(bench.costs, overlap=pays(bench.costs.overlap))
        for name, (sums, gathers) in VARIANTS.items():
            train = msgspec.structs.replace(bench.config.train, overlap_reduction=sums, overlap_gather=gathers)
            chosen = msgspec.structs.replace(bench.config, train=train)
            priced = msgspec.structs.replace(costs, overlap_reduction=sums, overlap_gather=gathers)
            steps[name] = chosen, bench.planned_step(priced, chosen)
        # The gathers of a step run in the next one: of two alike the second has those of its kind.
        result = bench.by_turns(steps, rounds, costs, KEYS, repeats=2, goes_on=True)
        bench.trainer.state.optimizer.gathers.finish()
        if rank == 0:
            Path(directory, "found.json").write_bytes(msgspec.json.encode((result, costs.overlap)))


def pays(overlap: OverlapCost) -> OverlapCost:
    """As measured, and at most as bad as what still runs during packs."""
    most = 0.99 / overlap.communication_slowdown
    return msgspec.structs.replace(overlap, compute_slowdown=min(overlap.compute_slowdown, most))


def measure(quick: bool) -> Iterator[Row]:
    """All rows of the benchmark."""
    model = llama(256, LAYERS, key_heads=8, vocabulary=512)
    with tempfile.TemporaryDirectory() as directory:
        write_token_run(Path(directory), model, LENGTHS, f"batch_tokens = {BATCH_TOKENS}", steps=1, device="cpu")
        spawn_ranks(DP, run_rank, directory, QUICK_ROUNDS if quick else ROUNDS)
        result, overlap = msgspec.json.decode(Path(directory, "found.json").read_bytes())
    case = f"dp={DP}, 2 packs a replica of 512 tokens, {LAYERS} layers, {link_name()}, 1 thread a process"
    yield from rows_of(case, result, overlap)


def rows_of(case: str, result: dict[str, list[dict]], overlap: dict) -> list[Row]:
    """Of one case."""
    column = {name: {key: [row[key] for row in rows] for key in KEYS} for name, rows in result.items()}
    late = column["after"]
    assert all(one["loss"] == late["loss"] for one in column.values()), "all variants train the same"
    rows = []
    for what, kind in (("summed", "reduction"), ("gathered", "gather")):
        share = statistics.median(late[f"{kind}_s"]) / statistics.median(late["step_time_s"])
        account = median_ratio(late[f"{kind}_s"], late[f"predicted_{kind}_s"])
        rows.append(Row("reduction", case, f"{what} after packs", share, "share", "the step's time"))
        rows.append(Row("reduction", case, f"{kind} account, after packs", account, "x", "seconds predicted"))
    for name in ("sums", "both"):
        faster = median_ratio(column[name]["step_time_s"], late["step_time_s"])
        rows.append(Row("reduction", case, f"time, {name}", faster, "x", "nothing beside packs"))
    rates = (
        f"{overlap['communication_slowdown']:.2f} times as long during packs, compute loses "
        f"{overlap['compute_slowdown']:.0%}"
    )
    for kind in ("reduction", "gather"):
        early = column["both"]
        seconds, hidden = early[f"{kind}_s"], early[f"{kind}_hidden_s"]
        expected, expected_hidden = early[f"predicted_{kind}_s"], early[f"predicted_{kind}_hidden_s"]
        reported = statistics.median(h / s for h, s in zip(hidden, seconds, strict=True))
        rows += [
            Row("reduction", case, f"{kind} hidden", reported, "share", "its seconds"),
            Row("reduction", case, f"{kind} hidden, predicted", expected_hidden[0] / expected[0], "share", rates),
            Row("reduction", case, f"{kind} account", median_ratio(seconds, expected), "x", "seconds predicted"),
            Row("reduction", case, f"{kind} account, hidden", median_ratio(hidden, expected_hidden), "x", "predicted"),
        ]
    return rows


PARTS = {"reduction": measure}

if __name__ == "__main__":
    run(PARTS)
