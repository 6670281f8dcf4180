"""Checks of a small run as one rank of a `GlooPool`, right and broken on purpose."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from dist_training import COSTS
from evenload.attention.backends import select_backend
from evenload.attention.range_attention import keys_by_range
from evenload.check.checks import _shared_plans, check_invariance, check_isolation, check_resume
from evenload.check.smaller_run import StepRunner, Verdict, smaller_run
from evenload.config.train_config import TrainConfig, layout_of, load_train_config
from evenload.data.loader import GlobalBatchLoader
from evenload.runtime.comm.mesh import Mesh, create_meshes
from evenload.runtime.model.model_config import model_spec
from evenload.runtime.trainer import Trainer
from gloo_pool import TIMEOUT_S
from other_rounding import rounded_up
from tree_cases import plan_of_packs, random_packs, trees_of_lengths

CAP_BYTES = 2**34


class LeakyAttention:
    """Attention whose output carries a little of whatever was attended to before: of the neighbour in the pack."""

    name = "leaky"

    def __init__(self) -> None:
        self._inner = select_backend("auto", "cpu")
        self._left = 0.0

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def forward(self, q, seen, sizes, scoring):
        out, lse = self._inner.forward(q, seen, sizes, scoring)
        parts = []
        for part, (_, values) in zip(out.split(sizes.rows), keys_by_range(seen, sizes), strict=True):
            parts.append(part + 1e-3 * self._left)
            self._left = float(values.double().mean())
        return torch.cat(parts), lse


def small_run(config_file: str, overrides: list[str]) -> tuple[TrainConfig, Mesh]:
    """The scope of a check, its files shared by the ranks."""
    config = load_train_config(Path(config_file), overrides)
    directory = Path(config_file).parent / "check"
    directory.mkdir(exist_ok=True)
    smaller, _ = smaller_run(config, directory)
    layout = layout_of(smaller.parallel, model_spec(smaller).num_layers)
    return smaller, create_meshes([layout], torch.device("cpu"), TIMEOUT_S).start


def isolation_verdict(config_file: str, overrides: list[str], leaky: bool) -> Verdict:
    config, mesh = small_run(config_file, overrides)
    batch = GlobalBatchLoader(config.data).next_batch()
    plans, _ = _shared_plans(config, batch.documents, COSTS, CAP_BYTES, mesh)
    runner = StepRunner(config, mesh, LeakyAttention() if leaky else None)
    return check_isolation(runner, [plan for _, plan in plans], batch.tokens, model_spec(config).vocab_size, mesh)


def invariance_verdict(config_file: str, overrides: list[str], wrong_labels: bool) -> Verdict:
    config, mesh = small_run(config_file, overrides)
    batch = GlobalBatchLoader(config.data).next_batch()
    plans, left_out = _shared_plans(config, batch.documents, COSTS, CAP_BYTES, mesh)
    if wrong_labels:
        # The mean over one label too few, as where ranks divide by what they count for themselves.
        title, plan = plans[-1]
        plans[-1] = (title, msgspec.structs.replace(plan, num_label_tokens=plan.num_label_tokens - 1))
    return check_invariance(config, StepRunner(config, mesh), plans, left_out, batch.tokens, mesh)


def tree_verdict(config_file: str, overrides: list[str], count_once: bool) -> Verdict:
    """Of trees beside plain documents; `count_once` = of a label that sequences share as if it were of one."""
    config, mesh = small_run(config_file, overrides)
    batch = trees_of_lengths([61, 40, 35, 12, 50], seed=0)
    plan = plan_of_packs(batch, *random_packs(batch, 0), layout=mesh.layout)
    tokens = replace(batch.tokens, label_counts=None) if count_once else batch.tokens
    runner = StepRunner(config, mesh)
    outcome = runner.run(plan, tokens)
    runner.run = lambda *args: outcome  # type: ignore[method-assign]
    return check_invariance(config, runner, [("trees", plan)], [], batch.tokens, mesh)


def invariance_among_processors(config_file: str, overrides: list[str]) -> Verdict:
    """On ranks whose processors round to float32 differently, where nothing but the check itself keeps them exact."""
    with mock.patch.object(nn.Module, "__call__", nn.Module.__call__.__wrapped__), rounded_up(2 + dist.get_rank()):
        return invariance_verdict(config_file, overrides, False)


def resume_verdict(config_file: str, overrides: list[str], forgets_loader: bool) -> Verdict:
    config, mesh = small_run(config_file, overrides)
    resume = Trainer.resume

    def resume_without_the_loader(trainer: Trainer):
        fresh = trainer.loader.state()
        result = resume(trainer)
        trainer.loader.load_state(fresh)
        return result

    with mock.patch.object(Trainer, "resume", resume_without_the_loader if forgets_loader else resume):
        return check_resume(config, COSTS, CAP_BYTES, mesh)
