"""Define which documents are read, how they become tokens, and what makes a global batch (`DataConfig`)."""

from typing import Literal, get_args, get_origin

import msgspec
from msgspec.structs import fields

from evenload.data.prefix_tree import TreeLabels
from evenload.errors import ConfigError, did_you_mean
from evenload.types.base import Frozen, PathText, write_out_home

Format = Literal["auto", "text", "jsonl", "json", "parquet", "arrow", "memmap"]
RecordKind = Literal[
    "auto", "text", "messages", "conversations", "instruction", "prompt_completion", "preference", "tokens"
]
LossOn = Literal["auto", "all", "completion"]
Overlong = Literal["error", "split", "truncate", "drop"]
OnCorrupt = Literal["error", "skip"]

_MOST_STREAMS, _STREAM_DOCUMENTS = 16, 4  # of the default number of streams
_NAMED_COLUMNS = ("text_column", "messages_column", "prompt_column", "completion_column", "tokens_column", "group_by")


def require_least(section: str, config: Frozen, what: str, least: float, *fields: str) -> None:
    """Raise `ConfigError` where one of these settings is set and smaller than `least`; `what` says what it must be."""
    for field in fields:
        value = getattr(config, field)
        require_value(section, config, field, value is None or value >= least, what)


def require_value(section: str, config: Frozen, field: str, is_right: bool, what: str) -> None:
    """Raise `ConfigError` where a setting is not right; `what` says what it must be."""
    if not is_right:
        raise ConfigError(f"{section}.{field} is {getattr(config, field)}, must be {what}")


class RecordSettings(Frozen):
    """How some of the data is read: settings as in `DataConfig`, unset = as there."""

    format: Format | None = None
    record: RecordKind | None = None
    include: tuple[str, ...] | None = None
    text_column: str | None = None
    messages_column: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None
    tokens_column: str | None = None
    labels_column: str | None = None
    mask_column: str | None = None
    ignore_columns: tuple[str, ...] | None = None
    document_end_id: int | None = None
    loss_on: LossOn | None = None
    group_by: str | None = None


class MixturePart(RecordSettings):
    """One of several data sets that are read together; further settings as in `DataConfig`, unset = as there.

    Args:
        name: for the ledger and messages.
        weight: its share of the *tokens* while all parts have some left, relative to the other weights.
    """

    name: str
    weight: float
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("data.mixture: a part has no name")
        if not self.weight > 0 or self.weight == float("inf"):
            raise ConfigError(f"data.mixture: weight of '{self.name}' is {self.weight}, must be above 0 and finite")
        if not self.sources or not all(self.sources):
            raise ConfigError(f"data.mixture: sources of '{self.name}' are {list(self.sources)}; name at least one")
        _check_choices(self, f"data.mixture '{self.name}' ")


