"""A replica that becomes 30 % slower: what `plan.feedback` learns of it in a run, and what steps gain.

Two CPU processes of one thread each train a Llama of 4 layers as `evenload train` does: costs calibrated at start,
steps planned ahead. Then rank 1 is held back: after the forward or backward of every pack it sleeps for 30 % of what
that took. A run with `plan.feedback` learns its speed from its own timelines. The same batches are then trained in
turn, under three plans each, weights left as they are:

    ignored   planned as if both replicas were equal, as without feedback
    followed  planned with the speeds that the run has learnt
    known     planned with the truth: rank 1 takes 1.3 times as long

Measured: median over rounds and batches of a step's time under one kind of plan over another. Predicted: the same ratio
by the simulator, which is told the truth. Wants a quiet machine: on one whose cores are shared with others, both ranks
are held back by more than 30 %, and the run learns that.

    python benchmarks/feedback.py [--quick] [--append]
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from dp_merge import model_config
from evenload.calibrate.calibrate import calibrate
from evenload.cost.coefficients import CostCoefficients
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.config.run_planner import run_planner
from evenload.runtime.config.train_config import layout_of, load_train_config
from evenload.runtime.model.configured import model_spec
from evenload.runtime.prepare import prepare_step
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.step_source import PreparedStep
from evenload.runtime.trainer import Trainer
from evenload.types.base import Frozen
from evenload.types.rank_speeds import RankSpeeds
from results import Row, median_ratio, run_benchmark
from token_runs import save_tokens

DP, SLOW_RANK, SLOWNESS = 2, 1, 1.3
DOCUMENTS, MEAN_TOKENS, QUICK_MEAN_TOKENS = 32, 96, 16
LEARNING_STEPS, BATCHES = 8, 3
ROUNDS, QUICK_ROUNDS = 9, 1
MEMORY_BYTES = 2**34
TRUTH = RankSpeeds(slowness=((1.0,), (SLOWNESS,)))


class Found(Frozen):
    """What a run measured.

    Args:
        learnt: speeds at its end.
        seconds: of every kind of plan and round, a step of each batch.
        slowest_s: of every kind of plan and batch, predicted seconds of the slowest replica, in truth.
        shares: of every kind of plan, the slow replica's share of the tokens.
    """

    learnt: RankSpeeds
    seconds: dict[str, list[list[float]]]
    slowest_s: dict[str, list[float]]
    shares: dict[str, list[float]]


def hold_back(stages: list[PipelineStage]) -> None:
    """Every forward and backward of a pack takes `SLOWNESS` times as long."""

    def slowed(function):
        def call(*arguments):
            start_s = time.perf_counter()
            result = function(*arguments)
            time.sleep((SLOWNESS - 1.0) * (time.perf_counter() - start_s))
            return result

        return call

    for stage in stages:
        stage.forward, stage.backward = slowed(stage.forward), slowed(stage.backward)  # type: ignore[method-assign]


def write_run(directory: Path, mean_tokens: int, steps: int) -> int:
    """Documents and a configuration; returns the longest document's tokens."""
    generator = np.random.default_rng(0)
    lengths = np.maximum(4, generator.exponential(mean_tokens, DOCUMENTS * steps)).astype(np.int64)
    save_tokens(directory, lengths, 257, generator)
    model_config().save_pretrained(directory / "model")
    longest = int(lengths.max())
    (directory / "config.toml").write_text(
        f"""
        [model]
        path = "{directory / "model"}"
        random_init = true
        [data]
        sources = ["{directory / "tokens.npy"}"]
        record = "tokens"
        max_document_tokens = {longest}
        batch_documents = {DOCUMENTS}
        shuffle_window = 1
        [parallel]
        dp = {DP}
        [plan]
        strategy = "slimpack"
        feedback = true
        options = {{ max_pack_tokens = {longest}, dp_merge = false }}
        [train]
        output_dir = "{directory / "run"}"
        steps = {steps}
        threads_per_process = 1
        """
    )
    return longest


def planned_batches(trainer: Trainer, costs: CostCoefficients, speeds: RankSpeeds | None) -> list[PlannedStep]:
    """The first batches of the data, planned for these speeds."""
    config, mesh = trainer.config, trainer.mesh
    loader = trainer.new_loader()
    maker = StepMaker(
        loader,
        run_planner(config, trainer.model, mesh.layout, costs, MEMORY_BYTES),
        config.plan.strategy,
        replicas=lambda layout: layout.replicas(mesh.num_ranks),
        max_pack_tokens=config.max_pack_tokens,
        speeds_of=lambda step: speeds,
        waiting=mesh.watch.waiting,
    )
    found = [cast("PlannedStep", maker.next()) for _ in range(BATCHES)]
    loader.close()
    return found


