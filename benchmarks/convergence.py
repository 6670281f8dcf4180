"""What documents that wait cost in loss: a small Llama on real text, under every order in which strategies train it.

WLB-LLM trains a model of 550 M parameters for 52,000 steps and reports a training loss 1.6 % higher when documents are
packed over 8 global batches (its Figs. 6 and 16), and the same loss as without reordering under its own delay, which
puts a token off by half a step on average. Skrull (its Fig. 5) changes no global batch, so no loss. Here the same at
the size of a CPU: 2 M parameters, 800 steps, three seeds of weights and of the order of documents.

    plain         `sequential`: every document in the step with whose global batch it comes
    wlb published `wlb` with `as_published`: Algorithm 1's queues
    wlb balanced  `wlb` with its defaults: the fewest long documents wait at which the micro-batches are even
    fixed 8       `fixed_greedy` with `window = 8`: the documents of 8 global batches are packed together into windows
                  of one length and even attention work, longest first, and a step trains an eighth of these windows,
                  neighbours in work. So a step of long documents follows one of short ones
    fixed 1, skrull, slimpack   change no global batch: the same documents a step as `plain`, whatever rank computes
                  them. That is shown over the first steps, not trained three times

All of it is `evenload train`'s Trainer in one process (`skrull` and `slimpack`: two), with its own planning from step
to step; only costs are given, so that plans do not follow the clock. What stands for what:

    text          the source of Python's standard library without its tests: a document is a paragraph, what stands
                  between two empty lines; equal ones are taken once, cut at the context of 192 tokens. Every 200th is
                  held out; a tokeniser (byte-level BPE, 1,024 tokens) is trained on the others
    global batch  as many tokens as N = 4 windows of the context hold, as in WLB-LLM's 128K jobs (PP = 4, DP = 1)
    costs         of the paper's 550 M model at 64K: attention of the longest document takes as many times as long as
                  its linear layers as it does there, by the data sheet of H100

The delay of a token is in steps from the one with whose batch it came to the one that trained it, and in tokens that
were trained in between. What waits after the last step is not trained.

    python benchmarks/convergence.py [--quick] [--append] [--part curves|equal]

Half an hour on two cores. Runs stay in runs/convergence: the same command goes on where it was stopped, and runs that
have ended are read. `--append` also writes the curves, a row every 50 steps, to results/convergence_curves.csv.
"""

import csv
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from cpu_ranks import COSTS, ROOT, cpu_rank, llama, spawn_ranks
from evenload.config.planner import layouts_of
from evenload.config.train_config import load_train_config
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import CostCoefficients
from evenload.data.hub import model_from
from evenload.runtime.comm.mesh import create_meshes, warm_up
from evenload.runtime.model.model_config import model_spec
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.types.base import Frozen
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout
from harness import RESULTS, Row, commit_name, machine_facts, run
from library_text import write_library

RUNS = ROOT / "runs" / "convergence"
CURVES = RESULTS / "convergence_curves.csv"
MICRO_BATCHES = 4
PAPER_MODEL, PAPER_CONTEXT = "wlb-550m", 65_536
MEMORY_BYTES = 2**33
PLAIN = "plain"
WLB = f"plan.options.micro_batches={MICRO_BATCHES}"


class Way(NamedTuple):
    """An order in which documents are trained.

    Args:
        contexts: tokens of the longest pack, in contexts; WLB-LLM's sequences may be longer than the context.
        num_ranks: processes.
    """

    settings: tuple[str, ...]
    contexts: int = 1
    num_ranks: int = 1


TRAINED = {
    PLAIN: Way(("plan.strategy=sequential",)),
    "wlb published": Way(("plan.strategy=wlb", WLB, "plan.options.wlb={as_published=true}"), contexts=2),
    "wlb balanced": Way(("plan.strategy=wlb", WLB), contexts=2),
    "fixed 8": Way(("plan.strategy=fixed_greedy", "plan.options.window=8")),
}
EQUAL = {
    "fixed 1": Way(("plan.strategy=fixed_greedy", "plan.options.window=1")),
    "skrull, cp=2": Way(("plan.strategy=skrull", "parallel.cp=2"), num_ranks=2),
    "slimpack, pp=2": Way(("plan.strategy=slimpack", "parallel.pp=2"), num_ranks=2),
}