class DataConfig(Frozen):
    """Data settings of a run.

    All but `epochs`, `workers`, `prefetch_steps` and `stall_timeout_s` decide which tokens a step holds.

    Args:
        sources: files, directories (read recursively and through links, without names that begin with "."), glob
            patterns, or fsspec URLs of any of these. Either `sources` or `mixture` is set.
        mixture: several data sets with weights instead of one.
        mixture_end: "once" reads every part exactly once an epoch (weights hold until a part ends); "repeat" starts an
            ended part again, so that the weights always hold (then `epochs` has no meaning and is not set).
        format: "auto" goes by file name: `.jsonl`/`.ndjson`, `.json` (a list of records, held in memory, or one a
            line), `.parquet`, `.arrow`/`.feather`, `.bin`/`.idx`/`.npy` (token files); tables and archives (`.csv`,
            `.zip`, ...) are refused; anything else is text (one document per file), but not next to data files unless
            `include` names it. A compression suffix that fsspec knows (`.gz`, `.xz`, `.bz2`, ...) may follow; resuming
            inside a compressed file reads it from its beginning.
        record: what a record holds: "text"; "messages" (a chat: role and content, or from and value); "conversations"
            (the same under that key); "instruction" (instruction, input, output); "prompt_completion";
            "preference" (chosen and rejected, prompt: both are trained; never found by "auto"); "tokens" (ids, made by
            another tokeniser). "auto": what the first 100 records of every file, or its columns, show, unless a column
            is named by a setting, which then says what a record is. Where a record holds a list of texts, chats or
            lists of ids, each is a sequence, and what they share is computed once.
        text_column, messages_column, prompt_column, completion_column, tokens_column: names of keys or columns.
        labels_column: of "tokens" records: ids to be predicted, -100 = no loss; "" = "labels" of records that have it,
            else every token after the first.
        mask_column: of "tokens" records: a number a token, 0 = no loss; "" = "completion_mask", "assistant_masks" and
            "loss_mask" of records that have them.
        ignore_columns: keys or columns to skip although by their name they decide what is trained, such as
            "attention_mask" (docs/loader.md lists them).
        document_end_id: of `.npy` token files: the id that ends a document and belongs to it.
        loss_on: "all" tokens after a document's first; only the "completion" (of a chat: what the assistant says);
            "auto" = completion where the record marks it, else all.
        group_by: key or column, such as "prompt_id": records that follow each other in a file and have the same value
            share their prefixes. The same value further on is another group; a file is then read by one stream.
        tree_labels: tokens that sequences of a record or group share are trained as often as they would be without
            sharing ("sum"), or once.
        min_shared_tokens: shorter prefixes are not shared.
        chat_template: file with a Jinja template, or "chatml" for a plain one; default: the tokeniser's own.
        include: file name patterns for directories, such as "*.py"; a pattern with "/" is matched against the path
            below the directory. Empty = every file.
        tokenizer: "bytes", a `tokenizer.json`, its directory, or a name on the Hugging Face Hub. Default: that of the
            model's directory, else bytes if the weights are random or the model's vocabulary is one of bytes.
        eos_token: text of the end-of-document token; default: from the tokeniser file and its directory.
        append_eos: end every text, and every completion that is a string, with the end-of-document token, once.
        prepend_bos: begin every text, and every prompt that is a string, with the token that begins a document, once;
            unset = with what the tokeniser's own post-processor writes there. A chat begins as its template writes it.
        batch_documents, batch_tokens: size of a global batch; exactly one is set. A tree of sequences that share
            prefixes is one document of its unique tokens. A token budget takes documents in stream order until the next
            one would exceed it; a larger document is a batch of its own. The last batch of an epoch may be smaller.
        shuffle_window: documents held to sample from; 1 keeps the order of the files and inside them. With more, the
            order of the parts of files is permuted every epoch too.
        streams: independent streams that the data is read in; ranks and workers share them. Default: 16 (fewer for a
            window below 64, 1 where the order is kept). More pay where more than 16 ranks read.
        seed: of the order of files and documents.
        held_out_share: of the documents, chosen by a hash of source and place, which are not trained and stay for
            validation; in the ledger. `validation.share` sets it.
        reads: "training" reads what is not held out, "held_out" only what is; for loaders of your own.
        epochs: passes over the sources; None = repeat for ever.
        max_document_tokens: longest document that can be trained (the context).
        max_tree_tokens: unique tokens above which a tree of sequences that share prefixes is cut into several; default:
            `max_document_tokens`, which limits each of its sequences.
        overlong: what happens to a longer one: an error naming it, consecutive documents of at most that length, only
            its first tokens, or nothing of it. All of it is in the ledger.
        on_corrupt: stop at a record that cannot be read, or count it in the ledger and go on.
        workers: processes per rank that read and tokenise; 0 = a thread of the training process.
        prefetch_steps: steps that are read, planned and exchanged before they are needed; 0 = none (slow, to compare).
        stall_timeout_s: how long a source may give nothing before the run stops with its name, once the reading
            process has started, for which it has 300 s or, if longer, this long.
    """

    sources: tuple[str, ...] = ()
    mixture: tuple[MixturePart, ...] = ()
    mixture_end: Literal["once", "repeat"] = "once"
    format: Format = "auto"
    record: RecordKind = "auto"
    text_column: str = "text"
    messages_column: str = "messages"
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    tokens_column: str = "input_ids"
    labels_column: str = ""
    mask_column: str = ""
    ignore_columns: tuple[str, ...] = ()
    document_end_id: int | None = None
    loss_on: LossOn = "auto"
    group_by: str | None = None
    tree_labels: TreeLabels = "sum"
    min_shared_tokens: int = 64
    chat_template: PathText | None = None
    include: tuple[str, ...] = ()
    tokenizer: PathText | None = None
    eos_token: str | None = None
    append_eos: bool = True
    prepend_bos: bool | None = None
    batch_documents: int | None = None
    batch_tokens: int | None = None
    shuffle_window: int = 1024
    streams: int | None = None
    seed: int = 0
    held_out_share: float = 0.0
    reads: Literal["training", "held_out"] = "training"
    epochs: int | None = None
    max_document_tokens: int
    max_tree_tokens: int | None = None
    overlong: Overlong = "error"
    on_corrupt: OnCorrupt = "error"
    workers: int = 1
    prefetch_steps: int = 2
    stall_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        write_out_home(self)
        if bool(self.sources) == bool(self.mixture) or not all(self.sources):
            raise ConfigError(
                f"data.sources is {list(self.sources)} and data.mixture has {len(self.mixture)} parts; name at least "
                "one file, directory, glob or URL in exactly one of them"
            )
        names = [part.name for part in self.mixture]
        if len(names) != len(set(names)):
            raise ConfigError(f"data.mixture names are {names}; every part needs a name of its own")
        if (self.batch_documents is None) == (self.batch_tokens is None):
            sizes = f"data.batch_documents is {self.batch_documents} and data.batch_tokens is {self.batch_tokens}"
            raise ConfigError(f"{sizes}; set exactly one of them")
        sizes = ("batch_documents", "batch_tokens", "shuffle_window", "streams", "epochs", "max_document_tokens")
        sizes += ("min_shared_tokens",)
        require_least("data", self, "at least 1", 1, *sizes)
        require_least("data", self, "at least 0", 0, "prefetch_steps")
        require_least("data", self, "0 (a thread) or more", 0, "workers")
        require_value("data", self, "stall_timeout_s", self.stall_timeout_s > 0, "above 0")
        require_value("data", self, "seed", 0 <= self.seed < 2**63, "in 0 .. 2**63 - 1")
        require_value("data", self, "held_out_share", 0 <= self.held_out_share < 1, "at least 0 and below 1")
        if self.reads == "held_out" and not self.held_out_share:
            raise ConfigError('data.reads is "held_out", but data.held_out_share is 0, so nothing is; set a share')
        if self.mixture_end == "repeat" and (not self.mixture or self.epochs is not None):
            given = f"{len(self.mixture)} mixture parts and data.epochs {self.epochs}"
            raise ConfigError(f'data.mixture_end is "repeat" with {given}; it needs a mixture, and train.steps instead')
        if self.streams is not None and self.streams > self.shuffle_window:
            raise ConfigError(
                f"data.streams is {self.streams} with a data.shuffle_window of {self.shuffle_window} documents, of "
                "which every stream holds a share; lower data.streams, or raise the window"
            )
        fits = self.most_tree_tokens >= self.max_document_tokens
        least = f"at least data.max_document_tokens ({self.max_document_tokens}), so that every sequence fits"
        require_value("data", self, "max_tree_tokens", fits, least)
        _check_choices(self, "data.")
        for field in _NAMED_COLUMNS:
            if getattr(self, field) == "":
                raise ConfigError(f"data.{field} is empty; name the key or column, or leave it out")

    @property
    def most_tree_tokens(self) -> int:
        """Return the most unique tokens of a document."""
        return self.max_document_tokens if self.max_tree_tokens is None else self.max_tree_tokens

    @property
    def num_streams(self) -> int:
        """Return the number of streams of every part of the mixture."""
        return self.streams or max(1, min(_MOST_STREAMS, self.shuffle_window // _STREAM_DOCUMENTS))


def reads_token_ids(config: DataConfig) -> bool:
    """Tell whether all records hold token ids, so that no tokeniser is used."""
    return all(part.record == "tokens" for part in mixture_configs(config))


def shares_prefixes(config: DataConfig) -> bool:
    """Tell whether settings make sequences share prefixes; records that hold lists do, too, whatever these are."""
    return any(
        (part.group_by is not None or part.record == "preference")
        and part.min_shared_tokens <= part.max_document_tokens
        for part in mixture_configs(config)
    )


_CHOICES = {one.name: get_args(one.type) for one in fields(DataConfig) if get_origin(one.type) is Literal}


def _check_choices(config: DataConfig | MixturePart, where: str) -> None:
    for field, allowed in _CHOICES.items():
        value = getattr(config, field, None)
        if value is not None and value not in allowed:
            near = did_you_mean(value, allowed)
            raise ConfigError(f"{where}{field} is '{value}'; {near}choices: {', '.join(allowed)}")


def mixture_configs(config: DataConfig) -> tuple[DataConfig, ...]:
    """Return one plain configuration (no mixture) per part; the configuration itself where there is no mixture."""
    configs: list[DataConfig] = []
    for part in config.mixture:
        own = {field: value for field, value in msgspec.structs.asdict(part).items() if value is not None}
        del own["name"], own["weight"]
        configs.append(msgspec.structs.replace(config, **own, mixture=(), mixture_end="once"))
    return tuple(configs) or (config,)
