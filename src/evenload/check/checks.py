"""Check isolation, invariance and resume on the smaller run, ledger and memory on the user's own batches.

**Isolation**: what a document computes does not depend on its neighbours in a pack. Every other document, in the order
of the packs, gets other tokens; then the rest. Outputs and gradients of the unchanged ones must stay: to the bit on the
CPU, elsewhere as near as two runs on the same tokens are to each other, at most 1 %. The changed ones must change.
Price: four steps.

**Invariance**: loss and gradients do not depend on how a batch is packed, cut or scheduled. Plans of several
strategies, and one with short slices, are compared with plain training in float64: transformers' own model, one
document at a time, torch's autograd. They may be off twice as far as plain training in the configured precision (at
least 1e-6 in float32, 1e-2 in bfloat16, 1e-10 in float64), and no parameter may be plainly wrong. Price: a step a plan,
plain training twice.

**Resume**: a trainer that is made anew from a checkpoint must repeat the first one's plan digests, losses and gradient
norms bit for bit. Price: seven small steps, one save, one load.

**Ledger and memory**: the user's own batches, read and planned as training would but not computed, on rank 0.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from evenload.check.smaller_run import STEPS, Seen, StepRunner, Verdict, exact_casts, judged, skipped
from evenload.config.planner import host_memory_of_run, make_planner, options_of_run
from evenload.config.train_config import TrainConfig, layout_of
from evenload.cost.coefficients import CostCoefficients
from evenload.data.blocks import TokenTable, all_label_counts, as_token_table
from evenload.data.encoders import IGNORE_INDEX
from evenload.data.hub import local_path
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import ConfigError, DataError, EvenloadError, InfeasiblePlanError, InvalidPlanError, RankLostError
from evenload.planning.deferral import DelayState
from evenload.planning.planner import StepPlanner
from evenload.planning.strategies.baselines import BALANCED, BEST_FIT, PADDED
from evenload.planning.strategies.slimpack import SLIMPACK, SlimpackOptions
from evenload.runtime.comm.mesh import Mesh, gather_from_all, share_of_first
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.model.model_config import load_config, model_spec
from evenload.runtime.trainer import Trainer
from evenload.stepplan.validate import validate_plan
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.plan import StepPlan, decode_plan, encode_plan
from evenload.types.text import counted, format_bytes
from evenload.types.tree import TreeShape, shape_of

_NOISE_FACTOR, _MOST_NOISE = 4.0, 1e-2


def check_isolation(
    runner: StepRunner, plans: Sequence[StepPlan], tokens: Mapping[int, NDArray[np.int32]], vocab_size: int, mesh: Mesh
) -> Verdict:
    """Run a plan with packs of several documents, again, and with other tokens. Collective."""
    packs_of = [(plan, [pack for packs in plan.pack_plans for pack in packs.forward]) for plan in plans]
    shared = [(plan, packs) for plan, packs in packs_of if any(len(pack.slices) > 1 for pack in packs)]
    if not shared:
        result = f"{counted(len(tokens), 'document')} under {counted(len(plans), 'plan')}"
        return skipped("isolation", result, "no pack holds two documents, so none can reach another")
    plan, packs = shared[0]
    order = list(dict.fromkeys(piece.doc_id for pack in packs for piece in pack.slices))
    shared_packs = sum(len(pack.slices) > 1 for pack in packs)
    before = runner.run(plan, tokens).seen
    noise = _largest_difference(before, runner.run(plan, tokens).seen, set(order))
    leak, blind = 0.0, 0
    for parity in (0, 1):
        changed = set(order[parity::2])
        others = set(order) - changed
        after = runner.run(plan, _with_other_tokens(tokens, changed, vocab_size)).seen
        leak = max(leak, _largest_difference(before, after, others))
        moved = {key[:2] for key, rows in before.items() if not torch.equal(rows, after[key])}
        # A document without any label has no gradient, whatever its tokens are.
        alive = {key[:2] for key, rows in before.items() if key[1] in changed and rows.any()}
        blind += sum(key not in moved for key in alive)
    everyone = gather_from_all((leak, noise, blind, len({key[:2] for key in before})), mesh, "what was seen")
    leaks, noises, blinds, counts = zip(*everyone, strict=True)
    leak, noise, blind, observed = max(leaks), max(noises), sum(blinds), sum(counts)
    # The CPU's kernels are deterministic: whatever differs there was carried from elsewhere.
    allowed = 0.0 if mesh.device.type == "cpu" else min(_NOISE_FACTOR * noise, _MOST_NOISE)
    near = "to the bit" if leak == 0 else f"to {leak:.1e} of the largest value, allowed {allowed:.1e}"
    result = (
        f"{counted(len(order), 'document')} in {shared_packs} shared packs of {plan.strategy}: outputs and gradients "
        f"unchanged {near} while every other document changes"
    )
    if not max(leak, noise if mesh.device.type == "cpu" else 0.0) <= allowed:
        why = "tokens of one document reach another in the same pack: attention or labels cross a boundary"
        return judged("isolation", result.replace("unchanged to", "changed by"), why)
    if blind:
        why = f"{blind} of {observed} documents' rows did not change with their tokens: the probe does not see them"
        return judged("isolation", result, why)
    return judged("isolation", result)


def _with_other_tokens(
    tokens: Mapping[int, NDArray[np.int32]], changed: set[int], vocab_size: int
) -> Mapping[int, NDArray[np.int32]]:
    """Replace every token of these documents, and its label where it has one, by the next one of the vocabulary."""
    if not isinstance(tokens, TokenTable):
        return {doc: (row + 1) % vocab_size if doc in changed else row for doc, row in tokens.items()}
    of_changed = np.repeat(np.isin(tokens.doc_ids, list(changed)), np.diff(tokens.edges))

    def next_ids(ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.where(of_changed & (ids != IGNORE_INDEX), (ids + 1) % vocab_size, ids).astype(np.int32)

    labels = None if tokens.labels is None else next_ids(tokens.labels)
    return replace(tokens, tokens=next_ids(tokens.tokens), labels=labels)


def _largest_difference(before: Seen, after: Seen, documents: set[int]) -> float:
    worst = 0.0
    for what in ("output", "gradient"):
        keys = [key for key in before if key[0] == what and key[1] in documents and before[key].numel()]
        scale = max((float(before[key].abs().max()) for key in keys), default=0.0) or 1.0
        for key in keys:
            difference = float((before[key].double() - after[key].double()).abs().max())
            worst = np.maximum(worst, difference / scale)  # NaN is a difference too
    return float(worst)


_TIMES_PLAIN = 2.0
# Below this, rounding alone decides which of two right results is nearer.
_FLOOR = {"float64": 1e-10, "float32": 1e-6, "bfloat16": 1e-2}
# A parameter's own gradient is noisier than the whole; this far off it is wrong.
_PLAINLY_WRONG, _PARAMETER_TIMES_PLAIN = 0.1, 4.0


class Errors(NamedTuple):
    """Relative errors of a step's loss, whole gradient, and each parameter's gradient by name (there of the whole
    gradient's norm, where its own is nearly zero)."""

    loss: float
    gradient: float
    parameter: dict[str, float]


@exact_casts()
def check_invariance(
    config: TrainConfig,
    runner: StepRunner,
    plans: list[tuple[str, StepPlan]],
    left_out: list[str],
    tokens: Mapping[int, NDArray[np.int32]],
    mesh: Mesh,
) -> Verdict:
    """Run every plan, with a title each, of the same documents, and the reference; `left_out` could not be planned.
    Collective."""
    name = "invariance"
    if config.model.lora is not None:
        return skipped(name, "", "plain training of adapters is compared in the tests only (peft)")
    if not plans:
        return skipped(name, "", f"nothing could be planned: {'; '.join(left_out)}")
    own = getattr(torch, config.model.dtype)
    trees = {one.doc_id: shape_of(one.segments) for _, plan in plans for one in plan.documents if one.segments}
    exact = plain_step(config, tokens, torch.float64, mesh, trees)
    plain = _errors(*(exact if own == torch.float64 else plain_step(config, tokens, own, mesh, trees)), *exact, mesh)
    limits = [max(_TIMES_PLAIN * error, _FLOOR[config.model.dtype]) for error in (plain.loss, plain.gradient)]
    worst_loss, worst_gradient, failures = 0.0, 0.0, []
    for title, plan in plans:
        outcome = runner.run(plan, tokens)
        errors = _errors(outcome.loss, outcome.gradients, *exact, mesh)
        # NaN is the largest.
        worst_loss, worst_gradient = np.maximum((worst_loss, worst_gradient), (errors.loss, errors.gradient))
        parameter, error = max(errors.parameter.items(), key=lambda item: (math.isnan(item[1]), item[1]))
        bound = max(_PLAINLY_WRONG, _PARAMETER_TIMES_PLAIN * plain.parameter.get(parameter, 0.0))
        if not (errors.loss <= limits[0] and errors.gradient <= limits[1] and error <= bound):
            failures.append(
                f"{title}: loss off by {errors.loss:.1e}, gradient by {errors.gradient:.1e}, most in {parameter} "
                f"({error:.1e})"
            )
    result = (
        f"{', '.join(title for title, _ in plans)} in {config.model.dtype} on {mesh.layout.describe()}, "
        f"{counted(len(tokens), 'document')}, {sum(map(len, tokens.values())):,} tokens: loss within {worst_loss:.1e} "
        f"(allowed {limits[0]:.1e}), gradient within {worst_gradient:.1e} (allowed {limits[1]:.1e}) of plain float64"
    )
    if left_out:
        result += f"; not run: {'; '.join(left_out)}"
    return judged(name, result, "; ".join(failures))


def _errors(
    loss: float, gradients: dict[str, Tensor], exact_loss: float, exact: dict[str, Tensor], mesh: Mesh
) -> Errors:
    """Compare a step, whose gradients lie on the ranks of its stages, with the exact one. Collective."""
    sums: dict[str, tuple[float, float]] = {}
    for name, gradient in gradients.items():
        if name not in exact and name == "lm_head.weight":
            continue  # A tied head; the first stage has the same sum under the embedding's name.
        reference = exact[name]
        difference = (gradient.double() - reference).square().sum()
        sums[name] = (float(difference), float(reference.square().sum()))
    merged = {
        name: pair for part in gather_from_all(sums, mesh, "the sums of gradients") for name, pair in part.items()
    }
    assert merged.keys() == exact.keys(), sorted(exact.keys() - merged.keys())
    whole = sum(norm for _, norm in merged.values())
    total = math.sqrt(sum(difference for difference, _ in merged.values()) / whole)
    smallest = 1e-6 * whole / len(merged)
    parameters = {name: math.sqrt(d / max(n, smallest)) for name, (d, n) in merged.items()}
    return Errors(abs(loss - exact_loss) / max(abs(exact_loss), 1e-12), total, parameters)


def plain_step(
    config: TrainConfig,
    tokens: Mapping[int, NDArray[np.int32]],
    dtype: torch.dtype,
    mesh: Mesh,
    trees: Mapping[int, TreeShape] = MappingProxyType({}),
) -> tuple[float, dict[str, Tensor]]:
    """Train a step plainly, with weights of the configured precision and in another; return its loss and every
    parameter's gradient, on every rank. Of documents that are `trees` every path is a sequence. Collective."""
    model = _plain_model(config, dtype)
    table = as_token_table(tokens)
    sequences = [one for doc in sorted(table) for one in _sequences_of(table, doc, trees.get(doc))]
    num_labels = max(1, sum(int(weights.sum()) for _, _, weights in sequences))
    total = torch.zeros(1, dtype=torch.float64)
    for row, labels, weights in sequences[mesh.rank :: mesh.layout.world_size]:
        logits = model(row[None], use_cache=False).logits[0, :-1]
        exact = logits if dtype == torch.float64 else logits.float()
        losses = nn.functional.cross_entropy(exact, labels[1:], reduction="none")
        loss = (losses * weights[1:]).sum() / num_labels
        if loss.requires_grad and len(row) > 1:
            loss.backward()
            total += loss.detach().double()
    dist.all_reduce(total, group=mesh.control)
    gradients = {}
    for name, parameter in model.named_parameters():
        # Ranks add in float64: only the model's own arithmetic is in the configured precision.
        gradient = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).double()
        dist.all_reduce(gradient, group=mesh.control)
        gradients[name] = gradient
    return float(total), gradients


