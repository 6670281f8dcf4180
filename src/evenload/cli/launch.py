"""Starts local training processes and watches them: when one fails, the others stop and its error is shown.

Built on torch's elastic launcher, the same that `torchrun` uses, so a run started here and one started by
`torchrun` are the same run.
"""

import logging
import uuid

from evenload import errors
from evenload.errors import EvenloadError


def run_local(function, arguments: tuple, num_processes: int) -> None:
    """Run `function(*arguments)` in that many processes with the environment of `torchrun`.

    Args:
        function: importable by name in a new process.

    Raises:
        EvenloadError: the first failing process's error, with its rank.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Its own report of a failure is a page long; ours says the same in a line.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.multiprocessing.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        elastic_launch(config, function)(*arguments)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        raise _as_evenload_error(rank, failure) from None
    except SignalException as stopped:
        # Ctrl-C or a scheduler's SIGTERM; the ranks are down already. The shell's convention for the exit code.
        raise SystemExit(128 + stopped.sigval) from None


def _as_evenload_error(rank: int, failure) -> EvenloadError:
    message = failure.message if isinstance(failure.message, str) else failure.message["message"]
    name, colon, text = message.partition(": ")
    kind = getattr(errors, name, None)
    if colon and isinstance(kind, type) and issubclass(kind, EvenloadError):
        return kind(f"{text} (rank {rank})")
    if failure.exitcode < 0:
        return EvenloadError(
            f"rank {rank} was killed by {failure.signal_name()} (process {failure.pid}); "
            "if the machine ran out of memory, lower plan.options.max_pack_tokens or raise parallel.pp"
        )
    return EvenloadError(f"rank {rank} failed with exit code {failure.exitcode}: {message}")
