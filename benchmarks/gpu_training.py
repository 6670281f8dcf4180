"""Training on one GPU: strategies beside each other, plain loops of transformers beside us, very long documents.

    comparison  `evenload bench` of Qwen2.5-0.5B on lengths with a heavy tail: the same global batches under every
                strategy, interleaved; the ledger has the errors of predictions by batch
    peers       Qwen3-1.7B, lengths log-normal with median 700 and sigma 0.9, a tenth at 4,096: `evenload train`, and
                the loops of plain_loop.py on the same documents in the same steps from the same weights
    document    documents of 64K tokens through Qwen3-1.7B, by `evenload train` and by a loop that checkpoints
    whole       Qwen3-4B, whose state takes 18 bytes a weight and so does not fit a card of 80 GB, and Qwen3-1.7B on the
                documents of peers: `evenload train` with the optimizer in host memory
    long        256K and 512K through layers of Llama-3-8B under recompute and offload, with the FLOPs that they take

    python benchmarks/gpu_training.py --part NAME [--seconds S] [--rows FILE] [--kept DIRECTORY]

Weights are random, bf16; Evenload's have fp32 masters and moments. The first step of a run warms up and is left out;
figures are medians of the others. Tokens count without padding, FLOPs are the model's, without what is computed twice.
After S seconds what runs is stopped, and its steps so far count.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from cpu_ranks import ROOT, write_token_run
from evenload.bench.results import BenchResult
from evenload.cost.layer_counts import training_flops
from evenload.runtime.model.model_config import load_config, spec_of
from evenload.types.cluster import data_sheet_flops_per_s
from harness import Row, commit_name, print_and_keep

sys.path.insert(0, str(ROOT / "tools"))
from ledger import append_result  # isort: skip

Steps = list[dict[str, Any]]
EVENLOAD = (sys.executable, "-m", "evenload.cli.main")
STRATEGIES = "padded,best_fit,slimpack,auto"
COMPARED_TOKENS, COMPARED_LONGEST = 65_536, 16_384
PEER_DOCUMENTS, PEER_STEPS, PEER_LONGEST = 48, 5, 4096
PEER_LOOPS = {
    "packed with Liger": ("--batches=packed", "--liger"),
    "batch_rebalance with Liger": ("--batches=rebalanced", "--liger"),
    "packed": ("--batches=packed",),
}
LONG = ((262_144, 2), (524_288, 1))  # tokens; layers, whose step takes 20 s and whose activations 128 GiB hold
AS_PLAIN = (
    *("model.random_init=false", "data.shuffle_window=1", "data.streams=1"),
    *("optimizer.learning_rate=1e-6", "optimizer.weight_decay=0.01"),
)
"""What the loops of plain_loop.py do: weights that are there, documents in their order, their updates."""


class Case(NamedTuple):
    """A model, the lengths of all documents, and how many of them are a step."""

    name: str
    config: Any
    lengths: Sequence[int]
    documents: int

    def flops(self, step: int) -> float:
        """Of the model for a step."""
        lengths = np.array(self.lengths[step * self.documents :][: self.documents])
        return float(training_flops(spec_of(self.config, self.name, 2), lengths).sum())


@dataclass
class Session:
    """Until when a part may run, where its files stay, where its runs are, and what failed in it."""

    deadline_s: float
    kept: Path
    directory: Path
    device: str = "cuda"
    failed: list[str] = field(default_factory=list)

    def evenload(self, case: Case, name: str, *overrides: str) -> Iterator[Row]:
        """Rows of a run of `evenload train`."""
        output = self._folder(case) / name
        none = ("train.checkpoint_every_steps=0", "train.checkpoint_every_s=0")  # the disk has no room for several
        words = ("train", str(output.parent / "config.toml"), f'train.output_dir="{output}"', *none, *overrides)
        return self._rows(case, name, (*EVENLOAD, *words), output / "metrics.jsonl")

    def plain(self, case: Case, name: str, *options: str) -> Iterator[Row]:
        """Rows of a loop of plain_loop.py."""
        folder = self._folder(case)
        paths = (folder / "model", folder / "corpus", folder / f"{name}.jsonl")
        sizes = (f"--documents={case.documents}", f"--steps={len(case.lengths) // case.documents}")
        words = (str(ROOT / "tests" / "support" / "plain_loop.py"), *map(str, paths), *sizes, f"--device={self.device}")
        return self._rows(case, name, (sys.executable, *words, *options), paths[-1])

    def _folder(self, case: Case) -> Path:
        """Of a case, with model, corpus and config.toml."""
        folder = self.directory / case.name.replace("/", " ")
        if not folder.exists():
            batch, steps = f"batch_documents = {case.documents}", len(case.lengths) // case.documents
            write_token_run(folder, case.config, case.lengths, batch, steps=steps, device=self.device)
        return folder

    def _rows(self, case: Case, name: str, command: Sequence[str], metrics: Path) -> Iterator[Row]:
        wanted = len(case.lengths) // case.documents
        steps = self._steps(f"{case.name}, {name}", command, metrics, wanted)
        if steps is None:
            yield Row("gpu", case.name, f"{name}: does not fit", 1.0, "")
        elif len(steps) > 1:
            yield from rows_of(case, name, steps)

    def _steps(self, name: str, command: Sequence[str], metrics: Path, wanted: int) -> Steps | None:
        """What a process writes of its steps until the deadline; None where the device has too little memory (exit code
        3). It is ended once it has done them: a checkpoint of a large model takes longer than its steps."""
        print(f"{name}: {' '.join(command)}", flush=True)
        process = subprocess.Popen(command, process_group=0)
        try:
            while process.poll() is None and time.monotonic() < self.deadline_s and len(_steps_in(metrics)) < wanted:
                time.sleep(0.2)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        steps = _steps_in(metrics)
        if steps:
            (self.kept / f"{name}.jsonl").write_bytes(metrics.read_bytes())
        if code != 3 and len(steps) < wanted:
            self.failed.append(f"{name}: {len(steps)} of {wanted} steps, exit code {code}")
        return None if code == 3 else steps


def _steps_in(metrics: Path) -> Steps:
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rows_of(case: Case, name: str, steps: Steps) -> Iterator[Row]:
    """Rate, MFU, memory and loss of a run's steps, the first one left out."""
    numbered = list(enumerate(steps))[1:]
    seconds = [step["step_time_s"] for _, step in numbered]
    spread = max(seconds) / min(seconds)

    def row(metric: str, values: list[float], unit: str = "", baseline: str = "") -> Row:
        return Row("gpu", case.name, f"{name}: {metric}", statistics.median(values), unit, baseline, spread)

    yield row("rate", [step["tokens"] / step["step_time_s"] for _, step in numbered], "tokens/s")
    if (sheet := data_sheet_flops_per_s(case.name.partition(",")[0])) is not None:
        shares = [case.flops(number) / step["step_time_s"] / sheet for number, step in numbered]
        yield row("MFU of the data sheet", shares)
    yield row("peak memory", [step["peak_memory_bytes"] / 2**30 for _, step in numbered], "GiB")
    for key in ("peak_memory_bytes", "step_time_s"):
        if (predicted := f"predicted_{key}") in steps[0]:
            yield row(key, [step[key] / step[predicted] for _, step in numbered], "x", "predicted")
    yield row("loss", [step["loss"] for _, step in numbered])


