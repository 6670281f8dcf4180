"""Keys and values in parts beside attention: what a step takes with and without, what is hidden, what was predicted.

Two CPU processes of one thread each train the same global batch of a Llama of 4 layers with 8 key heads, with
`train.overlap_context` on and off by turns, in one run of one set of processes, at learning rate 0: once as context
ranks (`cp = 2`), once as replicas that share documents (`dp = 2`, DP-Merge). Costs, also what transfers and compute
cost each other, are those that a run measures at its start, just before. Parts are as the planner chooses them when it
is told that a part costs nothing, and, where they are measured not to pay, that compute loses nothing; with what is
measured here it would often choose one.

    time          step time with parts, over that without; median of ratios of neighbouring steps
    hidden        of the seconds in which keys and values travel, those in which no rank waits for them: as the ranks
                  tell it (`context_s`, `context_hidden_s` of metrics.jsonl), and as predicted
    account       hidden seconds told over hidden seconds predicted, median of steps
    loss          whether both train the same

gloo moves bytes on the cores that compute, so with a thread a core what is hidden still has to be computed: there the
time tells what is gained, and the hidden share alone says little. Over a link with a speed of its own
(`shaped_link.py`) both do.

    python benchmarks/context_overlap.py [--quick] [--append]
    python benchmarks/shaped_link.py 2gbit benchmarks/context_overlap.py [--quick] [--append]
"""

import math
import statistics
import tempfile
from pathlib import Path

import msgspec
from transformers import LlamaConfig

from evenload.cost.coefficients import BesideCompute
from interleaved_steps import bench_rank, spawn_ranks
from results import Row, median_ratio, run_benchmark
from shaped_link import link_name
from token_runs import write_token_run

LAYERS, RANKS = 4, 2
CASES = {
    "cp=2": (["parallel.cp=2"], [2_048, 1_024, 1_024]),
    "dp=2, shared": (["parallel.dp=2", "plan.options.dp_merge=true"], [2_048, 256, 256]),
}
"""Settings, and tokens of the documents: replicas share one that is most of the batch."""
ROUNDS, QUICK_ROUNDS = 16, 2
KEYS = (
    "step_time_s", "context_s", "context_hidden_s", "predicted_context_s", "predicted_context_hidden_s", "loss",
    "predicted_step_time_s",
)  # fmt: skip


def write_run(directory: Path, lengths: list[int]) -> Path:
    """The run's configuration."""
    model = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, pad_token_id=None, bos_token_id=None, eos_token_id=None, max_position_embeddings=4_096,
    )  # fmt: skip
    return write_token_run(directory, model, lengths, f"batch_tokens = {sum(lengths)}", steps=1, device="cpu")


def run_rank(rank: int, directory: str, rounds: int, settings: list[str]) -> None:
    """One process; rank 0 leaves rows of all steps that count, by variant, and what was measured before."""
    with bench_rank(directory, LAYERS, ["plan.strategy=slimpack", *settings]) as bench:
        beside = bench.costs.context_beside
        assert beside is not None
        asked = beside if beside.pays else BesideCompute(stretch=beside.stretch, slowdown=0.0)
        free = {
            way: msgspec.structs.replace(getattr(bench.costs, way), context_part_s=0.0)
            for way in ("forward", "backward")
        }
        told = {"whole": {"context_beside": None}, "parts": {"context_beside": asked} | free}
        steps = {
            name: (bench.config, bench.planned_step(msgspec.structs.replace(bench.costs, **changes)))
            for name, changes in told.items()
        }
        found = bench.by_turns(steps, rounds, bench.costs, KEYS)
        if rank == 0:
            packs = steps["parts"][1].plan.pack_plans[0]
            parts = [pack.context_parts for pack in (*packs.forward, *packs.backward)]
            Path(directory, "found.json").write_bytes(msgspec.json.encode((found, beside, bench.costs.forward, parts)))


def measure(quick: bool) -> list[Row]:
    """All rows of the benchmark."""
    rows = []
    for name, (settings, lengths) in CASES.items():
        settings = [*settings, f"data.max_document_tokens={max(lengths)}"]
        with tempfile.TemporaryDirectory() as directory:
            write_run(Path(directory), lengths)
            spawn_ranks(RANKS, run_rank, directory, QUICK_ROUNDS if quick else ROUNDS, settings)
            found, beside, forward, parts = msgspec.json.decode(Path(directory, "found.json").read_bytes())
        case = f"{name}, documents of {lengths} tokens, {LAYERS} layers, {link_name()}"
        if max(parts) == 1:
            print(f"left out: {case}: under the costs measured just now the planner chooses one part for every pack")
            continue
        rows += rows_of(case, found, beside, forward, parts)
    return rows


def rows_of(case: str, found: dict[str, list[dict]], beside: dict, forward: dict, parts: list[int]) -> list[Row]:
    """Of one case."""
    column = {name: {key: [row[key] for row in rows] for key in KEYS} for name, rows in found.items()}
    whole, apart = column["whole"], column["parts"]
    assert all(math.isclose(*losses, rel_tol=1e-5) for losses in zip(whole["loss"], apart["loss"], strict=True))
    hidden_s, predicted_s = apart["context_hidden_s"], apart["predicted_context_hidden_s"]
    told = statistics.median(h / s for h, s in zip(hidden_s, apart["context_s"], strict=True))
    rates = (
        f"a transfer {beside['stretch']:.2f} times as long, compute loses {beside['slowdown']:.0%} of it, a part "
        f"{forward['context_part_s'] * 1e6:.0f} us; parts {min(parts)} to {max(parts)}"
    )
    travels = statistics.median(c / s for c, s in zip(apart["context_s"], apart["step_time_s"], strict=True))
    expected = predicted_s[0] / apart["predicted_context_s"][0]
    seconds = median_ratio(apart["context_s"], apart["predicted_context_s"])
    return [
        Row("context_overlap", case, "time", median_ratio(apart["step_time_s"], whole["step_time_s"]), "x", "one part"),
        Row("context_overlap", case, "travels", travels, "share", "the step's time"),
        Row("context_overlap", case, "hidden", told, "share", "seconds in which keys and values travel"),
        Row("context_overlap", case, "hidden, predicted", expected, "share", rates),
        Row("context_overlap", case, "seconds", seconds, "x", "seconds of transfers predicted"),
        Row("context_overlap", case, "account", median_ratio(hidden_s, predicted_s), "x", "hidden seconds predicted"),
    ]


if __name__ == "__main__":
    run_benchmark(measure, __doc__ or "")
