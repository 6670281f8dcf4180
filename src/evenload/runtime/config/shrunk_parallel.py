"""`shrunk_parallel`: the layout in which fewer ranks go on.

Of the layouts with as many tensor- and context-parallel ranks as before, and in which the run could start, one that
uses most ranks; of these the one whose number of stages is nearest to before, and then the deeper one, where a rank
holds less of the model. All of its stages have as many ranks each, also where those before had not.
"""

from collections.abc import Callable

import msgspec

from evenload.errors import ConfigError
from evenload.runtime.config.train_config import ParallelConfig
from evenload.types.counted import counted


def shrunk_parallel(
    parallel: ParallelConfig,
    num_layers: int,
    num_ranks: int,
    refusal: Callable[[ParallelConfig], str] = lambda parallel: "",
) -> ParallelConfig:
    """`[parallel]` of a run that has so many ranks left; itself where that is enough for it.

    Args:
        refusal: why no run starts in a layout; "" = it may.

    Raises:
        ConfigError: one replica of one stage needs more ranks, or no run starts in any layout of so many.
    """
    inner = parallel.cp * parallel.tp
    if num_ranks >= inner * parallel.dp * sum(parallel.stage_devices or [1] * parallel.pp):
        return parallel
    if num_ranks < inner:
        raise ConfigError(
            f"{counted(num_ranks, 'rank')} left, but parallel.cp x parallel.tp is {inner}: what they share is not "
            "divided anew while a run goes on; start it again with smaller ones, from its last checkpoint"
        )
    free = num_ranks // inner
    choices = sorted(
        (_sized(parallel, pp, free // pp) for pp in range(1, min(free, num_layers) + 1)),
        key=lambda one: (one.pp * one.dp, -abs(one.pp - parallel.pp), one.pp),
        reverse=True,
    )
    for one in choices:
        if not refusal(one):
            return one
    raise ConfigError(
        f"{counted(num_ranks, 'rank')} left, and no run starts in a layout of so many: {refusal(choices[0])}; start it "
        "again with other settings, from its last checkpoint"
    )


def _sized(parallel: ParallelConfig, pp: int, dp: int) -> ParallelConfig:
    if pp == parallel.pp and parallel.stage_devices is None:
        return msgspec.structs.replace(parallel, dp=dp)
    return msgspec.structs.replace(parallel, pp=pp, dp=dp, virtual=1, stage_layers=None, stage_devices=None)
