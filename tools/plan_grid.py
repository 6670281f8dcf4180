"""The grid of `compare_plans.py`: calls of `evenload`, and the files that they read.

Every strategy under layouts of dp, cp, pp, tp and virtual stages, tables of very different shape, models with grouped
heads, windows, experts and no causal mask, contexts of 8K to 128K, memory that does not bind, binds and does not
suffice, several steps, layout search, options that only a training configuration reaches, and wrong inputs. Files are
made from fixed seeds.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

STRATEGIES = (
    *("padded", "sequential", "best_fit", "fixed_greedy", "fixed_exact", "balanced", "wlb", "skrull", "slimpack"),
    *("flexpipe", "auto"),
)
SMALL_CLUSTER = """name = "small"
num_nodes = 1
devices_per_node = 8
device = {{ name = "d", peak_flops_per_s = 1e14, memory_bytes = {memory}{host} }}
intra_node = {{ bandwidth_bytes_per_s = 1e10, latency_s = 1e-6 }}
inter_node = {{ bandwidth_bytes_per_s = 1e9, latency_s = 1e-5 }}
"""
HOST_LINK = ", host_link = { bandwidth_bytes_per_s = 2e9, latency_s = 1e-5 }"
MODEL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
MODEL |= {"num_key_value_heads": 4, "vocab_size": 512, "rms_norm_eps": 1e-6, "max_position_embeddings": 65536}
MODEL |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
LLAMA_7B = {"name": "llama-7b", "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 32}
LLAMA_7B |= {"head_dim": 128, "ffn_hidden_size": 11008, "vocab_size": 32000}
COST = {"source": "calibrated", "device": "measured", "peak_flops_per_s": 5e14, "attention_tile": 64}
COST |= {"head_s_per_token": 4e-6, "optimizer_s_per_parameter": 4e-12, "head_pack_s": 1e-4}
COST |= {
    "forward": {"linear_s_per_token": 1.1e-6, "attention_s_per_pair": 5e-11, "slice_s": 1e-5, "pack_s": 2e-4},
    "backward": {"linear_s_per_token": 2.1e-6, "attention_s_per_pair": 1.3e-10, "slice_s": 2e-5, "pack_s": 3e-4},
    "measured_on": {"model": LLAMA_7B, "dp": 1, "cp": 1, "pp": 1, "tp": 1},
}
RUN = """[model]
path = "model"
random_init = true
dtype = "bfloat16"
[data]
sources = ["documents.jsonl"]
tokenizer = "bytes"
max_document_tokens = 16384
batch_documents = 48
overlong = "truncate"
[train]
output_dir = "run"
steps = 2
"""


class Case(NamedTuple):
    """A call of `evenload`.

    Args:
        arguments: of the command line, without output files.
        run: content of run.toml; "" = not read.
    """

    name: str
    arguments: tuple[str, ...]
    run: str = ""


def write_inputs() -> None:
    """All files that cases name, in the working directory."""
    draw = np.random.default_rng(20_240_607)
    longest = 131_072
    tables = {
        "lognormal": draw.lognormal(7.5, 1.4, 4_000).clip(16, longest),
        "bimodal": np.where(draw.random(4_000) < 0.9, draw.normal(1_200, 300, 4_000), draw.normal(30_000, 6_000, 4_000))
        .clip(8, longest),
        "uniform": draw.integers(32, 16_384, 4_000),
        "giant": np.append(draw.integers(256, 2_048, 63), 120_000),  # 64 entries: every batch of 64 holds the giant
        "equal": np.full(256, 2_048),
        "tiny": draw.integers(1, 64, 1_000),
        "window": draw.lognormal(7.5, 1.4, 20_000).clip(16, 32_768),
    }  # fmt: skip
    for name, lengths in tables.items():
        np.save(f"{name}.npy", lengths.astype(np.int64))
    for name, gigabytes, host in (("roomy", 8, HOST_LINK), ("tight", 3, HOST_LINK), ("nolink", 4, ""), ("none", 1, "")):
        Path(f"{name}.toml").write_text(SMALL_CLUSTER.format(memory=f"{gigabytes}_000_000_000", host=host))
    Path("broken.toml").write_text("name = 3\n")
    Path("cost.json").write_text(json.dumps(COST))
    Path("lengths.toml").write_text(RUN)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL))
    counts = draw.lognormal(7.0, 1.2, 96).clip(20, 16_000).astype(int).tolist()
    Path("documents.jsonl").write_text("".join(json.dumps({"text": "x" * count}) + "\n" for count in counts))


def _plan(table: str, model: str, cluster: str, layout: str, context: str, documents: int, more: str = "") -> Case:
    """`evenload plan` with overlong documents cut off unless `more` says otherwise."""
    options = ["--model", model, "--cluster", cluster, "--context", context]
    options += ["--layout", layout] if layout else []
    options += [] if "--tokens" in more else ["--documents", str(documents)]
    options += [] if "--overlong" in more else ["--overlong", "truncate"]
    parts = filter(None, (table, model, cluster, layout, context, str(documents), more))
    return Case("plan " + " ".join(parts), ("plan", f"{table}.npy", *options, *more.split()))


def grid() -> Iterator[Case]:
    """Every case; names are unique."""
    settings = (
        ("lognormal", "llama-7b", "h100x32", "dp=8,pp=4", "32k", 192),
        ("lognormal", "llama-13b", "h100x32", "dp=2,pp=4,tp=4", "128k", 64),
        ("lognormal", "llama-7b", "h100x16", "dp=2,cp=4,pp=2", "64k", 64),
        ("lognormal", "llama3-8b", "h200x16", "dp=4,pp=4,virtual=2", "16k", 96),
        ("bimodal", "llama-7b", "h100x16", "dp=4,pp=4", "64k", 64),
        ("bimodal", "qwen2.5-7b", "a100x16", "dp=4,cp=2,pp=2,virtual=2", "32k", 64),
        ("bimodal", "qwen3-30b-a3b", "b200x16", "dp=2,pp=8", "64k", 64),
        ("uniform", "gpt-13b", "a100x16", "dp=2,pp=4,tp=2", "16k", 64),
        ("uniform", "wlb-550m", "a100-40x8", "dp=8", "8k", 96),
        ("uniform", "llama-7b", "h100x8", "dp=2,cp=4", "16k", 48),
        ("giant", "llama-7b", "h100x32", "dp=8,pp=4", "128k", 64),
        ("giant", "llama-13b", "h200x16", "dp=4,cp=4", "128k", 64),
        ("giant", "llama3.2-1b", "h100x8", "dp=4,pp=2", "128k", 64),
        ("equal", "gemma3-4b", "h100x16", "dp=4,pp=4", "8k", 64),
        ("tiny", "qwen2.5-0.5b", "a100x8", "dp=2,pp=4", "8k", 200),
        ("lognormal", "bert-340m", "a100x8", "dp=4,pp=2", "8k", 64),
    )
    for setting in settings:
        yield _plan(*setting)
    yield _plan("window", "llama-7b", "h100x32", "dp=8,pp=4", "32k", 512)
    yield _plan("window", "llama-7b", "b200x32", "dp=8,pp=4", "32k", 2048, "--strategy slimpack,auto,wlb,best_fit")
    for name in STRATEGIES:
        yield _plan("lognormal", "llama-7b", "h100x8", "dp=4,cp=2", "16k", 24, f"--strategy {name} --seed 3")
        yield _plan("uniform", "llama-7b", "h100x8", "dp=2,pp=4", "32k", 24, f"--strategy {name} --seed 4")
    some = "--strategy best_fit,balanced,slimpack,auto"
    for policy in ("choose", "replay", "recompute", "offload"):
        yield _plan("lognormal", "llama-7b", "a100-40x16", "dp=2,pp=4,tp=2", "32k", 64, f"{some} --policy {policy}")
        yield _plan("giant", "llama-7b", "h100x8", "dp=2,pp=2,tp=2", "128k", 64, f"{some} --policy {policy}")
    for cluster in ("roomy", "tight", "nolink", "none"):
        yield _plan("lognormal", "qwen3-0.6b", f"{cluster}.toml", "dp=2,pp=4", "16k", 32)
        yield _plan("bimodal", "qwen3-0.6b", f"{cluster}.toml", "dp=2,cp=2,pp=2", "32k", 32, some)
    for merge in ("--dp-merge", "--no-dp-merge"):
        for table, layout in (("giant", "dp=16,tp=2"), ("lognormal", "dp=16,pp=2"), ("giant", "dp=8,cp=2,pp=2")):
            yield _plan(table, "llama-7b", "h100x32", layout, "128k", 64, f"--strategy slimpack,auto {merge}")
    yield from _over_steps()
    for overlong in ("error", "split", "truncate", "drop"):
        more = f"--strategy best_fit,sequential,wlb,slimpack --steps 2 --overlong {overlong}"
        yield _plan("bimodal", "llama-7b", "h100x8", "dp=2,pp=4", "16k", 48, more)
    yield _plan("lognormal", "llama-7b", "h100x16", "dp=4,pp=4", "32k", 0, "--tokens 256k --steps 2")
    for strategy in ("auto", "slimpack", "best_fit", "skrull"):
        yield _plan("lognormal", "llama3.2-1b", "h100x8", "", "32k", 32, f"--search-layout --strategy {strategy}")
    yield _plan("giant", "llama-7b", "h100x16", "", "128k", 64, "--search-layout --strategy best_fit,slimpack")
    yield _plan("lognormal", "llama-70b", "h100x64", "", "16k", 64, "--search-layout --strategy balanced --steps 2")
    for model, cluster in (("llama-7b", "h100x16"), ("qwen2.5-7b", "a100x8"), ("mixtral-8x7b", "h200x32")):
        yield _plan("lognormal", model, cluster, "", "16k", 64, some)
    for layout in ("dp=2,pp=4", "dp=2,cp=2,tp=2", "pp=2"):
        yield _plan("lognormal", "llama-7b", "h100x8", layout, "16k", 48, f"{some} --cost cost.json")
    yield from _configured()
    yield from _refused()
    for table in ("lognormal", "bimodal", "uniform", "giant", "tiny"):
        yield Case(f"lengths {table}", ("lengths", f"{table}.npy", "--window", "4k", "--window", "32k"))
    yield Case("lengths of a run", ("lengths", "lengths.toml"))
    yield from _drawn(48)


def _drawn(count: int) -> Iterator[Case]:
    """Combinations that nobody chose."""
    draw = np.random.default_rng(7)
    tables, contexts = ("lognormal", "bimodal", "uniform", "giant"), ("8k", "16k", "32k", "64k", "128k")
    models = (
        "llama-7b",
        "llama-13b",
        "llama3-8b",
        "qwen2.5-7b",
        "qwen3-8b",
        "gemma3-12b",
        "gpt-3.35b",
        "qwen3-30b-a3b",
    )
    layouts = ("dp=16", "dp=8,pp=2", "dp=4,pp=4", "dp=2,pp=8", "dp=4,cp=4", "dp=4,cp=2,pp=2", "dp=2,pp=4,tp=2")
    layouts += ("dp=4,pp=2,tp=2", "dp=4,pp=2,virtual=2,tp=2", "dp=4,pp=4,virtual=2", "dp=2,cp=2,pp=2,tp=2", "cp=4,pp=4")
    clusters, names = ("h100x16", "a100x16", "h200x16"), ("slimpack", "auto", "wlb", "balanced", "sequential")
    for seed in range(count):
        table, model, cluster, layout, context = map(
            str, map(draw.choice, (tables, models, clusters, layouts, contexts))
        )
        strategies = ",".join(sorted(map(str, draw.choice(names, 3, replace=False))))
        more = f"--strategy {strategies} --steps {draw.integers(1, 4)} --seed {seed}"
        yield _plan(table, model, cluster, layout, context, int(draw.integers(20, 80)), more)


def _over_steps() -> Iterator[Case]:
    """What is put off, and layouts that change, over several steps."""
    for table, layout, context in (("lognormal", "dp=4,pp=4", "32k"), ("bimodal", "dp=2,cp=2,pp=4", "64k")):
        for more in (
            "--strategy wlb --steps 8",
            "--strategy wlb --steps 6 --max-delay-steps 2",
            "--strategy fixed_greedy --steps 6 --window 3",
            "--strategy fixed_greedy,wlb --steps 6 --window 4 --max-delay-steps 1",
            "--strategy flexpipe --steps 4",
            "--strategy flexpipe --steps 4 --known-steps 3",
            "--strategy slimpack,auto --steps 3 --seed 7",
        ):
            yield _plan(table, "llama-7b", "h100x16", layout, context, 64, more)
    for table, layout, context, documents in (
        *(("lognormal", "dp=4,pp=4", "32k", 256), ("bimodal", "dp=4,pp=4", "64k", 192)),
        *(("lognormal", "dp=2,pp=4", "128k", 384), ("uniform", "dp=2,pp=2", "16k", 128)),
    ):
        yield _plan(table, "llama-7b", "h200x16", layout, context, documents, "--strategy wlb --steps 10 --seed 2")
    yield _plan("uniform", "wlb-550m", "h100x8", "dp=2,pp=2", "16k", 8, "--strategy fixed_exact --steps 3 --window 2")
    for cluster in ("roomy", "tight"):
        yield _plan("bimodal", "qwen3-0.6b", f"{cluster}.toml", "dp=2,pp=4", "32k", 16, "--strategy flexpipe --steps 5")
        yield _plan("uniform", "qwen3-0.6b", f"{cluster}.toml", "dp=2,pp=4", "8k", 16, "--strategy flexpipe --steps 5")


def _configured() -> Iterator[Case]:
    """Options that only a training configuration reaches."""
    every = "best_fit,balanced,wlb,slimpack,auto"
    for how in ("per_sequence", "per_document", "adaptive", "mixed"):
        for layout in ("dp=2\ncp=4", "dp=2\ncp=2\npp=2"):
            extra = f'[parallel]\n{layout}\n[plan.options]\ncp_sharding = "{how}"'
            yield _run_case(extra, "--strategy best_fit,balanced,slimpack,auto --steps 2")
    # Cases are named without the tables, and schedules as they were called, so that older trees have the same names.
    options = (
        *("max_pack_tokens = 20000", "micro_batches = 6", "min_slice_tokens = 512", "candidates = 1"),
        *('[plan.options.wlb]\nrelease = "queues"', '[plan.options.wlb]\nrelease = "queues"\noutlier_queues = 3'),
        '[plan.options.wlb]\nrelease = "queues"\noutlier_lengths = [2000, 8000]',
        *("[plan.options.slimpack]\nmax_imbalance = 1.0", "[plan.options.slimpack]\nmax_imbalance = 3.0"),
        *("[plan.options.auto]\nmax_candidates = 8", "[plan.options.auto]\nsplit_backward = false"),
        *('[plan.options.slimpack]\ncuts = "asymmetric"', '[plan.options.slimpack]\ncuts = "symmetric"'),
        *('schedule = "static"', 'schedule = "list"'),
    )
    for option in options:
        yield _run_case(f"[parallel]\ndp=2\npp=4\n[plan.options]\n{option}", f"--strategy {every} --steps 4")
    for option in ("dp_merge_threshold = 0.1", "dp_merge_threshold = 2.0", "dp_merge = false", "dp_merge = true"):
        yield _run_case(f"[parallel]\ndp=8\n[plan.options]\n{option}", "--strategy slimpack,auto --steps 2")
    yield _run_case('[parallel]\ndp=2\ncp=4\ncp_exchange="ring"', "--strategy skrull,slimpack,auto --steps 2")
    yield _run_case("[parallel]\ndp=2\npp=2\nvirtual=2\nstage_layers=[1,3,3,1]", f"--strategy {every}")
    for memory_bytes in (600_000_000, 900_000_000, 1_500_000_000):
        yield _run_case(f"[parallel]\npp=4\n[plan]\nmemory_bytes={memory_bytes}", f"--strategy {every}")
    yield _run_case("[model.lora]\nrank=8\n[parallel]\ndp=2\npp=4", f"--strategy {every}")
    yield _run_case('[plan]\nstrategy="auto"\n[parallel]\ndp=2\npp=4', "--layout dp=4,tp=2 --tokens 64k --context 8k")


def _run_case(extra: str, options: str) -> Case:
    arguments = ("plan", "run.toml", "--cluster", "h100x8", *options.split())
    named = re.sub(r"\[plan\.options\.\w+\]", "", extra).replace('"static"', '"word"')
    return Case(f"run {' '.join(named.split())} {options}", arguments, RUN + extra + "\n")


def _refused() -> Iterator[Case]:
    """Wrong inputs and what cannot be planned."""
    usual = ("lognormal", "llama-7b", "h100x8", "dp=2,pp=4", "32k", 16)
    for more in (
        *("--strategy slimpak", "--strategy ,", "--seed -1", "--steps 0", "--tokens 1.3", "--window 0"),
        *("--max-delay-steps 0", "--policy keep", "--search-layout", "--known-steps 0", "--overlong error"),
        *("--cost none.json", "--cost model"),
    ):
        yield _plan(*usual, more)
    for layout in ("dp=16", "dp=3,pp=4", "pp=64", "dp=2,dp=4", "depth=4", "dp=2,tp=3", "pp=4,virtual=32", "cp=3"):
        yield _plan(*usual[:3], layout, *usual[4:])
    yield _plan("lognormal", "llama-7c", "h100x8", "", "32k", 16)
    for cluster in ("h10x8", "h100x12", "broken.toml"):
        yield _plan("lognormal", "llama-7b", cluster, "", "32k", 16)
    yield _plan("lognormal", "llama3.1-405b", "a100-40x8", "", "32k", 16)
    yield _plan("lognormal", "llama-70b", "h100x8", "dp=8", "32k", 16)
    yield _plan("lognormal", "llama-13b", "a100-40x8", "dp=4,pp=2", "32k", 16, "--strategy best_fit")
    yield _plan("missing", *usual[1:])
    yield _run_case('[plan.options]\n[plan.options.slimpack]\ncuts = "crooked"', "")
    yield _run_case("[plan.options]\nmin_slice = 3", "")
