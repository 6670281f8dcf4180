"""Check keys and choices of a configuration file before it is read (`require_known`), apply what a command line sets in
it (`apply_override`), and read `[plan.options]` (`plan_options`), whose tables packages add to when a program runs."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from evenload.errors import ConfigError, did_you_mean, nearest_name
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.registry import option_tables

Table = TypeVar("Table", bound=msgspec.Struct)
_PLAN_PREFIX = "plan.options."

_NAMES_ELSEWHERE = {
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr",
    "optimizer.final_ratio": "min_lr min_lr_ratio min_lr_rate lr_min_ratio",
    "optimizer.decay": "lr_scheduler lr_scheduler_type lr_decay_style scheduler lr_schedule",
    "optimizer.decay_steps": "num_decay_steps lr_decay_steps lr_wsd_decay_iters",
    "optimizer.warmup_steps": "warmup num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_ratio",
    "optimizer.beta1": "adam_beta1 betas",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "epsilon adam_epsilon adam_eps",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_norm": "gradient_clipping clip_grad grad_clip gradient_clip_val clip_grad_norm max_grad_norm "
    "max_norm",
    "data.batch_documents": "batch_size global_batch_size train_batch_size per_device_train_batch_size "
    "micro_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps",
    "data.batch_tokens": "tokens_per_batch global_batch_tokens",
    "data.max_document_tokens": "max_seq_length max_seq_len seq_length seq_len sequence_length sequence_len max_length "
    "context context_length context_window block_size cutoff_len model_max_length",
    "data.epochs": "num_train_epochs num_epochs n_epochs max_epochs",
    "data.sources": "dataset datasets dataset_path dataset_name data_path data_dir train_file train_files files",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "data.streams": "lanes",
    "data.text_column": "text_field dataset_text_field text_key",
    "data.workers": "num_workers dataloader_num_workers num_proc",
    "data.shuffle_window": "shuffle shuffle_buffer shuffle_buffer_size buffer_size",
    "data.prefetch_steps": "prefetch_factor dataloader_prefetch_factor",
    "model.path": "model_name_or_path model_name name_or_path pretrained_model_name_or_path base_model model_path",
    "model.dtype": "bf16 fp16 fp32 torch_dtype precision mixed_precision mixed_precision_param",
    "model.lora.rank": "r lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.target_modules": "lora_target_modules",
    "parallel.dp": "data_parallel data_parallel_size dp_size data_parallel_replicate_degree",
    "parallel.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size "
    "pipeline_parallel_degree pp_size",
    "parallel.cp": "context_parallel context_parallel_size context_parallel_degree cp_size",
    "parallel.tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size",
    "parallel.virtual": "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage",
    "plan.strategy": "packing sample_packing",
    "plan.options.policy": "gradient_checkpointing activation_checkpointing recompute recompute_granularity",
    "train.steps": "max_steps num_steps train_steps total_steps training_steps train_iters iterations",
    "train.output_dir": "output output_path out_dir save_dir save dump_folder",
    "train.checkpoint_every_steps": "save_steps save_interval save_every checkpoint_interval",
    "validation.every_steps": "eval_steps eval_interval eval_every val_check_interval",
    "train.keep_checkpoints": "save_total_limit keep_latest_k",
    "train.resume": "resume_from_checkpoint resume_from",
    "train.attention": "attn_implementation attn_impl",
    "train.kernels": "use_liger_kernel use_liger liger",
}
OTHER_NAMES: dict[str, str] = {name: ours for ours, names in _NAMES_ELSEWHERE.items() for name in names.split()}
"""Names of settings in other trainers, which no spelling distance finds, → ours with its section."""

_GONE = {
    "optimizer.decay_share": "optimizer.decay_steps says in how many steps wsd decays",
    "optimizer.schedule": "optimizer.decay names the schedules there are",
    "plan.feedback": "plans do not follow the speed of single ranks",
    "train.overlap_context": "keys and values of shared documents travel at once, behind attention of local ones",
    "train.overlap_tensor": "packs are not computed in halves; tensor-parallel linears hide their own transfers",
    "plan.options.backend": "the compiled core alone plans",
    "train.on_lost_rank": "torchrun with --max-restarts starts the ranks that are left, in a layout that fits them",
    "train.replace_lost_ranks": "torchrun's agents start processes again (--max-restarts)",
    "train.survivor_memory": "a run goes on from its last checkpoint",
    "train.fused_elementwise": "train.kernels says what computes rotary embedding and gated activation",
    "log.profile_steps": "a callback can run torch's profiler (docs/howto/python.md)",
    "samples": "the exported model writes text, in any program that loads it",
    "train.fused_norms": "train.kernels says what computes norms",
}
"""Keys of earlier versions, and why they went."""

_OTHER_VALUES = dict.fromkeys(("bf16", "fp16", "float16", "half"), "bfloat16") | {
    "fp32": "float32", "float": "float32", "fp64": "float64", "double": "float64", "gpu": "cuda",
}  # fmt: skip
"""Values in other trainers → the nearest of ours, where spelling does not show it."""


def require_known(
    tree: Mapping[str, Any], kind: type[msgspec.Struct], prefix: str = "", every: Sequence[str] | None = None
) -> None:
    """Check the keys of a table, its values with fixed choices, and all tables inside it. `ConfigError` names what an
    unknown key or choice probably means, among `every` setting of the file (default: of `kind`); `prefix` is of keys,
    such as "data."."""
    hints, every = settings_of(kind), every or list(setting_paths(kind, prefix))
    for key, value in tree.items():
        if f"{prefix}{key}" in _GONE:
            raise ConfigError(f"configuration key '{prefix}{key}' is gone: {_GONE[prefix + key]}; remove it")
        if key not in hints:
            raise ConfigError(f"unknown configuration key '{prefix}{key}'; {_meant(key, prefix, hints, every)}")
        choices = _choices(hints[key])
        if choices and isinstance(value, str) and value not in choices:
            other = _OTHER_VALUES.get(value.lower())
            hint = f"did you mean '{other}'? " if other in choices else did_you_mean(value, choices)
            raise ConfigError(f"{prefix}{key} is '{value}'; {hint}choices: {', '.join(choices)}")
        table = _table_of(hints[key])
        if table is None:
            continue
        tables = {f"{prefix}{key}.": value}
        if isinstance(value, list):  # an array of tables
            tables = {f"{prefix}{key}[{index}].": one for index, one in enumerate(value)}
        for inner_prefix, inner in tables.items():
            if isinstance(inner, dict):
                require_known(inner, table, inner_prefix, every)


def settings_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return a table's keys and types, its own first; `plan.options` has a table per strategy with options."""
    hints = get_type_hints(kind)
    hints = {name: hints[name] for name in (*kind.__annotations__, *hints)}
    if kind is PlanOptions:
        del hints["strategies"]
        hints |= option_tables()
    return hints


_KINDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list",
    "object": "a table", "null": "left out",
}  # fmt: skip
"""msgspec's names of types → their names in TOML."""


def converted(tree: Mapping[str, Any], kind: type[Table], prefix: str = "", needed: str = "") -> Table:
    """Convert a table to its struct; `ConfigError` for a value of another type, or one that the struct refuses. The
    error about a missing key ends with `needed`, which lists all that must be there."""
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from error
        # "Expected `array`, got `str` - at `$.data.sources`": the key first.
        what, _, where = str(error).partition(" - at `$.")
        key = f"{prefix}{where.rstrip('`')}".rstrip(".")
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
            key = f"{key}.{missing[1]}" if key else missing[1]
            raise ConfigError(f"configuration key '{key}' is missing{needed and f'; {needed}'}") from error
        match = re.fullmatch(r"Expected `([a-z |]+)`, got `([a-z]+)`", what)
        if match and {*(kinds := match[1].split(" | ")), match[2]} <= set(_KINDS):
            what = f"must be {' or '.join(_KINDS[one] for one in kinds)}, is {_KINDS[match[2]]}"
        else:
            what = f"is wrong: {what}"
        raise ConfigError(f"configuration key '{key}' {what}" if key else f"configuration: {what}") from error


def apply_override(tree: dict[str, Any], override: str, every: Sequence[str] = ()) -> None:
    """Set `section.key=value` in place; the value is read as TOML, else as a string. `ConfigError` for another form; a
    key without section gets one of `every` setting suggested."""
    name, equals, text = override.partition("=")
    *sections, key = name.strip().split(".")
    if not equals or not sections or not key:
        alone = [one for one in every if one.rpartition(".")[2] == name.strip()]
        meant = alone[0] if alone else OTHER_NAMES.get(name.strip())
        example = f"{meant}={text}" if equals and meant else "train.steps=20"
        raise ConfigError(f"override '{override}' is not of the form section.key=value, such as {example}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # so that quotes need no shell escaping
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override '{override}': '{section}' is a value, not a section")
    node[key] = value


def plan_options(tree: Mapping[str, Any]) -> PlanOptions:
    """Read `{"candidates": 3, "wlb": {"release": "queues"}}`. `ConfigError` for an unknown key or a bad value."""
    require_known(tree, PlanOptions, _PLAN_PREFIX)
    own = option_tables()
    shared = {key: value for key, value in tree.items() if key not in own}
    tables = tuple(converted(tree[name], kind, f"{_PLAN_PREFIX}{name}.") for name, kind in own.items() if name in tree)
    return msgspec.structs.replace(converted(shared, PlanOptions, _PLAN_PREFIX), strategies=tables)


def set_options(settings: Iterable[str]) -> list[str]:
    """Return `--set wlb.release=queues` as an override of a training configuration."""
    return [f"{_PLAN_PREFIX}{setting}" for setting in settings]


def options_of_settings(settings: Iterable[str]) -> PlanOptions:
    """Read options of `--set` alone; errors as of `plan_options`."""
    tree: dict[str, Any] = {"plan": {"options": {}}}
    for override in set_options(settings):
        apply_override(tree, override)
    return plan_options(tree["plan"]["options"])


def setting_paths(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield every setting of a struct and of the tables inside it, with its section: "optimizer.learning_rate"."""
    for key, hint in settings_of(kind).items():
        table = _table_of(hint)
        if table is None:
            yield f"{prefix}{key}"
        else:
            yield from setting_paths(table, f"{prefix}{key}.")


def _meant(key: str, prefix: str, known: Mapping[str, Any], every: Sequence[str]) -> str:
    in_other_section = (path for path in every if path.rpartition(".")[2] == key)
    meant = OTHER_NAMES.get(key.lower()) or next(in_other_section, None)
    # Of many keys one that is only half alike is seldom what was meant.
    if meant is None and (near := nearest_name(key, known, 0.6)):
        meant = f"{prefix}{near}"
    return f"did you mean '{meant}'?" if meant else f"known: {', '.join(sorted(known))}"


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the fixed choices of a key; none where it also accepts other text."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    kinds = get_args(hint)  # `Literal[...] | None`
    if str in kinds or get_origin(hint) in (tuple, dict):
        return ()
    return tuple(choice for one in kinds for choice in _choices(one))


def _table_of(hint: Any) -> type[msgspec.Struct] | None:
    """Return the struct of a key that is a table, a table or nothing, or an array of tables."""
    kinds = (one for one in (hint, *get_args(hint)) if isinstance(one, type))
    return next((one for one in kinds if issubclass(one, msgspec.Struct)), None)
