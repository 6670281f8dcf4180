"""Sequences that share prefixes: `TreePacker` against the same model path by path, whole runs of trees, their plans.

`packer`, one thread:

    shared          micro-batches of `TreePacker`, each a tree
    path by path    transformers' own model and autograd, one sequence after the other, logits of labels only
    flat            all sequences in one micro-batch that shares nothing: what memory is relative to

A small Llama, two layers of width 256; loss and all gradients. CPU time of the process is the median over interleaved
rounds of shared over path by path; memory as in `replay.py`, every variant in its own process.

`runs`, two processes of one thread, a layer each, by `slimpack`: steps of `evenload train` on records that hold the
sequences of a group, as trees, over steps on the same sequences one a record, by turns, without the first of each;
bytes that the first rank holds over those predicted. Four and a half minutes on two cores.

`plans`: time to plan and choose (`planning.py`) for 1,024 trees, over that for documents of as many rows; llama-7b on
32 H100, DP 8 x PP 4, 80 GB.

    python benchmarks/trees.py [--part packer|runs|plans] [--quick] [--append]
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cpu_ranks import COSTS, cpu_rank, leave, llama, spawn_ranks
from evenload.config.planner import layouts_of
from evenload.config.train_config import load_train_config
from evenload.data.prefix_tree import build_trees
from evenload.integrations.tree_packer import TreePacker
from evenload.planning.problem import PlanOptions
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.model_config import model_spec
from evenload.runtime.trainer import Trainer
from evenload.types.document import Document
from evenload.types.tree import Segment
from harness import Row, alternate, ratio_row, run
from replay import growth_bytes
from setups import planner_for

REPEATS, QUICK_REPEATS = 5, 1
QUICK_SCALE = 8
VOCABULARY = 8192
PATH_BY_PATH, FLAT = "path by path", "flat micro-batch"
Batch = tuple[list[np.ndarray], list[np.ndarray]]
"""Sequences and the weights of their tokens."""


def group(prompt: int, responses: int, length: int) -> Batch:
    """Responses to one prompt, trained on the responses."""
    rng = np.random.default_rng(1)
    head = rng.integers(0, VOCABULARY, prompt)
    sequences = [np.concatenate([head, rng.integers(0, VOCABULARY, length)]) for _ in range(responses)]
    return sequences, [(np.arange(len(one)) >= prompt).astype(float) for one in sequences]


def turns(system: int, user: int, answer: int, count: int) -> Batch:
    """A chat trained at every turn, each a prefix of the next, on its last answer."""
    rng = np.random.default_rng(1)
    history, sequences, weights = rng.integers(0, VOCABULARY, system), [], []
    for _ in range(count):
        asked = np.concatenate([history, rng.integers(0, VOCABULARY, user)])
        history = np.concatenate([asked, rng.integers(0, VOCABULARY, answer)])
        sequences.append(history)
        weights.append((np.arange(len(history)) >= len(asked)).astype(float))
    return sequences, weights


def shapes(quick: bool) -> dict[str, Batch]:
    """Every shape by its name."""
    scale = QUICK_SCALE if quick else 1
    return {
        "GRPO, 2,048 and 8 of 512 tokens": group(2048 // scale, 8, 512 // scale),
        "GRPO, 512 and 8 of 512 tokens": group(512 // scale, 8, 512 // scale),
        "chat, 10 turns of 300 tokens behind 512": turns(512 // scale, 100 // scale, 200 // scale, 10),
        "DPO, 1,024 and 2 of 512 tokens": group(1024 // scale, 2, 512 // scale),
    }


def step_of(variant: str, batch: Batch) -> Callable[[], float]:
    """A step that makes the loss and all gradients, and gives the loss."""
    sequences, weights = batch
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=8192,
        )
    )  # fmt: skip
    model.set_attn_implementation("sdpa")

    def path_by_path() -> float:
        total = 0.0
        for tokens, own in zip(sequences, weights, strict=True):
            ids = torch.from_numpy(tokens)
            rows = torch.from_numpy(np.flatnonzero(own[1:]))
            logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=rows).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, ids[rows + 1], reduction="sum")
            loss.backward()
            total += loss.item()
        return total

    def micro_batches() -> float:
        total = 0.0
        for packed in packer.pack(sequences, weights, groups):
            loss = packed.loss(model(**packed.inputs).logits)
            loss.backward()
            total += loss.item()
        return total

    if variant == PATH_BY_PATH:
        return path_by_path
    packer = TreePacker(1 << 20, model)
    groups = list(range(len(sequences))) if variant == FLAT else None
    return micro_batches


def peak_growth_bytes(variant: str, name: str, quick: bool) -> int:
    """Measured in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--child", json.dumps([variant, name, quick])]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def measure_in_child(variant: str, name: str, quick: bool) -> None:
    """Print the peak of one step over what the process held before it, in bytes."""
    torch.set_num_threads(1)
    step_of(variant, group(64, 2, 64))()  # what stays from a first step
    print(growth_bytes(step_of(variant, shapes(quick)[name]), f"{variant} {name}"))


GROUPS, MEMORY_BYTES = 2, 2**34
"""Groups in a step, and what a rank may hold."""


