"""`evenload init`: a commented configuration for a model, data and a number of GPUs, in the layout that `evenload plan`
takes without `--layout`. Needs no torch for models that are built in."""

import json
import shlex
import sys
import tomllib
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from evenload.cli.options import command_of, option, parse_tokens, print_lines, require_writable, write_output
from evenload.cli.plan_inputs import gpus_here, plan_inputs
from evenload.cli.plan_layout import layout_of_plan
from evenload.cli.plan_request import LengthSource, PlanRequest
from evenload.config.tokenizer import with_default_tokenizer, with_found_kinds
from evenload.config.train_config import PlanConfig, read_train_config
from evenload.data.chat_encoding import CHATML
from evenload.data.config import DataConfig, RecordKind
from evenload.data.hub import context_limit, is_hub_name, model_from
from evenload.data.lengths import LengthTable, count_documents, with_counted_chats
from evenload.errors import ConfigError
from evenload.types.cluster import DEVICES_PER_NODE, cluster_from
from evenload.types.model import MODELS, ModelSpec
from evenload.types.text import counted, format_bytes

# ruff: noqa: RUF009  (`option` makes a field, whose default is no call)
TOKENS_OF_PROCESS, STEPS_OF_EPOCH = 32_768, 20  # of a global batch, which is less where an epoch had fewer steps


@dataclass(frozen=True, kw_only=True)
class InitRequest:
    """What a configuration is written for."""

    model: str = option(None, "As of evenload plan; with its weights: Qwen/Qwen3-8B, or a folder.", default=MISSING)
    data: list[str] | None = option(None, "Documents: a file, folder, glob or URL; repeat for several.")
    text_column: str | None = option(None, "Key or column of the text, where it is not 'text'.")
    record: RecordKind | None = option(None, "What a record of the documents holds (data.record). Default: auto.")
    group_by: str | None = option(None, "Key or column: equal records in a row share prefixes (data.group_by).")
    gpus: str | None = option(None, "How many, or which: a100x8. Default: this machine's; 0 = a CPU.", metavar="N")
    lora: bool = option(None, "Train LoRA adapters, not all weights.", "--lora", default=False)
    context: str | None = option(
        None, "Longest document trained whole; default: the data's or the model's.", metavar="32k"
    )
    out: Path = option(None, "File to write.", default=Path("config.toml"))


