"""The command that goes on with a run that was stopped, as the user would type it."""

import shlex
from collections.abc import Sequence
from pathlib import Path


def resume_command(arguments: Sequence[str], *, is_resumed: bool) -> str:
    """The same command once more.

    Args:
        arguments: of this process, interpreter first (`sys.orig_argv`).
        is_resumed: `train.resume`; where it is off, the command turns it on.
    """
    words = list(arguments)
    scripts = [at for at, word in enumerate(words[:3]) if Path(word).name == "evenload"]
    if scripts:
        # The interpreter in front of an installed script is not what anybody types.
        words = words[scripts[0] :]
    return shlex.join(words if is_resumed else [*words, "train.resume=true"])