def _sequences_of(table: TokenTable, doc_id: int, shape: TreeShape | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield tokens, labels and how often each label counts, int64[n] each, of a document; of a tree those of each path,
    where labels that paths share count on the first."""
    document = table.at(int(table.rows([doc_id])[0]))
    labels = table.labels_of(doc_id)
    counts = np.where(labels == IGNORE_INDEX, 0, all_label_counts(document))
    paths = [np.arange(len(labels))]
    if shape is not None:
        paths = [shape.rows_of_path(leaf) for leaf in shape.leaves.tolist()]
    for rows in paths:
        row, label, count = (torch.from_numpy(column[rows]).long() for column in (document.tokens, labels, counts))
        yield row, label, count
        counts[rows] = 0


def _plain_model(config: TrainConfig, dtype: torch.dtype) -> Any:
    hf = load_config(config.model.path)
    # torch's own attention caps no scores, and its grouped products of experts know no float64.
    hf._attn_implementation = "eager" if getattr(hf, "attn_logit_softcapping", None) else None
    hf._experts_implementation = "eager"
    own = getattr(torch, config.model.dtype)
    if not config.model.random_init:
        weights = local_path(config.model.path, "model.path", "weights")
        whole: Any = AutoModelForCausalLM.from_pretrained(weights, config=hf, dtype=own)
        return whole.to(dtype)
    ours = build_stage_model(
        load_config(config.model.path),
        layers=(0, hf.num_hidden_layers),
        dtype=own,
        device=torch.device("cpu"),
        weights=None,
        seed=config.train.seed,
    )
    weights = {name: parameter.detach() for named in ours.unit_parameters() for name, parameter in named}
    model = AutoModelForCausalLM.from_config(hf, dtype=own)
    _, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    model.tie_weights()
    return model.to(dtype)


_COMPARED_STEPS = ("loss", "grad_norm", "tokens", "documents")


def check_resume(config: TrainConfig, coefficients: CostCoefficients, memory_cap_bytes: int, mesh: Mesh) -> Verdict:
    """Train, save a checkpoint before the last steps and no other, resume, compare. Collective."""
    directory = Path(config.train.output_dir)
    if mesh.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier(group=mesh.control)
    whole = _rows(Trainer(config, mesh), coefficients, memory_cap_bytes)
    again = Trainer(config, mesh)
    if again.resume() is None:
        raise ConfigError(f"{directory} holds no checkpoint, although one was saved; is train.output_dir shared?")
    first = again.steps_done
    resumed = _rows(again, coefficients, memory_cap_bytes)
    same = f"{counted(STEPS - first, 'step')} after a restart from step {first}"
    differences = [
        f"step {step}: {key} {ours} instead of {theirs}"
        for step, (row, expected) in enumerate(zip(resumed, whole[first:], strict=True), start=first)
        for key, ours, theirs in zip(("plan", *_COMPARED_STEPS), row, expected, strict=True)
        if ours != theirs
    ]
    if differences := share_of_first(differences[:4], mesh):
        return judged("resume", f"{same}: not as without", "; ".join(differences))
    return judged("resume", f"{same}: batches, losses and gradient norms equal to the bit")


def _rows(trainer: Trainer, coefficients: CostCoefficients, memory_cap_bytes: int) -> list[tuple]:
    """Train; return (digest of the plan, compared metrics) of every step, on rank 0."""
    return [
        (report.plan.digest, *(report.row[key] for key in _COMPARED_STEPS))
        for report in trainer.train(coefficients, memory_cap_bytes, STEPS)
        if report is not None
    ]


_MAX_DOCUMENTS = 20_000
_MAX_S = 8.0


@dataclass
class Survey:
    """Result of reading and planning the user's own batches.

    Args:
        steps, documents, tokens: planned; tokens counted from the documents themselves.
        whole_epoch: the data ended.
        peaks: (predicted bytes of the fullest process, step, longest document), of steps that fit or not.
        ledger_error, memory_error: why training would stop; "" = it would not.
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
    config: TrainConfig, model: ModelSpec, layout: ParallelLayout, coefficients: CostCoefficients, memory_cap_bytes: int
) -> Survey:
    """Read, plan and account for batches until the limits; at least one."""
    planner = make_planner(config, model, layout, coefficients, memory_cap_bytes)
    survey, state, trained = Survey(), DelayState(), 0
    until_s = time.perf_counter() + _MAX_S
    data = msgspec.structs.replace(config.data, epochs=1, mixture_end="once")
    loader = GlobalBatchLoader(data, vocab_size=model.vocab_size)
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
            loader.record_step(batch, plan)
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
    extent = "a whole epoch" if survey.whole_epoch else "the first batches"
    lines = (" ".join(line.split()) for line in survey.ledger_lines)
    account = "; ".join(line for line in lines if " 0 documents 0 tokens" not in line)
    steps, documents = counted(survey.steps, "step"), counted(survey.documents, "document")
    result = f"{extent}, {steps} of {documents}, {survey.tokens:,} tokens: {account}"
    if not survey.steps and not survey.ledger_error:
        return skipped("ledger", result, "no step could be planned; see memory")
    return judged("ledger", result, survey.ledger_error)