class Size(Frozen):
    """What is trained for how long.

    Args:
        rows_every: steps between two rows, held-out losses and checkpoints.
        equal_steps: of the strategies that change no global batch.
        modules: of the standard library, the first so many; 0 = all.
    """

    hidden: int = 192
    layers: int = 4
    vocabulary: int = 1024
    context: int = 192
    steps: int = 800
    rows_every: int = 50
    equal_steps: int = 40
    seeds: int = 3
    modules: int = 0


QUICK = Size(
    hidden=32, layers=2, vocabulary=300, context=64, steps=12, rows_every=6, equal_steps=3, seeds=1, modules=20
)


class StepRecord(Frozen):
    """A step, as its run writes it down.

    Args:
        documents, tokens: ids of what was trained, and their lengths.
        waiting: ids of what was deferred.
        loss: mean over its `label_tokens`.
        held_out_loss: of the weights after it, where it was due.
        imbalance: longest over mean micro-batch, forward, as planned by the paper's costs.
    """

    step: int
    commit: str
    documents: list[int]
    tokens: list[int]
    waiting: list[int]
    label_tokens: int
    loss: float
    held_out_loss: float | None
    imbalance: float


class Point(Frozen):
    """A row of the curves: means since the row before it.

    Args:
        step: steps that are done.
        documents, tokens: trained since the run began.
        train_loss: a label token.
        delay_steps, delay_tokens: of a token.
    """

    strategy: str
    seed: int
    step: int
    documents: int
    tokens: int
    train_loss: float
    held_out_loss: float
    delay_steps: float
    delay_tokens: float
    imbalance: float


def write_corpus(directory: Path, size: Size) -> list[Row]:
    """Write the documents and the model's configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = list(write_library(directory, size.vocabulary, size.context, size.modules))
    heads = size.hidden // 32
    model = llama(size.hidden, size.layers, heads=heads, key_heads=heads, vocabulary=size.vocabulary)
    model.tie_word_embeddings = True
    model.save_pretrained(directory / "model")
    return rows


def paper_costs(context: int) -> CostCoefficients:
    """Costs under which attention weighs as much in the longest document as in the paper's."""
    model, cluster = model_from(PAPER_MODEL), cluster_from("h100x16")
    costs = analytic_coefficients(model, cluster, even_layout(model.num_layers, tp=2, cp=2, pp=4))
    passes = {}
    for name in ("forward", "backward"):
        theirs, ours = getattr(costs, name), getattr(COSTS, name)
        share = theirs.attention_s_per_pair * PAPER_CONTEXT / theirs.linear_s_per_token
        scaled_s = ours.linear_s_per_token * share / context
        passes[name] = msgspec.structs.replace(ours, attention_s_per_pair=scaled_s)
    return msgspec.structs.replace(COSTS, **passes)


def write_config(corpus: Path, output: Path, way: Way, size: Size, seed: int) -> None:
    """Write the run of one order and seed, but for the settings of the order."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.toml").write_text(
        f"""
        [model]
        path = "{corpus / "model"}"
        random_init = true
        [data]
        sources = ["{corpus / "train.bin"}"]
        record = "tokens"
        max_document_tokens = {size.context}
        batch_tokens = {MICRO_BATCHES * size.context}
        shuffle_window = 65536  # more than there are: the order is random
        seed = {seed}
        streams = 1
        workers = 0
        [validation]
        sources = ["{corpus / "held_out.bin"}"]
        every_steps = {size.rows_every}
        [plan]
        options = {{ max_pack_tokens = {way.contexts * size.context} }}
        [optimizer]
        learning_rate = 1e-3  # at twice that a run in four fell 3 % behind in its first 100 steps, by chance
        warmup_steps = {2 * size.rows_every}
        decay = "cosine"
        [train]
        output_dir = "{output}"
        seed = {seed}
        steps = {size.steps}
        checkpoint_every_steps = {size.rows_every}
        keep_checkpoints = 1
        background_checkpoints = false
        threads_per_process = 1
        """,
        encoding="utf-8",
    )


def record_of(report: StepReport, commit: str) -> StepRecord:
    """What a run keeps of a step."""
    plan = report.plan
    costs_s = [pack.cost_s for packs in plan.pack_plans for pack in packs.forward]
    loss = report.row["loss"]
    assert loss is not None, "every step has labels"
    return StepRecord(
        step=plan.step,
        commit=commit,
        documents=[document.doc_id for document in plan.documents],
        tokens=[document.num_tokens for document in plan.documents],
        waiting=[one.doc_id for one in plan.left_out],
        label_tokens=plan.num_label_tokens,
        loss=float(loss),
        held_out_loss=report.validation and report.validation.loss,
        imbalance=max(costs_s) / statistics.mean(costs_s),
    )


def read_records(output: Path) -> list[StepRecord]:
    """Steps that a run has written down; a line that the end of the process cut off does not count."""
    log = output / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True) if log.is_file() else []
    return [msgspec.json.decode(line, type=StepRecord) for line in lines if line.endswith(b"\n")]


def write_records(output: Path, records: Iterable[StepRecord], mode: str) -> None:
    """Write lines to a run's log, or append them."""
    with (output / "log.jsonl").open(mode) as file:
        file.writelines(msgspec.json.encode(record) + b"\n" for record in records)