def run_rank(rank: int, directory: str, longest: int, rounds: int) -> None:
    """One replica; rank 0 leaves what was measured in the directory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=DP)
    config = load_train_config(Path(f"{directory}/config.toml"), [])
    mesh = create_meshes([layout_of(config, model_spec(config).num_layers)], torch.device("cpu"), timeout_s=300).start
    trainer = Trainer(config, mesh)
    costs = calibrate(trainer.stages, trainer.model, mesh, longest, "cpu").coefficients
    if rank == SLOW_RANK:
        hold_back(list(trainer.stages.values()))
    reports = [report for report in trainer.train(costs, MEMORY_BYTES, stop_after=LEARNING_STEPS) if report is not None]
    told = [reports[-1].plan.speeds if reports else None]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None, "the run has noticed the slow rank"
    kinds: dict[str, RankSpeeds | None] = {"ignored": None, "followed": told[0], "known": TRUTH}
    steps = {name: planned_batches(trainer, costs, speeds) for name, speeds in kinds.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name in kinds:
            row = []
            for planned in steps[name]:
                prepared = PreparedStep(planned, prepare_step(planned.plan, planned.tokens, mesh))
                report = trainer.step_trainer.run(prepared, costs, learning_rate=0.0).report
                row.append(0.0 if report is None else report.measured.step_time_s)
            if turn:
                seconds[name].append(row)
    if rank == 0:
        found = Found(
            learnt=told[0],
            seconds=seconds,
            slowest_s={name: [slowest_s(planned) for planned in of_kind] for name, of_kind in steps.items()},
            shares={name: [slow_share(planned) for planned in of_kind] for name, of_kind in steps.items()},
        )
        Path(f"{directory}/found.json").write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()


def slowest_s(planned: PlannedStep) -> float:
    """Predicted seconds of the slowest replica in truth: without a pipeline, in proportion to its rank's factor."""
    plan = planned.plan
    assumed = [1.0] * DP if plan.speeds is None else [plan.speeds.factors(replica)[0] for replica in range(DP)]
    truth = [TRUTH.factors(replica)[0] for replica in range(DP)]
    return max(s / a * t for s, a, t in zip(plan.predicted.per_replica_s, assumed, truth, strict=True))


def slow_share(planned: PlannedStep) -> float:
    """Of the tokens, what the slow replica has."""
    tokens = [
        sum(piece.num_tokens for pack in packs.forward for piece in pack.slices) for packs in planned.plan.pack_plans
    ]
    return tokens[SLOW_RANK] / sum(tokens)


def measure(quick: bool) -> list[Row]:
    """All rows of the benchmark."""
    with tempfile.TemporaryDirectory() as directory:
        longest = write_run(Path(directory), QUICK_MEAN_TOKENS if quick else MEAN_TOKENS, LEARNING_STEPS)
        rounds = QUICK_ROUNDS if quick else ROUNDS
        torch.multiprocessing.spawn(run_rank, (directory, longest, rounds), nprocs=DP)
        found = msgspec.json.decode(Path(f"{directory}/found.json").read_bytes(), type=Found)
    case = f"dp 2, {DOCUMENTS} documents, rank 1 {SLOWNESS:.1f} times as slow, slimpack"
    flat = {name: [one for row in rows for one in row] for name, rows in found.seconds.items()}
    for name, seconds in flat.items():
        print(name, [f"{one:.3f} s" for one in seconds], [f"{share:.3f}" for share in found.shares[name]])
    fast, slow = found.learnt.factors(0)[0], found.learnt.factors(1)[0]
    rows = [Row("feedback", case, "slow over fast rank, learnt", slow / fast, "x", f"truth {SLOWNESS:.1f}")]
    for name in ("ignored", "followed", "known"):
        share = statistics.median(found.shares[name])
        rows.append(Row("feedback", f"{case}: {name}", "slow replica's share of tokens", share, "", ""))
    for name in ("followed", "known"):
        ratio = median_ratio(flat[name], flat["ignored"])
        rows.append(Row("feedback", f"{case}: {name}", "step time, measured", ratio, "x", "ignored"))
        predicted = median_ratio(found.slowest_s[name], found.slowest_s["ignored"])
        rows.append(Row("feedback", f"{case}: {name}", "slowest replica, predicted", predicted, "x", "ignored"))
    gap = median_ratio(flat["followed"], flat["known"])
    rows.append(Row("feedback", f"{case}: followed", "step time, measured", gap, "x", "known"))
    return rows


if __name__ == "__main__":
    run_benchmark(measure, "A replica that becomes slower, and plans that follow.")