def check_memory(survey: Survey, memory_cap_bytes: int, strategy: str) -> Verdict:
    result = f"limit {format_bytes(memory_cap_bytes)} a process"
    if survey.peaks:
        peak, step, longest = max(survey.peaks)
        result = (
            f"fullest of {len(survey.peaks)} steps of {strategy}: {format_bytes(peak)} predicted in step {step} "
            f"(longest document {longest:,} tokens), {result}"
        )
    if not survey.peaks and not survey.memory_error:
        return skipped("memory", "", "no step could be read; see ledger")
    return judged("memory", result, survey.memory_error)


_COMPARED = tuple(one.name for one in (PADDED, BEST_FIT, BALANCED, SLIMPACK))


def run_checks(
    config: TrainConfig,
    smaller: TrainConfig,
    mesh: Mesh,
    coefficients: CostCoefficients,
    memory_cap_bytes: int,
    users_cap_bytes: int,
    on_start: Callable[[str], None],
) -> list[Verdict]:
    """Run all checks in order and return their verdicts, the same on every rank; the limits are of a process of this
    run, and of the user's, and `on_start` is called with a check's name before it. Collective."""
    options = options_of_run(smaller, model_spec(smaller), mesh.layout, coefficients)
    smaller = msgspec.structs.replace(smaller, plan=msgspec.structs.replace(smaller.plan, options=options))
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
            verdicts.append(judged(name, "", str(error)))
    on_start("ledger and memory")
    surveyed: list[Verdict] = []
    if mesh.rank == 0:
        model = model_spec(config)
        layout = layout_of(config.parallel, model.num_layers)
        survey = survey_batches(config, model, layout, coefficients, users_cap_bytes)
        surveyed = [check_ledger(survey), check_memory(survey, users_cap_bytes, config.plan.strategy)]
    return verdicts + share_of_first(surveyed, mesh)


