"""The user's own batches, read and planned as training would but not computed; what they say of ledger and memory.

Runs on one process, with the configured model, layout, strategy and data settings, until an epoch is over or the time
or number of documents is used up.
"""

import time
from dataclasses import dataclass, field

import msgspec

from evenload.check.verdict import Verdict, failed, passed, skipped
from evenload.config.planner import run_planner
from evenload.config.train_config import TrainConfig
from evenload.cost.coefficients import CostCoefficients
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import DataError, InfeasiblePlanError, InvalidPlanError
from evenload.plan.deferral.delay import DelayState
from evenload.stepplan.validate import validate_plan
from evenload.types.counted import counted
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.scaled_units import format_bytes

_MAX_DOCUMENTS = 20_000
_MAX_S = 8.0


@dataclass
class Survey:
    """What was seen.

    Args:
        steps, documents, tokens: planned; tokens counted from the documents themselves.
        whole_epoch: the data ended.
        peaks: (predicted bytes of the fullest process, step, longest document), of steps that fit or not.
        ledger_lines: the loader's account.
        ledger_error, memory_error: why training would stop; "" = nothing.
    """

    steps: int = 0
    documents: int = 0
    tokens: int = 0
    whole_epoch: bool = False
    peaks: list[tuple[int, int, int]] = field(default_factory=list)
    ledger_lines: tuple[str, ...] = ()
    ledger_error: str = ""
    memory_error: str = ""


def survey_batches(
    config: TrainConfig,
    model: ModelSpec,
    layout: ParallelLayout,
    coefficients: CostCoefficients,
    memory_cap_bytes: int,
) -> Survey:
    """Read, plan and account for batches until the limits; at least one."""
    planner = run_planner(config, model, layout, coefficients, memory_cap_bytes)
    survey, state = Survey(), DelayState()
    until_s = time.perf_counter() + _MAX_S
    loader = GlobalBatchLoader(
        msgspec.structs.replace(config.data, epochs=1, mixture_end="once"), vocab_size=model.vocab_size
    )
    trained = 0
    try:
        while not survey.steps or (survey.documents < _MAX_DOCUMENTS and time.perf_counter() < until_s):
            batch = loader.next_batch()
            if batch is None:
                survey.whole_epoch = True
                break
            documents = batch.carried + batch.documents
            proposal = planner.propose(
                survey.steps, documents, config.plan.strategy, state=state, is_last=batch.is_last
            )
            plan = proposal.plan
            validate_plan(plan, max_pack_tokens=config.max_pack_tokens)
            state = proposal.state or DelayState()
            longest = max((document.num_tokens for document in documents), default=0)
            survey.peaks.append((plan.predicted.peak_memory_bytes, survey.steps, longest))
            survey.memory_error = survey.memory_error or proposal.why
            for document in plan.documents:
                if document.doc_id in batch.tokens and len(batch.tokens[document.doc_id]) != document.num_tokens:
                    raise DataError(f"document {document.doc_id} was announced with {document.num_tokens} tokens")
            trained += sum(document.num_tokens for document in plan.documents)
            survey.tokens += sum(len(batch.tokens[document.doc_id]) for document in batch.documents)
            survey.documents += len(batch.documents)
            loader.note_step(batch, plan)
            loader.check_ledger()
            survey.steps += 1
        if loader.ledger.state.trained.tokens != trained:
            raise DataError(
                f"the ledger has {loader.ledger.state.trained.tokens:,} trained tokens, the plans {trained:,}; "
                "please report this as a bug"
            )
    except InfeasiblePlanError as error:
        survey.memory_error = str(error)
    except (DataError, InvalidPlanError) as error:
        survey.ledger_error = str(error)
    finally:
        survey.ledger_lines = tuple(loader.summary())
        loader.close()
    return survey


def check_ledger(survey: Survey) -> Verdict:
    """Every token that is read is trained, dropped for a reason, deferred, or still waiting."""
    extent = "a whole epoch" if survey.whole_epoch else "the first batches"
    # Without what stayed at zero.
    told = (" ".join(line.split()) for line in survey.ledger_lines)
    lines = "; ".join(line for line in told if " 0 documents 0 tokens" not in line)
    steps, documents = counted(survey.steps, "step"), counted(survey.documents, "document")
    found = f"{extent}, {steps} of {documents}, {survey.tokens:,} tokens: {lines}"
    if survey.ledger_error:
        return failed("ledger", found, survey.ledger_error)
    if not survey.steps:
        return skipped("ledger", found, "no step could be planned; see memory")
    return passed("ledger", found)


def check_memory(survey: Survey, memory_cap_bytes: int, strategy: str) -> Verdict:
    """The worst of the surveyed steps, as predicted, against what a process may hold."""
    limit = format_bytes(memory_cap_bytes)
    if not survey.peaks:
        if survey.memory_error:
            return failed("memory", f"limit {limit} a process", survey.memory_error)
        return skipped("memory", "", "no step could be read; see ledger")
    peak, step, longest = max(survey.peaks)
    found = (
        f"fullest of {len(survey.peaks)} steps of {strategy}: {format_bytes(peak)} predicted in step {step} (longest "
        f"document {longest:,} tokens), limit {limit} a process"
    )
    if survey.memory_error:
        return failed("memory", found, survey.memory_error)
    return passed("memory", found)
