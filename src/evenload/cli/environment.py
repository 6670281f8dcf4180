"""What commands need of their environment, and containers, batch systems and old terminals do not always give: a name
and a home of the user, which torch and others ask for, characters for tables and odd file names, short socket paths."""

import codecs
import io
import os
import pwd
import re
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

from evenload.errors import ConfigError

_ALIKE = str.maketrans("×·→−–►▶▸◄▲▼★─│┌┐└┘├┤┬┴┼µλΣ", "x.>-->>><^v*-|+++++++++ulS") | dict.fromkeys(
    range(0x2580, 0x25A0), "#"
)
_MOST_BYTES = 103 - len("/pymp-12345678/listener-12345678")  # of a socket's path on macOS; Linux takes 4 more
_SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")


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
    text = error.object[error.start : error.end].translate(_ALIKE)
    # A byte of a file name that is no text is a surrogate; NFKD makes "..." of an ellipsis and "e" of an accented one.
    plain = (unicodedata.normalize("NFKD", one).encode("ascii", "ignore").decode() for one in text)
    escaped = (f"\\x{ord(one) - 0xDC00:02x}" if "\udc80" <= one <= "\udcff" else "?" for one in text)
    return "".join(one or other for one, other in zip(plain, escaped, strict=True)), error.end


def with_home(argument: str) -> str:
    """An argument with `~` written out, which shells leave alone behind "="."""
    return re.sub(r"^(-[\w-]*=)?(~[^/\s]*)(?=/)", lambda at: (at[1] or "") + os.path.expanduser(at[2]), argument)


@contextmanager
def room_for_sockets() -> Iterator[None]:
    """Make temporary files where paths of sockets stay within their limit; `ConfigError` where nothing is writable."""
    own, before = tempfile.gettempdir(), tempfile.tempdir
    if len(os.fsencode(own)) > _MOST_BYTES:
        tempfile.tempdir = next((one for one in _SHORT_DIRECTORIES if os.access(one, os.W_OK | os.X_OK)), None)
        if tempfile.tempdir is None:
            raise ConfigError(f"TMPDIR is {own}, too long for sockets; set one of at most {_MOST_BYTES} bytes")
    try:
        yield
    finally:
        tempfile.tempdir = before
