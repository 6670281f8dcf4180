"""The layouts that a run may take: that of `[parallel]`, in which it starts, and `plan.layouts`, or, under `flexpipe`
without them, some of the same processes."""

from evenload.errors import ConfigError
from evenload.plan.reconfiguration.enumerated_layouts import enumerated_layouts
from evenload.plan.strategies.flexpipe import FlexOptions
from evenload.plan.strategies.registry import strategy_named
from evenload.runtime.config.train_config import TrainConfig, layout_of
from evenload.types.counted import counted
from evenload.types.layout import ParallelLayout
from evenload.types.layout_text import read_layout_text


def layouts_of(config: TrainConfig, num_layers: int) -> tuple[ParallelLayout, ...]:
    """All of them, each once; the run starts in the first, which gives the number of processes.

    Raises:
        ConfigError: as `layout_of`; or an entry of `plan.layouts` that cannot be read, needs more processes than
            `[parallel]` starts, changes cp or tp, or does not hold the model's layers; or settings that are not tested
            with stages of different numbers of devices.
    """
    start = layout_of(config, num_layers)
    found = [start]
    for text in config.plan.layouts:
        layout = resolved_layout(text, start, num_layers, start.world_size)
        if layout.world_size > start.world_size:
            raise ConfigError(
                f"plan.layouts: '{text}' needs {counted(layout.world_size, 'process')}, [parallel] "
                f"({start.describe()}) starts "
                f"{start.world_size}; a run starts in its largest layout: make that [parallel]'s"
            )
        if layout in found[1:]:
            raise ConfigError(f"plan.layouts: '{text}' is the same layout as an entry before it ({layout.describe()})")
        if layout != start:
            found.append(layout)
    if not config.plan.layouts and strategy_named(config.plan.strategy).changes_layout:
        options = config.plan.options.own(FlexOptions)
        found += enumerated_layouts(start, options.most_layouts, options.most_groups)
    for layout in found:
        if layout.has_wide_stages:
            _require_tested_with_devices(config, layout)
    return tuple(found)


def resolved_layout(text: str, start: ParallelLayout, num_layers: int, num_ranks: int) -> ParallelLayout:
    """An entry of `plan.layouts`; without `dp` it has as many replicas as so many ranks are enough for, at least one.

    Args:
        start: of the run; has the same cp and tp.

    Raises:
        ConfigError: it cannot be read, changes cp or tp, or does not hold the model's layers.
    """
    written = read_layout_text(text)
    for axis in ("cp", "tp"):
        if written.sizes.get(axis, getattr(start, axis)) != getattr(start, axis):
            raise ConfigError(
                f"plan.layouts: '{text}' has {axis}={written.sizes[axis]}, [parallel] has "
                f"{axis}={getattr(start, axis)}; only dp, pp, virtual and the layers of stages may change while a "
                "run trains"
            )
    per_replica = written.size("pp") * start.cp * start.tp
    # As many replicas as there are processes for; those that are left over are idle.
    replicas = max(1, num_ranks // per_replica) if written.devices is None else 1
    return written.layout(num_layers, **{"cp": start.cp, "tp": start.tp, "dp": replicas})


def _require_tested_with_devices(config: TrainConfig, layout: ParallelLayout) -> None:
    """Refuse what no test runs together with stages that have different numbers of devices."""
    if config.parallel.channels == "fifo":
        raise ConfigError(
            f"layout {layout.describe()} has stages with different numbers of devices, and parallel.channels = "
            '"fifo" gives every pair of ranks one queue; that is not tested with them: leave one of both out'
        )
