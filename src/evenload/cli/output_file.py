"""Files that commands write: refused in words before the work, not after it."""

import os
import tempfile
from pathlib import Path

from evenload.errors import ConfigError


def calibration_cache() -> Path:
    """Where calibrated cost files are kept between runs; asked by the launcher, whose environment the user set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenload" / "calibration"


def shown_name(path: str) -> str:
    """A file's name as text that every file can hold: bytes that are no text are escaped."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


def require_writable(*paths: Path | None) -> None:
    """Check output files by opening them; None stands for an option that was not given. Files keep what they hold."""
    for path in paths:
        if path is None:
            continue
        try:
            if path.is_dir() or not path.absolute().parent.is_dir():
                raise ConfigError(f"cannot write {path}: its folder does not exist or it is a folder")
            existed = path.exists()
            path.open("ab").close()
            if not existed:
                path.resolve().unlink()  # what a link leads to
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def require_writable_directory(path: Path, setting: str) -> None:
    """Check a directory that a run will write into, without making it; `setting` is its name, for messages."""
    nearest = path.absolute()
    try:
        while not nearest.exists():
            if nearest.is_symlink():
                raise ConfigError(
                    f"{setting} is {path}, but {nearest} is a link to {os.readlink(nearest)}, which leads nowhere; "
                    "make that directory, or remove the link"
                )
            nearest = nearest.parent
        if not nearest.is_dir():
            raise ConfigError(f"{setting} is {path}, but {nearest} is a file; choose another directory")
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ConfigError(
            f"{setting} is {path}, but nothing can be written to {nearest} ({error.strerror or error}); choose another "
            "directory"
        ) from error


def write_output(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
