"""The command that goes on with a run that was stopped, as the user would type it."""

import shlex
from collections.abc import Sequence
from pathlib import Path


def resume_command(arguments: Sequence[str], *, is_resumed: bool) -> str:
    """The same command once more, with `train.resume` turned on where it is off; the interpreter is the first argument
    (`sys.orig_argv`)."""
    words = list(arguments)
    scripts = [at for at, word in enumerate(words[:3]) if Path(word).name == "evenload"]
    if scripts:
        # The interpreter in front of an installed script is not what anybody types.
        words = words[scripts[0] :]
    return shlex.join(words if is_resumed else [*words, "train.resume=true"])