def run_init(request: InitRequest) -> None:
    """Write a commented configuration for your model, data and GPUs.

    Counts the tokens of the documents, and chooses layout, context and batch; the file says why. Settings that are
    often changed stand there as comments, with their defaults.

    [bold]Example[/bold]: evenload init --model Qwen/Qwen3-8B --data chats.jsonl --gpus 8

    Exit code: 0 ok, 2 wrong input, 3 the GPUs do not hold the model and its batch.
    """
    out, name = request.out, request.model
    if out.exists() or out.suffix != ".toml":
        raise ConfigError(f"--out is {out}; name a file that does not exist yet and ends with .toml")
    require_writable(out)
    own = name.partition("@")[0].rpartition("/")[2].lower()
    shape = own if is_hub_name(name) and own in MODELS else name
    limit, table = context_limit(shape) or sys.maxsize, None
    if request.data:
        sources, column = tuple(request.data), request.text_column or "text"
        data = DataConfig(
            sources=sources,
            batch_tokens=1,
            max_document_tokens=sys.maxsize,
            text_column=column,
            group_by=request.group_by,
            record=request.record or "auto",
        )
        data = with_counted_chats(with_found_kinds(with_default_tokenizer(data, name), name))
        table = count_documents(data, ", ".join(request.data))
    lengths = table.lengths if table else np.array([sys.maxsize])
    context, why = min((limit, "the model's limit"), (int(lengths.max()), "the longest document"))
    if request.context is not None:
        context, why = parse_tokens("--context", request.context), "as --context says"
    if context == sys.maxsize:
        raise ConfigError(f"the longest document that {name} was made for is not known; give --data, or --context 32k")
    why += f"; the model's limit is {limit:,}" if limit < context else ""
    sequences, largest = (table.sequence_lengths, int(lengths.max())) if table and table.trees else (lengths, 0)
    if table and (longer := int((sequences > context).sum())):
        why += f"; {longer:,} of {counted(len(sequences), 'document')} are longer"
    cluster = _cluster_of(request.gpus)
    devices = cluster_from(cluster).num_devices if cluster else 0
    most = int(lengths.sum()) // STEPS_OF_EPOCH // 1024 * 1024
    each, batch = TOKENS_OF_PROCESS, max(context, largest, min(TOKENS_OF_PROCESS * max(1, devices), most))
    size = f"{batch}  # of a step, over all processes: {each:,} for each, but at least {STEPS_OF_EPOCH} steps an epoch"
    limits = f"{context}  # {why}"
    if largest > context:
        limits += f"\nmax_tree_tokens = {largest}  # the unique tokens of the largest tree of shared prefixes"
    text = _text(request, model_from(shape), table, limits, size, on_gpus=devices > 0)
    if cluster:
        text = text.replace("dp = 1  # processes", _parallel(text, shape, cluster, table))
    rows = (line.partition("  # ") for line in text.replace("\n[", "\n\n[").splitlines())
    write_output(out, "".join(f"{one:<40}  # {why}\n" if why else f"{one}\n" for one, _, why in rows).encode())
    commands = [f"evenload plan {shlex.quote(str(out))} --cluster {cluster}"] if cluster else []
    start = f"evenload train {shlex.quote(str(out))}"
    if devices > DEVICES_PER_NODE:
        nodes = f"--nnodes {devices // DEVICES_PER_NODE} --nproc-per-node {DEVICES_PER_NODE}"
        start = f"torchrun {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m evenload.cli.main{start[8:]}"
    unit = table.unit if table else "tokens"
    chosen = f"{cluster or 'this CPU'}, context {context:,} {unit}, {batch:,} a step"
    weights = "Warning: random weights; trained ones: --model with a folder, or a name on the Hub such as Qwen/Qwen3-8B"
    said = [weights] if "random_init = true" in text else []
    said += ["Warning: without a tokeniser it trains bytes, and its context counts them"] if unit == "bytes" else []
    said += ["Warning: several GPUs have never trained together yet (docs/limits.md)"] if devices > 1 else []
    then = "look at it, then:" if request.data else "name your documents in it (data.sources), then:"
    print_lines(Console(), f"wrote {out}, for {chosen}", *said, then, *commands, start)


def _cluster_of(gpus: str | None) -> str | None:
    """Return the cluster's name; of a mere number of GPUs it is of this machine's kind, or H100. None = a CPU."""
    if gpus is not None and (gpus == "0" or not gpus.isdigit()):
        return None if gpus == "0" else gpus
    here = gpus_here()
    kind, _, count = (here.name if here else "h100x0").rpartition("x")
    return f"{kind}x{gpus or count}" if gpus or here else None


