"""Packs by the times of the model that a training loop has, where its loader was made without one."""

import logging
from typing import Any

from evenload.errors import ConfigError
from evenload.integrations.packed_loader import PackedLoader
from evenload.integrations.step_planner import known_vocabulary

_log = logging.getLogger("evenload.loader")


def balance_for_model(loader: PackedLoader, model: Any) -> None:
    """Balance the packs for `model.config`; a warning where its costs are not known. Nothing happens to a loader that
    was made with a model. Collective."""
    if not loader.model_is_assumed:
        return
    config = getattr(model, "config", None)
    try:
        known_vocabulary(config)
    except ConfigError as err:
        if loader.rank == 0:
            _log.warning("packs are not balanced for the model that is trained: %s", err)
    else:
        loader.balance_for(config)
