"""Training on one GPU: packed against padded and best-fit, memory against its prediction, one very long document.

    packed      slices and documents packed by work (`balanced`)
    best_fit    documents packed by length
    padded      every document padded to the longest of its micro-batch

Every case is a run of `evenload train` in a process of its own: a few steps on random token ids whose lengths are
log-normal with a heavy tail, random weights, bf16 with fp32 master weights. Tokens count without padding. Models have
the widths of Qwen2.5-0.5B (24 layers) and of 7B (as many layers as fit beside their optimizer state). The first step
warms up and is left out; figures are medians of the others.

The long document: 262,144 tokens through the 0.5B model, once by transformers with sdpa under plain autograd (recorded
as 1 where it runs out of memory), once by `evenload train` under every activation policy.

    bench       `evenload bench` on both models: the same global batches under every strategy, interleaved step by step
                in one process; a row a strategy and batch in benchmarks/accuracy/gpu.csv, signed errors of predictions

    python benchmarks/gpu_training.py [--quick] [--append] [--part training|bench]

Refuses without a GPU. It has not been run on one yet: there is no row of it in results.csv.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from cpu_ranks import write_token_run
from evenload.bench.results import BenchResult
from harness import Row, commit_name, run

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from ledger import append_result

BENCHED, BENCH_BATCHES = "padded,best_fit,balanced,wlb,slimpack,auto", 2
LEDGER = Path(__file__).parent / "accuracy" / "gpu.csv"
STEPS, QUICK_STEPS = 8, 3
MAX_TOKENS = 16_384
STEP_TOKENS, QUICK_STEP_TOKENS = 131_072, 16_384
LONG_TOKENS = 262_144
VOCABULARY = 32_000
STRATEGIES = {"packed": "balanced", "best_fit": "best_fit", "padded": "padded"}
POLICIES = ("replay", "recompute", "offload")
# Bytes a parameter: bf16 weight, fp32 gradient, master, two moments.
BYTES_PER_PARAMETER = 18
STATIC_SHARE = 0.5
_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
_SMALL = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Case:
    """A model and lengths.

    Args:
        config: of the model; name: of the case, in words.
    """

    name: str
    config: Qwen2Config
    lengths: tuple[int, ...]
    step_tokens: int


def skewed_lengths(total: int) -> tuple[int, ...]:
    """Log-normal with median 500 and a tail to `MAX_TOKENS`, until the total is reached."""
    draw = np.random.default_rng(0).lognormal(np.log(500), 1.5, size=total // 64)
    lengths = np.clip(draw.astype(np.int64), 16, MAX_TOKENS)
    return tuple(lengths[: int(np.searchsorted(np.cumsum(lengths), total)) + 1].tolist())


def small_config(layers: int = 24, longest: int = MAX_TOKENS) -> Qwen2Config:
    """Widths of Qwen2.5-0.5B."""
    return _config(_SMALL, layers, longest, tied=True)


def large_config(device_bytes: int) -> Qwen2Config:
    """Widths of 7B, and the layers whose state takes half of the device, at most 28."""
    one = sum(p.numel() for p in _on_meta(_config(_7B, 1, MAX_TOKENS, tied=False)).parameters())
    two = sum(p.numel() for p in _on_meta(_config(_7B, 2, MAX_TOKENS, tied=False)).parameters())
    room = device_bytes * STATIC_SHARE / BYTES_PER_PARAMETER - (2 * one - two)
    return _config(_7B, max(1, min(28, int(room // (two - one)))), MAX_TOKENS, tied=False)


def _config(widths: dict[str, int], layers: int, longest: int, *, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        **widths,
        num_hidden_layers=layers,
        vocab_size=VOCABULARY,
        max_position_embeddings=longest,
        tie_word_embeddings=tied,
    )


def _on_meta(config: Qwen2Config) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def train(case: Case, steps: int, *overrides: str) -> list[dict] | None:
    """Rows of metrics.jsonl after the first step; None where the plan does not fit the device (exit code 3).

    Raises:
        RuntimeError: with what the run printed, where it failed otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = write_run(case, Path(folder), steps)
        command = [sys.executable, "-m", "evenload.cli.main", "train", str(config), *overrides]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode == 3:
            return None
        if done.returncode:
            raise RuntimeError(f"{case.name} {overrides}: {done.stdout}{done.stderr}")
        rows = (config.parent / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row) for row in rows[1:]]


def write_run(case: Case, directory: Path, steps: int, device: str = "cuda") -> Path:
    """Model, tokens and config.toml of a run; returns the path of the latter."""
    batch = f"batch_tokens = {case.step_tokens}"
    return write_token_run(directory, case.config, case.lengths, batch, steps=steps, device=device)


