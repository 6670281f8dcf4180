"""`fitted_config`: the settings of a run as fewer ranks go on with them.

The layout is that of `[parallel]` and `plan.layouts` which takes most of the ranks, the first named of several; where
none of them has so few ranks, or none is named, the rule of `shrunk_parallel`. The other layouts that still fit stay
layouts that the run may take. Pure: every rank comes to the same settings by itself.
"""

import msgspec

from evenload.errors import ConfigError
from evenload.plan.strategies.registry import require_trainable
from evenload.runtime.config.run_layouts import resolved_layout
from evenload.runtime.config.shrunk_parallel import shrunk_parallel
from evenload.runtime.config.train_config import ParallelConfig, TrainConfig, layout_of
from evenload.types.layout import ParallelLayout


def fitted_config(config: TrainConfig, num_layers: int, num_ranks: int) -> TrainConfig:
    """The settings with which so many ranks train; the same object where all that the layout needs are there.

    Measured costs are of the layout that they were measured in, so another one leaves out `train.cost_file`.

    Raises:
        ConfigError: no layout with as many `cp` and `tp` ranks is small enough, none is one in which the strategy
            trains, or an entry of `plan.layouts` is wrong.
    """
    start = layout_of(config, num_layers)
    if num_ranks >= start.world_size:
        return config
    parallel = _largest_named(config, start, num_layers, num_ranks)
    if parallel is None:
        parallel = shrunk_parallel(
            config.parallel, num_layers, num_ranks, lambda one: _refusal(config, one, num_layers)
        )
    fitted = msgspec.structs.replace(
        config,
        parallel=parallel,
        train=msgspec.structs.replace(config.train, cost_file=None),
        plan=msgspec.structs.replace(config.plan, layouts=()),
    )
    kept = _still_fitting(config, layout_of(fitted, num_layers), num_layers)
    return msgspec.structs.replace(fitted, plan=msgspec.structs.replace(fitted.plan, layouts=kept))


def _largest_named(
    config: TrainConfig, start: ParallelLayout, num_layers: int, num_ranks: int
) -> ParallelConfig | None:
    """Of `plan.layouts`, as `[parallel]`; None where none fits."""
    largest, found = 0, None
    for text in config.plan.layouts:
        layout = resolved_layout(text, start, num_layers, num_ranks)
        if largest < layout.world_size <= num_ranks:
            parallel = _as_parallel(config.parallel, layout)
            is_named = layout_of(msgspec.structs.replace(config, parallel=parallel), num_layers) == layout
            if is_named and not _refusal(config, parallel, num_layers):
                largest, found = layout.world_size, parallel
    return found


def _refusal(config: TrainConfig, parallel: ParallelConfig, num_layers: int) -> str:
    """Why the strategy does not train in a layout, as a start there would say; "" = it does."""
    try:
        layout = layout_of(msgspec.structs.replace(config, parallel=parallel), num_layers)
        require_trainable(config.plan.strategy, layout, config.plan.options)
    except ConfigError as error:
        return str(error)
    return ""


def _as_parallel(parallel: ParallelConfig, layout: ParallelLayout) -> ParallelConfig:
    return msgspec.structs.replace(
        parallel,
        dp=layout.dp,
        pp=layout.pp,
        virtual=layout.num_stages // layout.pp,
        stage_layers=None if layout.is_even else layout.stage_counts,
        stage_devices=layout.devices if layout.has_wide_stages else None,
    )


def _still_fitting(config: TrainConfig, start: ParallelLayout, num_layers: int) -> tuple[str, ...]:
    """Entries of `plan.layouts` that a run which starts in this layout may take, each layout once."""
    kept, found = [], {start}
    for text in config.plan.layouts:
        layout = resolved_layout(text, start, num_layers, start.world_size)
        if layout.world_size <= start.world_size and layout not in found:
            found.add(layout)
            kept.append(text)
    return tuple(kept)