def comparison(session: Session, gpu: str) -> Iterator[Row]:
    """Strategies on the same two batches; the ledger has a row for each."""
    draw = np.random.default_rng(0).lognormal(np.log(500), 1.5, size=3 * COMPARED_TOKENS // 64)
    lengths, batch = np.clip(draw.astype(np.int64), 16, COMPARED_LONGEST), f"batch_tokens = {COMPARED_TOKENS}"
    config = write_token_run(session.directory / "compared", load_config("qwen2.5-0.5b"), lengths, batch, steps=2)
    answer = session.kept / "comparison.json"
    sizes = ("--steps", "2", "--rounds", "3", "--json", str(answer), "--strategy", STRATEGIES)
    subprocess.run([*EVENLOAD, "bench", str(config), *sizes], check=True, timeout=session.deadline_s - time.monotonic())
    result = msgspec.json.decode(answer.read_bytes(), type=BenchResult)
    case = f"{gpu}, Qwen2.5-0.5B, heavy tail"
    append_result(session.kept / "ledger.csv", result, case, commit_name())
    padded = next(one for one in result.runs if one.strategy == "padded")
    for one in result.runs:
        ratio, spread = one.tokens_per_s / padded.tokens_per_s, 1 + one.spread
        yield Row("gpu", case, f"{one.strategy}: rate", ratio, "x", "padded", spread)


def peers(session: Session, gpu: str) -> Iterator[Row]:
    """The first loop writes the weights; Evenload is next, so that a part cut short has both."""
    case = _peer_case(gpu, "Qwen3-1.7B")
    first, *others = PEER_LOOPS
    yield from session.plain(case, first, *PEER_LOOPS[first])
    yield from session.evenload(case, "evenload", *AS_PLAIN, f"plan.options.max_pack_tokens={2 * PEER_LONGEST}")
    for name in others:
        yield from session.plain(case, name, *PEER_LOOPS[name])


def _peer_case(gpu: str, model: str) -> Case:
    random, count = np.random.default_rng(0), PEER_DOCUMENTS * PEER_STEPS
    lengths = np.clip(random.lognormal(np.log(700), 0.9, count).astype(np.int64), 16, PEER_LONGEST)
    lengths[random.random(count) < 0.1] = PEER_LONGEST
    return Case(f"{gpu}, {model}, trl#6092", load_config(model.lower()), lengths.tolist(), PEER_DOCUMENTS)


def whole(session: Session, gpu: str) -> Iterator[Row]:
    """Without this setting the larger model is refused, and the smaller one is a row of `peers`."""
    in_order = ("data.shuffle_window=1", "data.streams=1")  # FLOPs of a step are counted so
    settings = ("optimizer.offload_stages=[0]", f"plan.options.max_pack_tokens={2 * PEER_LONGEST}", *in_order)
    for model in ("Qwen3-1.7B", "Qwen3-4B"):
        case = _peer_case(gpu, model)._replace(name=f"{gpu}, {model}, optimizer in host memory")
        yield from session.evenload(case, "evenload", *settings)


def document(session: Session, gpu: str) -> Iterator[Row]:
    """One document a step."""
    config, tokens = load_config("qwen3-1.7b"), 65_536
    config.max_position_embeddings = tokens
    case = Case(f"{gpu}, Qwen3-1.7B, one document of {tokens:,}", config, [tokens] * 3, 1)
    yield from session.evenload(case, "evenload")
    yield from session.plain(case, "checkpointing with Liger", "--batches=packed", "--liger", "--checkpointing")


def long(session: Session, gpu: str) -> Iterator[Row]:
    """The FLOPs of a step stand in the log before it begins: each run is some steps, and must fit the part's time."""
    for tokens, layers in LONG:
        config = load_config("llama3-8b")
        config.num_hidden_layers, config.max_position_embeddings = layers, tokens
        case = Case(f"{gpu}, {layers} layers of Llama-3-8B, one document of {tokens:,}", config, [tokens] * 2, 1)
        print(f"{case.name}: {case.flops(0):.2g} FLOPs of the model a step, recomputing a third more", flush=True)
        for policy in ("recompute", "offload"):
            yield from session.evenload(case, policy, f"plan.options.policy={policy}")


PARTS = {part.__name__: part for part in (comparison, peers, whole, document, long)}


def main() -> None:
    """Exit code 1 where a run failed or was stopped before it had done its steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--seconds", type=float, default=480.0, help="stops what runs after so many; default: 480")
    parser.add_argument("--rows", type=Path, help="appends rows to this file")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "gpu", help="default: build/gpu")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu_training.py needs a GPU: torch.cuda.is_available() is false")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("benchmarks/gpu_training.py: stopped"))  # with the run it watches
    options.kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(time.monotonic() + options.seconds, options.kept, Path(folder))
        print_and_keep(PARTS[options.part](session, torch.cuda.get_device_name(0)), options.rows)
    sys.exit("\n".join(session.failed) or None)


if __name__ == "__main__":
    main()