def _shared_plans(
    config: TrainConfig, documents: tuple[Document, ...], coefficients: CostCoefficients, cap_bytes: int, mesh: Mesh
) -> tuple[list[tuple[str, StepPlan]], list[str]]:
    """Return rank 0's plans with their titles, and those that could not be made with the reason, on every rank."""
    plans: list[tuple[str, bytes]] = []
    left_out: list[str] = []
    if mesh.rank == 0:
        options = config.plan.options
        longest = max(document.num_tokens for document in documents)
        limit = max(options.min_slice_tokens, longest // 3, 16)
        short = msgspec.structs.replace(options, max_pack_tokens=limit).with_own(SlimpackOptions(cuts="asymmetric"))
        host = host_memory_of_run(config.plan, mesh.ranks_per_machine)
        wanted = [(name, name, options) for name in dict.fromkeys((config.plan.strategy, *_COMPARED))]
        for title, strategy, chosen in (*wanted, ("slimpack in short slices", SLIMPACK.name, short)):
            planner = StepPlanner(model_spec(config), coefficients, mesh.layout, cap_bytes, chosen, host=host)
            try:
                plans.append((title, encode_plan(planner.plan(0, documents, strategy))))
            except EvenloadError as error:
                left_out.append(f"{title}: {error}")
    plans, left_out = share_of_first((plans, left_out), mesh)
    return [(title, decode_plan(plan)) for title, plan in plans], left_out
