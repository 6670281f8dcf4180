"""All checks in order, on every rank of the smaller run; ledger and memory on rank 0."""

from collections.abc import Callable

import msgspec
import torch.distributed as dist

from evenload.check.invariance import check_invariance
from evenload.check.isolation import check_isolation
from evenload.check.resume import check_resume
from evenload.check.smaller_run import Scope
from evenload.check.step_runner import StepRunner
from evenload.check.survey import check_ledger, check_memory, survey_batches
from evenload.check.verdict import Verdict, failed
from evenload.config.planner import run_host, run_options
from evenload.config.train_config import TrainConfig, layout_of
from evenload.cost.coefficients import CostCoefficients
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import EvenloadError, RankLostError
from evenload.plan.planner import StepPlanner
from evenload.plan.strategies.balanced import BALANCED
from evenload.plan.strategies.best_fit import BEST_FIT
from evenload.plan.strategies.padded import PADDED
from evenload.plan.strategies.slimpack import SLIMPACK, SlimpackOptions
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.model.configured import model_spec
from evenload.types.document import Document
from evenload.types.plan import StepPlan, decode_plan, encode_plan

_COMPARED = tuple(one.name for one in (PADDED, BEST_FIT, BALANCED, SLIMPACK))
_SHORT_SLICES = "slimpack in short slices"


def run_checks(
    config: TrainConfig,
    scope: Scope,
    mesh: Mesh,
    coefficients: CostCoefficients,
    memory_cap_bytes: int,
    users_cap_bytes: int,
    on_start: Callable[[str], None],
) -> list[Verdict]:
    """The verdicts, the same on every rank. Collective.

    Args:
        config: the user's.
        memory_cap_bytes, users_cap_bytes: of a process of this run, and of the user's.
        on_start: called with a check's name before it.
    """
    options = run_options(scope.config, mesh.layout, coefficients)
    smaller = msgspec.structs.replace(scope.config, plan=msgspec.structs.replace(scope.config.plan, options=options))
    vocab_size = model_spec(smaller).vocab_size
    loader = GlobalBatchLoader(smaller.data, vocab_size=vocab_size)
    batch = loader.next_batch()
    loader.close()
    assert batch is not None, "an endless loader has a batch"
    plans, left_out = _shared_plans(smaller, batch.documents, coefficients, memory_cap_bytes, mesh)
    runner = StepRunner(smaller, mesh)
    checks: dict[str, Callable[[], Verdict]] = {
        # The configured strategy's plan first.
        "isolation": lambda: check_isolation(runner, [plan for _, plan in plans], batch.tokens, vocab_size, mesh),
        "invariance": lambda: check_invariance(smaller, runner, plans, left_out, batch.tokens, mesh),
        "resume": lambda: check_resume(smaller, coefficients, memory_cap_bytes, mesh),
    }
    verdicts = []
    for name, check in checks.items():
        on_start(name)
        try:
            verdicts.append(check())
        except RankLostError:
            raise
        except EvenloadError as error:
            verdicts.append(failed(name, "", str(error)))
    on_start("ledger and memory")
    surveyed: list[list[Verdict]] = [[]]
    if mesh.rank == 0:
        model = model_spec(config)
        survey = survey_batches(config, model, layout_of(config, model.num_layers), coefficients, users_cap_bytes)
        surveyed[0] = [check_ledger(survey), check_memory(survey, users_cap_bytes, config.plan.strategy)]
    dist.broadcast_object_list(surveyed, src=0, group=mesh.control)
    return verdicts + surveyed[0]


def _shared_plans(
    config: TrainConfig, documents: tuple[Document, ...], coefficients: CostCoefficients, cap_bytes: int, mesh: Mesh
) -> tuple[list[tuple[str, StepPlan]], list[str]]:
    """Rank 0's plans by title, and those that could not be made, on every rank."""
    shared: list[tuple[list[tuple[str, bytes]], list[str]]] = [([], [])]
    if mesh.rank == 0:
        options = config.plan.options
        longest = max(document.num_tokens for document in documents)
        limit = max(options.min_slice_tokens, longest // 3, 16)
        short = msgspec.structs.replace(options, max_pack_tokens=limit).with_own(SlimpackOptions(cuts="asymmetric"))
        host = run_host(config, mesh.layout, mesh.ranks_per_machine)
        wanted = [(name, name, options) for name in dict.fromkeys((config.plan.strategy, *_COMPARED))]
        plans, left_out = shared[0]
        for title, strategy, chosen in (*wanted, (_SHORT_SLICES, SLIMPACK.name, short)):
            planner = StepPlanner(model_spec(config), coefficients, mesh.layout, cap_bytes, chosen, host=host)
            try:
                plans.append((title, encode_plan(planner.plan(0, documents, strategy))))
            except EvenloadError as error:
                left_out.append(f"{title}: {error}")
    dist.broadcast_object_list(shared, src=0, group=mesh.control)
    plans, left_out = shared[0]
    return [(title, decode_plan(plan)) for title, plan in plans], left_out
