"""`plan_options`: the tables of `[plan.options]`, those of strategies among them, as one `PlanOptions`.

Which strategies there are, and which options they have, is known when a program runs: packages add some. So their
tables are read here and not by the type of a field.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.registry import option_tables
from evenload.runtime.config.config_keys import apply_override, converted, require_known

PREFIX = "plan.options."


def plan_options(tree: Mapping[str, Any]) -> PlanOptions:
    """Options from nested tables: `{"candidates": 3, "wlb": {"release": "queues"}}`.

    Raises:
        ConfigError: an unknown key or choice (with the nearest known one), or a bad value.
    """
    require_known(tree, PlanOptions, PREFIX)
    own = option_tables()
    shared = {key: value for key, value in tree.items() if key not in own}
    found = tuple(converted(tree[name], kind, f"{PREFIX}{name}.") for name, kind in own.items() if name in tree)
    return msgspec.structs.replace(converted(shared, PlanOptions, PREFIX), strategies=found)


def set_options(settings: Iterable[str]) -> list[str]:
    """`--set wlb.release=queues` as an override of a training configuration."""
    return [f"{PREFIX}{setting}" for setting in settings]


def options_of_settings(settings: Iterable[str]) -> PlanOptions:
    """Options of `--set` alone; errors as of `plan_options`."""
    tree: dict[str, Any] = {"plan": {"options": {}}}
    for override in set_options(settings):
        apply_override(tree, override)
    return plan_options(tree["plan"]["options"])
