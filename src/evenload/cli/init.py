"""`evenload init`: a commented configuration for a model, data and a number of GPUs, in the layout that `evenload plan`
takes without `--layout`. Needs no torch for models that are built in."""

import json
import shlex
import tomllib
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from evenload.cli.options import COUNTS, command_of, option, parse_tokens, print_lines, require_writable, write_output
from evenload.cli.plan_inputs import gpus_here, plan_inputs
from evenload.cli.plan_layout import layout_of_plan, layouts_that_fit, planners_of_layout
from evenload.cli.plan_request import LengthSource, PlanRequest
from evenload.config.tokenizer import with_default_tokenizer
from evenload.config.train_config import PlanConfig, TrainConfig, read_train_config
from evenload.data.config import DataConfig
from evenload.data.hub import is_hub_name, local_path, model_from
from evenload.data.lengths import LengthTable, count_documents
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.explore.evaluate import evaluate_strategies
from evenload.types.cluster import DEVICES_PER_NODE, cluster_from
from evenload.types.model import CONFIGURATIONS, MODELS
from evenload.types.text import format_bytes

# ruff: noqa: RUF009  (`option` makes a field, whose default is no call)
TOKENS_PER_GPU, TOKENS_OF_CPU, STEPS_OF_EPOCH = 32_768, 4_096, 20
"""Of a global batch, which is smaller where an epoch would have fewer steps."""


@dataclass(frozen=True, kw_only=True)
class InitRequest:
    """What a configuration is written for."""

    model: str = option(None, "As of evenload plan; with its weights: Qwen/Qwen3-8B, or a folder.", default=MISSING)
    data: list[str] | None = option(None, "Documents: a file, folder, glob or URL; repeat for several.")
    gpus: str | None = option(None, "How many, or which: a100x8. Default: this machine's; 0 = a CPU.", metavar="N")
    lora: bool = option(None, "Train LoRA adapters, not all weights.", "--lora", default=False)
    context: str | None = option(
        None, f"Longest document trained whole; default: the data's, or the model's limit. {COUNTS}", metavar="TOKENS"
    )
    tokenizer: str | None = option(None, "A tokenizer.json, its folder or a name on the Hub; default: the model's.")
    out: Path = option(None, "File to write.", default=Path("config.toml"))