def _text(
    request: InitRequest, model: ModelSpec, table: LengthTable | None, context: str, batch: str, *, on_gpus: bool
) -> str:
    has_weights = is_hub_name(request.model) or any(Path(request.model).glob("*.safetensors"))
    rate = "1e-5  # usual for all weights of a trained model" if has_weights else "3e-4  # usual for new weights"
    experts = "\nrouter_aux_loss_coef = 0.0  # of the loss that balances experts, often 0.001; 0 = none"
    lora = "\n[model.lora]\nrank = 16\nalpha = 32.0  # adapters count alpha / rank"
    records = table.records if table else ""
    template = f'chat_template = "{CHATML}"  # a plain one, as bytes have none\n' if CHATML in records else ""
    template += f"text_column = {json.dumps(request.text_column)}\n" if request.text_column else ""
    template += f"record = {json.dumps(request.record)}\n" if request.record else ""
    template += f"group_by = {json.dumps(request.group_by)}\n" if request.group_by else ""
    overlong = '"split"  # a longer document becomes several; "truncate" and "drop" lose tokens'
    if any(kind in records for kind in ("messages", "conversations", "instruction")):
        overlong = '"drop"  # a chat that is cut would end in the middle of an answer'
    return f"""\
# Lines that begin with a setting are chosen, those with # are defaults. Every setting: docs/configuration.md
[model]
path = {json.dumps(request.model)}
random_init = {json.dumps(not has_weights)}  # true: random weights; a folder or a name on the Hub has trained ones
dtype = {'"bfloat16"  # the optimizer keeps float32' if on_gpus else '"float32"'}{experts * bool(model.num_experts)}\
{lora * request.lora}
[data]
sources = {json.dumps(request.data or ["data.jsonl"])}  # files, folders, globs or URLs
{"" if table and table.unit == "bytes" else "# "}tokenizer = "bytes"  # or a tokenizer.json; unset = the model's
{template}max_document_tokens = {context}
overlong = {overlong}
batch_tokens = {batch}
epochs = 1  # passes over the data; or train.steps instead
# loss_on = "auto"  # answers of chats and prompts, all of other texts; or "all"
# shuffle_window = 1024  # documents held to draw from; 1 keeps the order of the files
[parallel]
dp = 1  # processes
[plan]
# strategy = {json.dumps(PlanConfig().strategy)}  # how documents are packed; evenload plan compares all
[optimizer]
learning_rate = {"1e-4  # usual for LoRA" if request.lora else rate}
warmup_steps = 10  # in which the learning rate rises
# decay = "constant"  # "cosine", "linear" and "wsd" need train.steps
# weight_decay = 0.1
[train]
device = {'"cuda"  # a process for every GPU' if on_gpus else '"cpu"'}
output_dir = {json.dumps(f"runs/{request.out.stem}")}  # report, checkpoints, model; the next start goes on from there
# keep_checkpoints = 3  # one is written every 10 minutes, and at the end
[log]
# to = []  # "wandb", "tensorboard"
"""


def _parallel(text: str, shape: str, cluster: str, table: LengthTable | None) -> str:
    """Return the lines of `[parallel]`; `InfeasiblePlanError` where the GPUs do not hold the first batch."""
    run = read_train_config(tomllib.loads(text))
    if table is not None:
        data = with_found_kinds(run.data, run.model.path)
    else:  # documents of the whole context, for which no tokeniser is wanted
        data, context = msgspec.structs.replace(run.data, record="tokens", tokenizer=None), run.data.max_document_tokens
        lengths = np.full(max(1, (run.data.batch_tokens or 0) // context), context)
        table = LengthTable(lengths=lengths, unit="tokens", tokenizer=None)
    source = LengthSource(name="documents", data=data, run=run, table=table)
    inputs = replace(plan_inputs(PlanRequest(cluster=cluster, model=shape), source), layout=None, run_layouts=())
    batches = inputs.batches.sample(table.lengths, steps=1, seed=0, trees=table.trees)
    layout, few = layout_of_plan(inputs, batches, None, is_of_engine=False)
    assert few is not None, "no layout was given"
    used, offered = format_bytes(few.layouts[0].peak_memory_bytes), format_bytes(inputs.memory_cap_bytes)
    lines = [f"# As evenload plan chooses for {cluster}; predicted: at most {used} of the {offered} of a GPU."]
    lines += [f"{axis} = {size}" for axis, size in few.layouts[0].layout.items() if size > 1 or axis == "dp"]
    if len(set(layout.stage_counts)) > 1:
        lines.append(f"stage_layers = {list(layout.stage_counts)}  # of every stage, so that all take as long")
    return "\n".join(lines)


init_command = command_of(InitRequest, run_init)
