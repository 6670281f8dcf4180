"""What is tested together: the axes of the one generated test (tests/dist/test_matrix.py), the pairs of values that are
refused at start, and rows in which every other pair of values is found.

A row is one plan. The rows are a covering array of strength 2 (covertable, a greedy search with a fixed order): far
fewer than the product, and any two values that may meet do meet in some row. docs/tested.md shows the tables, and
tests/docs/test_made_pages.py holds them to what stands here.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from covertable import make

from evenload.planning.strategies.registry import STRATEGIES

MOST_LAYERS = 4
NONE = "none"
"""Of sharding and exchange, where no ranks share a document."""

LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "single": {},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "cp2": {"cp": 2},
    "tp2": {"tp": 2},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "pp2 cp2": {"pp": 2, "cp": 2},
    "pp2 tp2": {"pp": 2, "tp": 2},
    "dp2 cp2": {"dp": 2, "cp": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "cp2 tp2": {"cp": 2, "tp": 2},
}
"""Every dimension alone and with every other one; at most four processes."""


class ModelCase(NamedTuple):
    """A model as `reference_training.tiny_config` makes it."""

    kind: str
    changes: Mapping[str, object] = {}
    lora: bool = False


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
MODELS: Mapping[str, ModelCase] = {
    "llama": ModelCase("llama"),
    "llama, LoRA": ModelCase("llama", lora=True),
    "qwen2, tied": ModelCase("qwen2", {"tied": True}),
    "qwen3": ModelCase("qwen3"),
    "mistral, window": ModelCase("mistral", {"sliding_window": 9}),
    "gemma": ModelCase("gemma", {"tied": True}),
    "gemma2": ModelCase("gemma2", {"tied": True}),
    "gemma3": ModelCase("gemma3", {"sliding_window_pattern": 2}),
    "olmo2": ModelCase("olmo2"),
    "mixtral": ModelCase("mixtral", {**BALANCED, "num_local_experts": 6}),
    "qwen3_moe": ModelCase("qwen3_moe", BALANCED),
    "gpt2, tied": ModelCase("gpt2", {"tied": True}),
    "qwen3_next": ModelCase("qwen3_next", BALANCED),
    "bamba": ModelCase("bamba"),
}
WINDOWED = ("mistral, window", "gemma2", "gemma3")
WITH_EXPERTS = ("mixtral", "qwen3_moe", "qwen3_next")


class Row(NamedTuple):
    """One value of every axis; the fields are the axes."""

    strategy: str
    layout: str
    virtual: str
    dp_merge: str
    policy: str
    schedule: str
    model: str
    sharding: str
    exchange: str
    channels: str
    overlap: str
    switch: str
    trees: str = "off"

    @property
    def num_layers(self) -> int:
        """A layer a stage, and two at least: no fewer have windows by turns."""
        return max(2, self.sizes.get("pp", 1) * int(self.virtual))

    @property
    def sizes(self) -> Mapping[str, int]:
        """Of the parallel dimensions above 1."""
        return LAYOUTS[self.layout]

    def describe(self) -> str:
        return ", ".join(f"{axis} {value}" for axis, value in zip(self._fields, self, strict=True))


AXES: Mapping[str, tuple[str, ...]] = {
    "strategy": tuple(STRATEGIES),
    "layout": tuple(LAYOUTS),
    "virtual": ("1", "2"),
    "dp_merge": ("off", "on"),
    "policy": ("replay", "recompute", "offload", "mixed"),
    "schedule": ("own", "static", "list", "list_split", "gpipe", "zb_h1"),
    "model": tuple(MODELS),
    "sharding": (NONE, "per_sequence", "per_document", "adaptive", "mixed", "dacp"),
    "exchange": (NONE, "all_gather", "ring"),
    "channels": ("directed", "fifo"),
    "overlap": ("off", "on"),
    "switch": ("off", "on"),
    "trees": ("off", "on"),
}
MEANINGS: Mapping[str, str] = {
    "strategy": "`plan.strategy`",
    "layout": "`parallel.pp`, `dp`, `cp`, `tp`: each alone and with each other one, up to four processes",
    "virtual": "`parallel.virtual`",
    "dp_merge": "`plan.options.dp_merge`, with a document that replicas really share",
    "policy": "`plan.options.policy`; mixed is what `choose` takes where memory is short",
    "schedule": "`plan.options.schedule`; own = choose",
    "model": "tiny ones of thirteen architectures, in float64 ([more](decoders.md)); dense ones in bfloat16 too",
    "sharding": "`plan.options.cp_sharding`; dacp is `skrull`'s own",
    "exchange": "`parallel.cp_exchange`",
    "channels": "`parallel.channels`",
    "overlap": "`train.overlap_reduction`, `train.overlap_gather`; with `tp`, transfers in chunks of a few rows",
    "switch": "`plan.layouts`: the run began in another layout of as many processes and changed to this one",
    "trees": "`data.group_by`: two of three documents are random trees of sequences that share prefixes",
}


def sizes_before(layout: str) -> Mapping[str, int]:
    """Of the layout from which a run changes to one with a pipeline or replicas: the same processes, other stages."""
    sizes = LAYOUTS[layout]
    pp = 1 if sizes.get("pp") == 2 else 2
    return {**sizes, "pp": pp, "dp": sizes.get("pp", 1) * sizes.get("dp", 1) // pp}


def has_others(layout: str) -> bool:
    return bool({"pp", "dp"} & LAYOUTS[layout].keys())


class Refusal(NamedTuple):
    """Pairs of values that are refused at start.

    Args:
        axes: of the two values.
        of: whether such a pair is refused.
        pairs: which, in words.
        reason: why, in words.
        message: a part of what the user reads.
    """

    axes: tuple[str, str]
    of: Callable[[str, str], bool]
    pairs: str
    reason: str
    message: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        ("strategy", "layout"),
        lambda strategy, layout: STRATEGIES[strategy].needs_one_stage and "pp" in LAYOUTS[layout],
        "`skrull` and `pp` above 1",
        "Skrull has no pipeline",
        "has a pipeline and skrull has none",
    ),
    Refusal(
        ("strategy", "layout"),
        lambda strategy, layout: STRATEGIES[strategy].changes_layout and not has_others(layout),
        "`flexpipe` without `pp` and `dp`",
        "there is no other layout of the same processes",
        "changes the layout between steps, and there is",
    ),
    Refusal(
        ("strategy", "switch"),
        lambda strategy, switch: (
            switch == "on" and not (STRATEGIES[strategy].changes_layout or STRATEGIES[strategy].follows_layouts)
        ),
        "`layouts` and any strategy but `flexpipe` and `auto`",
        "the others stay in their layout",
        "plan.layouts is set, and strategy",
    ),
    Refusal(
        ("strategy", "virtual"),
        lambda strategy, virtual: STRATEGIES[strategy].needs_one_stage and virtual != "1",
        "`skrull` and `virtual` above 1",
        "virtual stages are a pipeline on one rank",
        "has a pipeline and skrull has none",
    ),
    Refusal(
        ("strategy", "dp_merge"),
        lambda strategy, merge: not STRATEGIES[strategy].shares_documents and merge == "on",
        "`dp_merge` and any strategy but `slimpack` and `auto`",
        "the others never share a document among replicas, so the setting would do nothing",
        "plan.options.dp_merge is True, which strategy",
    ),
    Refusal(
        ("strategy", "sharding"),
        lambda strategy, rule: STRATEGIES[strategy].assigns_ranks and rule not in (NONE, "mixed", "dacp"),
        "`skrull` and a `cp_sharding`",
        "`skrull` decides by itself which ranks compute a document",
        "decides by itself which ranks compute a document",
    ),
    Refusal(
        ("strategy", "sharding"),
        lambda strategy, rule: not STRATEGIES[strategy].assigns_ranks and rule == "dacp",
        "`dacp` and any strategy but `skrull`",
        "it needs an owner of every document, which only `skrull` names; it is no value of `cp_sharding`",
        "cp_sharding is 'dacp'",
    ),
    Refusal(
        ("layout", "virtual"),
        lambda layout, virtual: LAYOUTS[layout].get("pp", 1) * int(virtual) > MOST_LAYERS,
        "more stages than layers (here `pp = 4` and `virtual = 2` of 4 layers)",
        "every stage needs a layer",
        "cannot fill 8 stages",
    ),
    Refusal(
        ("layout", "model"),
        lambda layout, model: "tp" in LAYOUTS[layout] and model in ("olmo2", "gpt2, tied"),
        "`tp` and OLMo 2 or GPT-2",
        "OLMo 2 norms all heads together, which lie on different ranks; transformers has no plan of GPT-2's parts",
        "as norms of all heads|has no plan for tensor parallelism",
    ),
    Refusal(
        ("model", "exchange"),
        lambda model, exchange: model in WINDOWED and exchange == "ring",
        "`cp_exchange = \"ring\"` and a sliding window",
        "the keys that a row sees are no prefix of another rank's rows",
        "and sliding windows .* do not go together",
    ),
    Refusal(
        ("virtual", "schedule"),
        lambda virtual, schedule: virtual != "1" and schedule == "zb_h1",
        "ZB-H1 and `virtual` above 1",
        "its order is of one stage a rank; the list runs I and W on any number",
        "it is of one stage a rank",
    ),
    Refusal(
        ("strategy", "trees"),
        lambda strategy, trees: trees == "on" and not STRATEGIES[strategy].plans_trees,
        "shared prefixes and any strategy but `sequential`, `best_fit`, `balanced`, `slimpack` and `auto`",
        "the others price rows by their place in the document, which of a tree says little",
        "does not plan trees of shared prefixes",
    ),
    Refusal(
        ("layout", "trees"),
        lambda layout, trees: trees == "on" and "cp" in LAYOUTS[layout],
        "shared prefixes and `cp` above 1",
        "attention over ranks knows no branches",
        "trees of shared prefixes: layout .* divides documents over ranks",
    ),
    Refusal(
        ("dp_merge", "trees"),
        lambda merge, trees: merge == trees == "on",
        "shared prefixes and `dp_merge`",
        "so does attention over replicas; where it is not set, it is off",
        "dp_merge is True, and replicas share no trees of prefixes",
    ),
    Refusal(
        ("model", "trees"),
        lambda model, trees: trees == "on" and model in (*WITH_EXPERTS, "bamba"),
        "shared prefixes and a load-balancing loss, or layers that carry a state",
        "the loss is a product over each sequence; states go from row to row",
        "trees of shared prefixes: (of .* its load-balancing loss|model .* has other layers than of causal attention)",
    ),
)  # fmt: skip


class Absence(NamedTuple):
    """Values that mean nothing without another: not refused, there is nothing to be tested.

    Args:
        axes: of the values.
        of: whether such values mean nothing together.
        why: in words.
    """

    axes: tuple[str, ...]
    of: Callable[..., bool]
    why: str


def shares_documents(layout: str, merge: str) -> bool:
    """Whether several ranks compute one document."""
    return "cp" in LAYOUTS[layout] or merge == "on"


ABSENCES: tuple[Absence, ...] = (
    Absence(
        ("strategy", "sharding"),
        lambda strategy, rule: STRATEGIES[strategy].assigns_ranks and rule == "mixed",
        "`mixed` is the default of a setting that `skrull` does not read",
    ),
    Absence(
        ("layout", "dp_merge"),
        lambda layout, merge: merge == "on" and "dp" not in LAYOUTS[layout],
        "without replicas there are none to merge",
    ),
    Absence(
        ("layout", "dp_merge", "sharding"),
        lambda layout, merge, rule: shares_documents(layout, merge) == (rule == NONE),
        "a sharding rule applies where, and only where, ranks share documents",
    ),
    Absence(
        ("sharding", "exchange"),
        lambda rule, exchange: (rule == NONE) != (exchange == NONE),
        "and so does the exchange of keys and values",
    ),
    Absence(
        ("layout", "channels"),
        lambda layout, channels: "pp" not in LAYOUTS[layout] and channels == "fifo",
        "without pipeline ranks nothing is sent between stages",
    ),
    Absence(
        ("layout", "switch"),
        lambda layout, switch: switch == "on" and not has_others(layout),
        "there is no other layout of the same processes",
    ),
    Absence(
        ("layout", "overlap"),
        lambda layout, overlap: not {"dp", "cp", "tp"} & LAYOUTS[layout].keys() and overlap == "on",
        "without replicas no gradients are summed, and without `tp` nothing is divided into chunks",
    ),
)


def may_run(values: Mapping[str, str]) -> bool:
    """Whether no rule that speaks of the given values alone forbids them."""
    rules = (*REFUSALS, *ABSENCES)
    return not any(
        rule.of(*(values[axis] for axis in rule.axes)) for rule in rules if all(axis in values for axis in rule.axes)
    )


@cache
def matrix_rows() -> tuple[Row, ...]:
    """Rows that hold every pair of values that some row may hold; the same every time."""
    constraints = [
        {"operator": "fn", "requires": list(rule.axes), "evaluate": lambda values, rule=rule: _allows(rule, values)}
        for rule in (*REFUSALS, *ABSENCES)
    ]
    return tuple(Row(**values) for values in make(dict(AXES), constraints=constraints))


@cache
def rows_in_bf16() -> frozenset[Row]:
    """Rows trained in bfloat16 too, every value twice; experts not: a rounding sends a token to other ones."""
    held: Counter[tuple[str, str]] = Counter()
    chosen = set()
    for row in matrix_rows():
        values = list(row._asdict().items())
        if row.model in WITH_EXPERTS or all(held[value] >= 2 for value in values):
            continue
        chosen.add(row)
        held.update(values)
    return frozenset(chosen)


def _allows(rule: Refusal | Absence, values: Mapping[str, str]) -> bool:
    return not rule.of(*(values[axis] for axis in rule.axes))


def refused_pairs() -> Iterator[tuple[Refusal, str, str]]:
    """Every pair of values that is refused, with its rule."""
    for rule in REFUSALS:
        for one, other in itertools.product(*(AXES[axis] for axis in rule.axes)):
            if rule.of(one, other):
                yield rule, one, other


def can_be_completed(values: Mapping[str, str]) -> bool:
    """Whether some allowed row holds these values; by search through the axes."""
    if not may_run(values):
        return False
    # Axes of many rules first, so that what cannot be is found out early.
    left = [axis for axis in sorted(AXES, key=_num_rules, reverse=True) if axis not in values]
    return not left or any(can_be_completed({**values, left[0]: value}) for value in AXES[left[0]])


def _num_rules(axis: str) -> int:
    return sum(axis in rule.axes for rule in (*REFUSALS, *ABSENCES))
