"""`shrunk_parallel`: the layout in which fewer ranks go on.

Of the layouts with as many tensor- and context-parallel ranks as before, one that uses most ranks; of these the one
whose number of stages is nearest to before, and then the deeper one, where a rank holds less of the model.
"""

import msgspec

from evenload.errors import ConfigError
from evenload.runtime.config.train_config import ParallelConfig


def shrunk_parallel(parallel: ParallelConfig, num_layers: int, num_ranks: int) -> ParallelConfig:
    """`[parallel]` of a run that has so many ranks left; itself where that is enough for it.

    Raises:
        ConfigError: one replica of one stage needs more ranks.
    """
    inner = parallel.cp * parallel.tp
    if num_ranks >= inner * parallel.pp * parallel.dp:
        return parallel
    if num_ranks < inner:
        raise ConfigError(
            f"{num_ranks} ranks are left, but parallel.cp x parallel.tp is {inner}: what they share is not divided "
            "anew while a run goes on; start it again with smaller ones, from its last checkpoint"
        )
    free = num_ranks // inner
    choices = [(pp, free // pp) for pp in range(1, min(free, num_layers) + 1)]
    pp, dp = max(choices, key=lambda choice: (choice[0] * choice[1], -abs(choice[0] - parallel.pp), choice[0]))
    if pp == parallel.pp:
        return msgspec.structs.replace(parallel, dp=dp)
    return msgspec.structs.replace(parallel, pp=pp, dp=dp, virtual=1, stage_layers=None)