def write_records(directory: Path, sequences: list[np.ndarray], *, shared: bool) -> str:
    """Write the configuration of a run on one group of sequences again and again; return its path."""
    directory.mkdir()
    llama(256, 2, vocabulary=VOCABULARY).save_pretrained(directory / "model")
    lists = [one.tolist() for one in sequences]
    records = [lists] * GROUPS if shared else lists * GROUPS
    (directory / "records.jsonl").write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in records))
    (directory / "config.toml").write_text(
        f"""
        [model]
        path = "{directory / "model"}"
        random_init = true
        [data]
        sources = ["{directory / "records.jsonl"}"]
        workers = 0
        max_document_tokens = 16384
        batch_documents = {len(records)}
        epochs = 100
        [parallel]
        pp = 2
        [plan]
        strategy = "slimpack"
        [train]
        steps = {REPEATS + 1}
        output_dir = "{directory / "run"}"
        """
    )
    return str(directory / "config.toml")


def train_by_turns(rank: int, directory: str, files: dict[str, str], repeats: int) -> None:
    """One process; rank 0 leaves the rows of metrics by variant, without the first of each."""
    with cpu_rank():
        steps = {}
        for variant, file in files.items():
            config = load_train_config(Path(file), [])
            meshes = create_meshes(layouts_of(config, model_spec(config).num_layers), torch.device("cpu"), 300)
            steps[variant] = Trainer(config, meshes.start, meshes).train(COSTS, MEMORY_BYTES, repeats + 1)
        found: dict[str, list[dict]] = {variant: [] for variant in files}
        for _ in range(repeats + 1):
            for variant, own in steps.items():
                report = next(own)
                found[variant] += [] if report is None else [report.row]
        for own in steps.values():
            own.close()
        leave(directory, {variant: rows[1:] for variant, rows in found.items()})


def measure_runs(quick: bool) -> list[Row]:
    """Steps of whole runs: time, and memory beside its prediction."""
    rows = []
    for name, (sequences, _) in shapes(quick).items():
        with tempfile.TemporaryDirectory() as directory:
            files = {
                variant: write_records(Path(directory, variant), sequences, shared=variant == "shared")
                for variant in ("shared", "separate")
            }
            spawn_ranks(2, train_by_turns, directory, files, QUICK_REPEATS if quick else 3)
            found = json.loads(Path(directory, "found.json").read_text())
        seconds = {variant: [row["step_time_s"] for row in own] for variant, own in found.items()}
        losses = [own[0]["loss"] for own in found.values()]
        assert abs(losses[0] / losses[1] - 1) < 1e-3, f"{name}: losses differ: {losses}"
        rows.append(ratio_row("trees", f"run, {name}", "step time", seconds["shared"], seconds["separate"], "separate"))
        held = [row["peak_memory_bytes"] / row["predicted_peak_memory_bytes"] for row in found["shared"]]
        rows.append(Row("trees", f"run, {name}", "peak memory", held[-1], "x", "predicted"))
    return rows


def measure(quick: bool) -> list[Row]:
    """Every shape: time, memory, and the share of tokens that is computed."""
    torch.set_num_threads(1)
    rows = []
    for name, batch in shapes(quick).items():
        steps = {variant: step_of(variant, batch) for variant in ("shared", PATH_BY_PATH)}
        losses = [step() for step in steps.values()]
        assert abs(losses[0] / losses[1] - 1) < 1e-4, f"{name}: losses differ: {losses}"
        seconds = alternate(steps, QUICK_REPEATS if quick else REPEATS, time.process_time)
        rows.append(ratio_row("trees", name, "time", seconds["shared"], seconds[PATH_BY_PATH], PATH_BY_PATH))
        held = peak_growth_bytes("shared", name, quick) / peak_growth_bytes(FLAT, name, quick)
        rows.append(Row("trees", name, "peak memory", held, "x", FLAT))
        unique = sum(len(tree.tokens) for tree in build_trees(*batch))
        rows.append(Row("trees", name, "tokens", unique / sum(map(len, batch[0])), "x", "tokens of paths"))
    return rows


PLANNED, QUICK_PLANNED, PLANS = 1024, 64, 15
STRATEGIES = ("slimpack", "auto", "balanced", "best_fit", "sequential")


def groups_of_step(count: int, step: int) -> tuple[Document, ...]:
    """Trees of a prompt and 8 responses, of other sizes in every step."""
    rng = np.random.default_rng(step)
    sizes = np.concatenate([rng.integers(200, 2000, (count, 1)), rng.integers(50, 1000, (count, 8))], axis=1)
    segments = [tuple(Segment(n, min(at, 1) - 1) for at, n in enumerate(row)) for row in sizes.tolist()]
    made = enumerate(zip(sizes.sum(axis=1).tolist(), segments, strict=True))
    return tuple(Document(doc_id=at, num_tokens=n, num_label_tokens=n, segments=own) for at, (n, own) in made)


def measure_plans(quick: bool) -> Iterator[Row]:
    """Every strategy that plans trees; every plan is of a new step, as a run's are."""
    count, repeats = (QUICK_PLANNED, QUICK_REPEATS) if quick else (PLANNED, PLANS)
    planner = planner_for("llama-7b", "h100x32", {"dp": 8, "pp": 4}, PlanOptions(max_pack_tokens=32_768))
    trees = [groups_of_step(count, step) for step in range(repeats + 1)]
    plain = [tuple(msgspec.structs.replace(one, segments=()) for one in step) for step in trees]
    for name in STRATEGIES:
        steps = {"trees": iter(trees), "documents": iter(plain)}
        variants = {of: lambda own=own, name=name: planner.propose(0, next(own), name) for of, own in steps.items()}
        seconds = alternate(variants, repeats)
        case = f"{name}, {count:,} trees of a prompt and 8 responses"
        yield ratio_row("plans", case, "plan and choose", seconds["trees"], seconds["documents"], "documents")


PARTS = {"packer": measure, "runs": measure_runs, "plans": measure_plans}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        measure_in_child(*json.loads(sys.argv[2]))
    else:
        run(PARTS)
