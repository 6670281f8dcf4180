"""`LoaderSettings`: keyword arguments of `PackedLoader` besides those it names itself, typed for editors and checkers.

They are the fields of `LoaderOptions` and of `DataConfig`, which say what each means, check the values and refuse what
they do not know; a test compares names and types with both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from evenload.cost.coefficients import CostCoefficients
from evenload.data.config import LossOn, MixtureEnd, OnCorrupt, Overlong, Reads, RecordKind


class LoaderSettings(TypedDict, total=False):
    """Of `LoaderOptions` down to `peer_timeout_s`, then of `DataConfig`; what is left out has the default there."""

    micro_batches: int | None
    equal_micro_batches: bool | None
    pack_multiple: int
    sequence_ranks: int
    fixed_shapes: bool
    engine: str | None
    costs: CostCoefficients | str | Path | None
    plan_options: dict[str, Any] | None
    accept_slices: bool
    rank: int | None
    world_size: int | None
    group: Any
    peer_timeout_s: float

    mixture_end: MixtureEnd
    record: RecordKind
    text_column: str
    messages_column: str
    prompt_column: str
    completion_column: str
    tokens_column: str
    labels_column: str
    mask_column: str
    ignore_columns: Sequence[str]
    document_end_id: int | None
    loss_on: LossOn
    chat_template: str | None
    include: Sequence[str]
    eos_token: str | None
    append_eos: bool
    prepend_bos: bool | None
    batch_documents: int | None
    batch_tokens: int | None
    shuffle_window: int
    streams: int | None
    seed: int
    epochs: int | None
    max_document_tokens: int
    overlong: Overlong
    on_corrupt: OnCorrupt
    held_out_share: float
    reads: Reads
    workers: int
    prefetch_steps: int
    stall_timeout_s: float