def folder(name: str) -> str:
    """The name of an order as that of a directory."""
    return re.sub(r"\W+", "-", name)


def train_rank(rank: int, corpus: str, output: str, way: Way, size: Size, seed: int, commit: str) -> None:
    """One process of a run: from its last checkpoint to its end."""
    with cpu_rank():
        train(Path(corpus), Path(output), way, size, seed, commit, keeps=rank == 0)


def train(
    corpus: Path,
    output: Path,
    way: Way,
    size: Size,
    seed: int,
    commit: str,
    *,
    keeps: bool = True,
    stop_after: int | None = None,
) -> None:
    """Train the remaining steps and write each down. Collective."""
    if keeps:
        write_config(corpus, output, way, size, seed)
    dist.barrier()
    config = load_train_config(output / "config.toml", list(way.settings))
    meshes = create_meshes(layouts_of(config, model_spec(config).num_layers), torch.device("cpu"), timeout_s=600)
    warm_up(meshes)
    trainer = Trainer(config, meshes.start, meshes)
    trainer.resume()
    if keeps:
        # Steps after the checkpoint are trained again, and come out alike.
        write_records(output, read_records(output)[: trainer.steps_done], "wb")
    for report in trainer.train(paper_costs(size.context), MEMORY_BYTES, stop_after=stop_after):
        if report is not None:
            write_records(output, [record_of(report, commit)], "ab")


def run_to_end(corpus: Path, output: Path, way: Way, size: Size, seed: int) -> list[StepRecord]:
    """All steps of a run, of which those that a run before has trained are read."""
    if len(records := read_records(output)) < size.steps:
        print(f"{output.name}: {len(records)} of {size.steps} steps are there", flush=True)
        spawn_ranks(way.num_ranks, train_rank, str(corpus), str(output), way, size, seed, commit_name())
        records = read_records(output)
    assert [record.step for record in records] == list(range(size.steps)), f"{output}: steps are missing; delete it"
    return records


def token_delays(records: Sequence[StepRecord]) -> list[tuple[float, float]]:
    """Of every step the mean delay of its tokens, in steps and in tokens that were trained meanwhile."""
    came: dict[int, int] = {}
    trained = np.cumsum([0, *(sum(record.tokens) for record in records)])
    delays = []
    for number, record in enumerate(records):
        for doc_id in (*record.documents, *record.waiting):
            came.setdefault(doc_id, number)
        since = np.array([came[doc_id] for doc_id in record.documents])
        weights = np.array(record.tokens) / sum(record.tokens)
        delays.append((float(weights @ (number - since)), float(weights @ (trained[number] - trained[since]))))
    return delays


def curve(strategy: str, seed: int, records: Sequence[StepRecord]) -> Iterator[Point]:
    """The rows of a run: one wherever there is a held-out loss."""
    first, delays = 0, token_delays(records)
    for last, record in enumerate(records):
        if record.held_out_loss is None:
            continue
        part = records[first : last + 1]
        labels, tokens = [one.label_tokens for one in part], [sum(one.tokens) for one in part]
        yield Point(
            strategy=strategy,
            seed=seed,
            step=last + 1,
            documents=sum(len(one.documents) for one in records[: last + 1]),
            tokens=sum(sum(one.tokens) for one in records[: last + 1]),
            train_loss=float(np.average([one.loss for one in part], weights=labels)),
            held_out_loss=record.held_out_loss,
            delay_steps=float(np.average([steps for steps, _ in delays[first : last + 1]], weights=tokens)),
            delay_tokens=float(np.average([ahead for _, ahead in delays[first : last + 1]], weights=tokens)),
            imbalance=statistics.mean(one.imbalance for one in part),
        )
        first = last + 1


