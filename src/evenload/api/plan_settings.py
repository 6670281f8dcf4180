"""`PlanSettings`: keyword arguments of `evenload.plan` besides those it names itself, typed for editors and checkers.

They are options of `evenload plan` under the same names; a test compares them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from evenload.data.config import OnCorrupt, Overlong, RecordKind


class PlanSettings(TypedDict, total=False):
    """What is left out has the default of `evenload plan --help`, or that of the run whose config.toml is named.

    Of documents that are counted: `tokenizer`, `record`, `include`, `on_corrupt`. Of batches: `overlong`, `seed`. Of
    planning: `policy`, `dp_merge`, `window`, `max_delay_steps`, `known_steps`, and `set_options`, as `--set` takes
    them: `["wlb.release=queues"]`. Beside the comparison: `engine`, `worst`, `search_layout` and, for the most time
    that it takes, `search_seconds`. `cost` is a measured cost file.
    """

    overlong: Overlong | None
    tokenizer: str | None
    record: RecordKind | None
    include: Sequence[str] | None
    on_corrupt: OnCorrupt | None
    engine: str | None
    dp_merge: bool | None
    policy: Literal["choose", "replay", "recompute", "offload"] | None
    window: int | None
    max_delay_steps: int | None
    set_options: Sequence[str] | None
    known_steps: int | None
    seed: int
    worst: int | None
    cost: str | Path | None
    search_layout: bool
    search_seconds: float | None
