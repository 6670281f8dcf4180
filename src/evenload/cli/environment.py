"""What commands need of their environment, and containers, batch systems and old terminals do not always give: a name
and a home of the user, which torch and others read, and characters for tables and odd file names."""

import codecs
import io
import os
import pwd
import re
import sys
import tempfile
import unicodedata

from evenload.errors import ConfigError

_ALIKE = str.maketrans("×·→−–►▶▸★│─█▉▊▋▌▍▎▏▁▲▼µ", "x.>-->>>*|-########_^vu") | {ord("±"): "+-"}


def prepare_environment() -> None:
    """Give this process, and those that it starts, a user's name and home, and streams that can write anything.
    `ConfigError` where no home is known, and none can be made among temporary files."""
    uid = os.getuid()
    try:
        home = pwd.getpwuid(uid).pw_dir
    except KeyError:
        home = ""
        os.environ.setdefault("USER", f"uid{uid}")
    if not os.environ.get("HOME") and not home:
        home = f"{tempfile.gettempdir()}/evenload-home-{uid}"
        try:
            os.mkdir(home, 0o700)
        except OSError as error:  # another process's, or another user's, who must not give us files
            if not os.path.isdir(home) or os.lstat(home).st_uid != uid:
                raise ConfigError(f"HOME is not set, and {home} is another's or no directory; set HOME") from error
    os.environ["HOME"] = os.environ.get("HOME") or home
    replace_unknown_characters()


def replace_unknown_characters() -> None:
    """Let standard output and error write characters that look alike for those that their encoding lacks."""
    codecs.register_error("evenload-alike", _alike)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="evenload-alike")


def _alike(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    plain = ""
    for one in error.object[error.start : error.end].translate(_ALIKE):
        is_byte = "\udc80" <= one <= "\udcff"  # of a file name that is no text
        known = unicodedata.normalize("NFKD", one).encode("ascii", "ignore").decode() or "?"
        plain += f"\\x{ord(one) - 0xDC00:02x}" if is_byte else known
    return plain, error.end


def with_home(argument: str) -> str:
    """Expand `~` in an argument, which shells leave alone after "="."""
    return re.sub(r"^(-[\w-]*=)?(~[^/\s]*)(?=/)", lambda at: (at[1] or "") + os.path.expanduser(at[2]), argument)