def append_points(path: Path, points: Iterable[Point], commit: str) -> None:
    """Append rows of the curves, with the facts of this machine and the commit that trained them."""
    facts = machine_facts() | {"commit": commit}
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*facts, *Point.__struct_fields__], lineterminator="\n")
        if is_new:
            writer.writeheader()
        for point in points:
            cells = {name: getattr(point, name) for name in Point.__struct_fields__}
            numbers = {name: f"{cell:.6g}" for name, cell in cells.items() if isinstance(cell, float)}
            writer.writerow(facts | cells | numbers)


def run_rows(strategy: str, seed: int, records: Sequence[StepRecord], plain: Sequence[StepRecord]) -> Iterator[Row]:
    """The figures of a run, beside the plain one of its seed."""
    case = f"{strategy}, seed {seed}"
    tail = slice(-max(1, len(records) // 5), None)
    tokens = [sum(one.tokens) for one in records]
    for metric, losses in (("held-out loss", [held_out(records), held_out(plain)]),
                           ("train loss, last fifth", [mean_loss(records[tail]), mean_loss(plain[tail])]),
                           ("train loss", [mean_loss(records), mean_loss(plain)])):  # fmt: skip
        yield Row("convergence", case, metric, losses[0], "nats")
        if strategy != PLAIN:
            yield Row("convergence", case, metric, losses[0] / losses[1], "x", PLAIN)
    steps, ahead = (np.average(column, weights=tokens) for column in zip(*token_delays(records), strict=True))
    yield Row("convergence", case, "mean token delay", float(steps), "steps")
    yield Row("convergence", case, "mean token delay", float(ahead), "tokens", "tokens trained meanwhile")
    yield Row("convergence", case, "imbalance, planned", statistics.mean(one.imbalance for one in records), "x", "mean")
    yield Row("convergence", case, "tokens trained", sum(tokens), "tokens")
    uneven = statistics.pstdev(tokens) / statistics.mean(tokens)
    yield Row("convergence", case, "tokens a step, standard deviation", uneven, "x", "mean")


def held_out(records: Sequence[StepRecord]) -> float:
    """The held-out loss of the final weights."""
    loss = records[-1].held_out_loss
    assert loss is not None, "validated after the last step"
    return loss


def mean_loss(records: Sequence[StepRecord]) -> float:
    """Mean over label tokens of several steps."""
    return float(np.average([one.loss for one in records], weights=[one.label_tokens for one in records]))


def curves(quick: bool) -> Iterator[Row]:
    """Train every order and seed, two at a time; rows come when all orders of a seed are trained."""
    size = QUICK if quick else Size()
    commit_name()  # of the code that is about to train, and not of what lies here in half an hour
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        runs = Path(scratch) if quick else RUNS
        yield from write_corpus(runs / "corpus", size)
        trained = [
            (name, seed, pool.submit(run_to_end, runs / "corpus", runs / f"{folder(name)}-{seed}", way, size, seed))
            for seed in range(size.seeds)
            for name, way in TRAINED.items()
        ]
        plain: list[StepRecord] = []
        for name, seed, answer in trained:
            records = answer.result()
            plain = records if name == PLAIN else plain
            yield from run_rows(name, seed, records, plain)
            if "--append" in sys.argv[1:]:
                append_points(CURVES, curve(name, seed, records), records[-1].commit)


def equal(quick: bool) -> Iterator[Row]:
    """Losses of the first steps under strategies that change no global batch."""
    size = QUICK if quick else Size()
    with TemporaryDirectory() as scratch:
        corpus = Path(scratch) / "corpus"
        write_corpus(corpus, size)
        expected: list[float] = []
        for name, way in {PLAIN: TRAINED[PLAIN], **EQUAL}.items():
            short = msgspec.structs.replace(size, steps=size.equal_steps)
            records = run_to_end(corpus, Path(scratch) / folder(name), way, short, 0)
            losses = [record.loss for record in records]
            if name == PLAIN:
                expected = losses
                continue
            apart = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, expected, strict=True))
            yield Row("convergence equal", f"{name}, {len(losses)} steps", "loss apart, largest", apart, "", PLAIN)


PARTS = {"equal": equal, "curves": curves}

if __name__ == "__main__":
    run(PARTS)