def compare_strategies(case: Case, steps: int) -> list[Row]:
    """Tokens a second against padded, MFU, and measured against predicted peak memory."""
    runs = {name: train(case, steps, f"plan.strategy={strategy}") for name, strategy in STRATEGIES.items()}
    rows = []
    padded = runs["padded"]
    for name, result in runs.items():
        if result is None:
            rows.append(Row("gpu", case.name, f"{name} does not fit", 1.0, "", ""))
            continue
        if padded is not None:
            ratio = _median(result, "tokens_per_s") / _median(padded, "tokens_per_s")
            rows.append(Row("gpu", case.name, f"{name} tokens/s", ratio, "x", "padded"))
        rows.append(Row("gpu", case.name, f"{name} MFU", _median(result, "mfu"), "", ""))
        if result[0]["mfu_of_data_sheet"] is not None:
            rows.append(
                Row("gpu", case.name, f"{name} MFU of the data sheet", _median(result, "mfu_of_data_sheet"), "", "")
            )
        rows.append(_memory_row(case.name, name, result))
    return rows


def long_document(steps: int, tokens: int) -> list[Row]:
    """One document through the 0.5B model: does plain autograd fit, does each policy, and its memory."""
    name = f"0.5B, one document of {tokens:,} tokens"
    case = Case(name, small_config(longest=tokens), (tokens, 64), tokens + 64)
    rows = [Row("gpu", name, "plain autograd runs out of memory", float(plain_runs_out(case)), "", "")]
    for policy in POLICIES:
        run = train(case, steps, f"plan.options.policy={policy}")
        rows.append(Row("gpu", name, f"{policy} trains", float(run is not None), "", ""))
        if run is not None:
            rows.append(Row("gpu", name, f"{policy} MFU", _median(run, "mfu"), "", ""))
            rows.append(_memory_row(name, policy, run))
    return rows


def plain_runs_out(case: Case) -> bool:
    """Transformers with sdpa on the longest document, beside fp32 master weights and moments."""
    model = AutoModelForCausalLM.from_config(case.config, dtype=torch.bfloat16).cuda()
    state = torch.empty(sum(p.numel() for p in model.parameters()) * 12, dtype=torch.uint8, device="cuda")
    ids = torch.randint(0, 257, (1, max(case.lengths)), device="cuda")
    try:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    except torch.cuda.OutOfMemoryError:
        return True
    finally:
        del model, state, ids
        torch.cuda.empty_cache()
    return False


def _memory_row(case: str, name: str, run: list[dict]) -> Row:
    ratio = _median(run, "peak_memory_bytes") / _median(run, "predicted_peak_memory_bytes")
    return Row("gpu", case, f"{name} peak memory", ratio, "x", "predicted")


def _median(run: list[dict], key: str) -> float:
    return statistics.median(row[key] for row in run)


def measure(quick: bool) -> list[Row]:
    """All cases on this machine's first GPU."""
    require_gpu()
    device = torch.cuda.get_device_properties(0)
    steps, tokens = (QUICK_STEPS, QUICK_STEP_TOKENS) if quick else (STEPS, STEP_TOKENS)
    lengths = skewed_lengths(tokens * (steps + 2))
    large = large_config(device.total_memory)
    cases = [
        Case(f"{device.name}, 0.5B, skewed lengths", small_config(), lengths, tokens),
        Case(f"{device.name}, 7B widths, {large.num_hidden_layers} layers, skewed lengths", large, lengths, tokens),
    ]
    rows = [row for case in cases for row in compare_strategies(case, steps)]
    return rows + long_document(QUICK_STEPS, LONG_TOKENS // 16 if quick else LONG_TOKENS)


def bench(quick: bool) -> Iterator[Row]:
    """All strategies on both models; the ledger has its rows.

    Raises:
        SystemExit: a case failed; the others have run.
    """
    require_gpu()
    tokens = QUICK_STEP_TOKENS if quick else STEP_TOKENS
    lengths = skewed_lengths(tokens * (BENCH_BATCHES + 1))
    large = large_config(torch.cuda.get_device_properties(0).total_memory)
    failed = []
    for case in (Case("0.5B", small_config(), lengths, tokens), Case("7B widths", large, lengths, tokens)):
        with tempfile.TemporaryDirectory() as folder:
            config = write_run(case, Path(folder), BENCH_BATCHES)
            answer = Path(folder) / "result.json"
            sizes = ("--steps", str(BENCH_BATCHES), "--rounds", "3", "--json", str(answer))
            command = [sys.executable, "-m", "evenload.cli.main", "bench", str(config), "--strategy", BENCHED, *sizes]
            if subprocess.run(command, check=False).returncode:
                failed.append(case.name)
            else:
                append_result(
                    LEDGER, msgspec.json.decode(answer.read_bytes(), type=BenchResult), case.name, commit_name()
                )
    if failed:
        sys.exit(f"evenload bench failed on {', '.join(failed)}")
    yield from ()


def require_gpu() -> None:
    """Stop where there is none."""
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu_training.py needs a GPU: torch.cuda.is_available() is false")


PARTS = {"training": measure, "bench": bench}

if __name__ == "__main__":
    run(PARTS)