def run_init(request: InitRequest) -> None:
    """Write a commented configuration for your model, data and GPUs.

    Counts the tokens of the documents, and chooses layout, context and batch; the file says why. Settings that are
    often changed stand there as comments, with their defaults.

    [bold]Example[/bold]: evenload init --model Qwen/Qwen3-8B --data chats.jsonl --gpus 8

    Exit code: 0 ok, 2 wrong input, 3 the GPUs do not hold the model and its batch.
    """
    out = request.out
    if out.exists() or out.suffix != ".toml":
        raise ConfigError(f"--out is {out}; name a file that does not exist yet and ends with .toml")
    require_writable(out)
    cluster, found, table = _cluster_of(request.gpus), _config_of(request.model), None
    if request.data:
        data = DataConfig(sources=tuple(request.data), tokenizer=request.tokenizer, batch_tokens=1, max_document_tokens=1)
        table = count_documents(with_default_tokenizer(data, request.model), ", ".join(request.data))
    context, why = _context(request, found, table)
    devices = cluster_from(cluster).num_devices if cluster else 0
    most = int(table.lengths.sum()) // STEPS_OF_EPOCH // 1024 * 1024 if table else sys.maxsize
    batch = max(context, min(TOKENS_PER_GPU * devices or TOKENS_OF_CPU, most))
    text = _text(request, found, cluster, table, context=f"{context}  # {why}", batch=batch)
    if cluster:
        made_up = LengthTable(lengths=np.full(max(1, batch // context), context), unit="tokens", tokenizer=None)
        parallel = _parallel(text, _shape_of(request.model), cluster, table or made_up, reads_documents=table is not None)
        text = text.replace("dp = 1  # processes", parallel)
    rows = (line.partition("  # ") for line in text.splitlines())
    write_output(out, "".join(f"{one:<40}  # {why}\n" if why else f"{one}\n" for one, _, why in rows).encode())
    commands = [f"evenload plan {shlex.quote(str(out))} --cluster {cluster}"] if cluster else []
    start = f"evenload train {shlex.quote(str(out))}"
    if devices > DEVICES_PER_NODE:
        nodes = f"--nnodes {devices // DEVICES_PER_NODE} --nproc-per-node {DEVICES_PER_NODE}"
        start = f"torchrun {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m evenload.cli.main{start[8:]}"
    print_lines(Console(), f"wrote {out}; look at it, then:", *commands, start)


def _cluster_of(gpus: str | None) -> str | None:
    """Return the cluster's name; of a mere number of GPUs it is of this machine's kind, or H100. None = a CPU."""
    if gpus is not None and (gpus == "0" or not gpus.isdigit()):
        return None if gpus == "0" else gpus
    here = gpus_here()
    kind, _, count = (here.name if here else "h100x0").rpartition("x")
    return f"{kind}x{gpus or count}" if gpus or here else None


def _shape_of(name: str) -> str:
    """Return the name by which a model is planned: of one on the Hub that is built in, the built-in one."""
    own = name.partition("@")[0].rpartition("/")[2].lower()
    return own if is_hub_name(name) and own in MODELS else name


def _config_of(name: str) -> dict[str, Any]:
    """Return a model's config.json; {} of a built-in one on the Hub that cannot be downloaded here."""
    if name in MODELS:
        return CONFIGURATIONS[name]
    model_from(_shape_of(name))  # its errors say what is wrong
    try:
        path = Path(local_path(name, "model"))
    except ConfigError:
        return {}
    tree = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    return tree | tree.get("text_config", {})


def _context(request: InitRequest, found: dict[str, Any], table: LengthTable | None) -> tuple[int, str]:
    """Return the longest document that is trained whole, and why."""
    lengths = table.lengths if table else np.zeros(1, np.int64)
    limit = found.get("max_position_embeddings") or model_from(_shape_of(request.model)).position_rows
    known = [(limit, "what the model was made for"), (int(lengths.max()), "the longest document")]
    if request.context is not None:
        known = [(parse_tokens("--context", request.context), "as --context says")]
    if not (known := [one for one in known if one[0]]):
        raise ConfigError(
            "neither --data, --context nor a config.json here says how long documents are; give --context, such as 32k"
        )
    context, why = min(known)
    why += f"; the model was made for {limit:,}" if limit and limit < context else ""
    longer = int((lengths > context).sum())
    return context, why + (f"; {longer:,} of {counted(len(lengths), 'document')} are longer" if longer else "")


def _text(
    request: InitRequest, found: dict[str, Any], cluster: str | None, table: LengthTable | None, *, context: str, batch: int
) -> str:
    """Return the file for one process."""
    path, optional = Path(request.model), dict.fromkeys(("router", "lora", "tokenizer"), "")
    has_weights = is_hub_name(request.model) or (path.is_dir() and any(path.glob("*.safetensors")))
    rate = ("1e-5  # usual for all weights" if has_weights else "3e-4  # usual for new weights")
    if model_from(_shape_of(request.model)).num_experts and not found.get("output_router_logits"):
        coefficient = found.get("router_aux_loss_coef", 0.0)
        optional["router"] = f"\nrouter_aux_loss_coef = {coefficient}  # of the loss that balances experts; 0 = none"
    if request.lora:
        rate = "1e-4  # usual for LoRA"
        optional["lora"] = "\n\n[model.lora]\nrank = 16\nalpha = 32.0  # adapters count alpha / rank"
    if tokenizer := request.tokenizer or (table and table.unit == "bytes" and "bytes"):
        optional["tokenizer"] = f"\ntokenizer = {json.dumps(tokenizer)}"
    return f"""\
# Lines without # in front are chosen, the others are defaults. docs/configuration.md has every key.

[model]
path = {json.dumps(request.model)}
random_init = {json.dumps(not has_weights)}  # {"from the model's weights" if has_weights else "there are no weights"}
dtype = {'"bfloat16"  # the optimizer keeps float32' if cluster else '"float32"'}{optional['router']}{optional['lora']}

[data]
sources = {json.dumps(request.data or ["data.jsonl"])}  # files, folders, globs or URLs{optional['tokenizer']}
max_document_tokens = {context}
overlong = "split"  # a longer document becomes several; "truncate" and "drop" lose tokens
batch_tokens = {batch}  # of a step, on all processes together
epochs = 1  # passes over the data; or train.steps instead
# loss_on = "auto"  # answers of chats and prompts, all of other texts; or "all"
# shuffle_window = 1024  # documents held to draw from; 1 keeps the order of the files

[parallel]
dp = 1  # processes

[plan]
# strategy = {json.dumps(PlanConfig().strategy)}  # how documents are packed; evenload plan compares all

[optimizer]
learning_rate = {rate}
warmup_steps = 10  # in which the learning rate rises
# decay = "constant"  # "cosine", "linear" and "wsd" need train.steps
# weight_decay = 0.1
# clip_norm = 1.0  # most of the gradient's norm; 0 = no limit

[train]
device = {'"cuda"  # a process for every GPU' if cluster else '"cpu"'}
output_dir = {json.dumps(f"runs/{request.out.stem}")}  # report, checkpoints, model; the next start goes on from there
# keep_checkpoints = 3  # one is written every 10 minutes, and at the end

[log]
# to = []  # "wandb", "tensorboard"
"""


def _parallel(text: str, shape: str, cluster: str, table: LengthTable, *, reads_documents: bool) -> str:
    """Return the lines of `[parallel]`; `InfeasiblePlanError` where the GPUs do not hold the first batch."""
    run = read_train_config(tomllib.loads(text))
    # The tokeniser is wanted where there are documents, and not to plan for lengths that are made up.
    data = run.data if reads_documents else msgspec.structs.replace(run.data, record="tokens", tokenizer=None)
    source = LengthSource(name="documents", data=data, run=run, table=table)
    inputs = replace(plan_inputs(PlanRequest(cluster=cluster, model=shape), source), layout=None, run_layouts=())
    batches, strategy = inputs.batches.sample(table.lengths, steps=1, seed=0), run.plan.strategy
    with suppress(InfeasiblePlanError):  # of weights alone
        layout = layout_of_plan(inputs, batches, (strategy,))
        chosen = evaluate_strategies(planners_of_layout(inputs, layout), batches, (strategy,)).results
    if not chosen[0].feasible:
        chosen = fitting_layouts(inputs, batches, strategy).layouts
    if not chosen:
        raise InfeasiblePlanError()
    used, offered = format_bytes(row.peak_memory_bytes), format_bytes(inputs.memory_cap_bytes)
    lines = [f"# The shallowest that fits {cluster}, as predicted: at most {used} of {offered} on a GPU."]
    lines += [f"{axis} = {size}" for axis, size in row.layout.items() if size > 1 or axis == "dp"]
    if len(set(layout.stage_counts)) > 1:
        lines.append(f"stage_layers = {list(layout.stage_counts)}  # of every stage, so that all take as long")
    return "\n".join(lines)


init_command = command_of(InitRequest, run_init)
