"""`evenload.plan`: what `evenload plan` computes, as a function. Needs no torch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from evenload.api.comparison import Comparison
from evenload.api.plan_settings import PlanSettings
from evenload.cli.length_source import LengthSource
from evenload.cli.plan_arguments import PlanArguments
from evenload.cli.plan_found import find_plans
from evenload.data.config import DataConfig
from evenload.data.lengths import LengthTable, checked_lengths
from evenload.errors import ConfigError, DataError

GIVEN = "lengths of the caller"
"""Names lengths that were given as numbers."""


def plan(
    lengths: str | os.PathLike[str] | Sequence[int] | NDArray[np.integer],
    *,
    cluster: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    layout: str | None = None,
    documents: int | None = None,
    tokens: int | str | None = None,
    context: int | str | None = None,
    strategy: str | Sequence[str] = "all",
    steps: int = 1,
    **further: Unpack[PlanSettings],
) -> Comparison:
    """Compare strategies on document lengths, without a GPU: `evenload plan`, with its defaults.

        found = evenload.plan("lengths.npy", model="llama3-8b", cluster="h100x32", context="16k", overlong="truncate")
        print(found.best, found.factor)
        print(found)

    Args:
        lengths: numbers of tokens, or what `evenload plan` takes: a file of lengths, documents that are counted, or the
            config.toml of a run.
        cluster: a built-in name such as "h100x32", or a TOML file. Not needed with a config.toml: this machine.
        model: a built-in name, or a Hugging Face config.json or its folder; not needed with a config.toml.
        layout: such as "dp=4,pp=8". Default: the shallowest that fits, or that of the run.
        documents, tokens: of a global batch, one of both; "128k" is 131,072.
        context: longest document trained whole, and the most tokens of a pack.
        strategy: "all", or names.
        steps: global batches to plan.
        further: other options of the command, see `PlanSettings`.

    Raises:
        ConfigError: settings that cannot work, with the reason. DataError: lengths that are none, or documents that
            cannot be read. InfeasiblePlanError: no layout holds the model. Where strategies do not fit memory their
            rows say so; `Comparison.require_feasible` raises where none does.
    """
    given: dict[str, Any] = {**further}
    if unknown := sorted(set(given) - set(PlanSettings.__annotations__)):
        raise ConfigError(
            f"evenload.plan knows no setting {', '.join(unknown)}; it takes {', '.join(PlanSettings.__annotations__)}"
        )
    for name in ("include", "set_options"):
        if given.get(name) is not None:
            given[name] = list(given[name])
    if given.get("cost") is not None:
        given["cost"] = Path(given["cost"]).expanduser()
    is_named = isinstance(lengths, str | os.PathLike)
    asked = PlanArguments(
        lengths=os.path.expanduser(lengths) if isinstance(lengths, str | os.PathLike) else GIVEN,
        cluster=None if cluster is None else os.path.expanduser(cluster),
        model=None if model is None else os.path.expanduser(model),
        layout=layout,
        documents=documents,
        tokens=None if tokens is None else str(tokens),
        context=None if context is None else str(context),
        strategy=strategy if isinstance(strategy, str) else ",".join(strategy),
        steps=steps,
        **given,
    )
    source = None if is_named else _given_lengths(lengths)
    return Comparison(find_plans(asked, Console(quiet=True), source))


def _given_lengths(lengths: Sequence[int] | NDArray[np.integer]) -> LengthSource:
    numbers = np.asarray(lengths)
    if numbers.ndim != 1 or (numbers.size and not np.issubdtype(numbers.dtype, np.integer)):
        raise DataError(
            f"lengths are {numbers.dtype} of shape {numbers.shape}; give one whole number a document, or the name of "
            "a file"
        )
    table = LengthTable(lengths=checked_lengths(numbers.astype(np.int64), GIVEN), unit="tokens", tokenizer=None)
    data = DataConfig(sources=(GIVEN,), batch_documents=1, max_document_tokens=1)
    return LengthSource(name=GIVEN, data=data, table=table)
