"""Files that commands write: refused in words before the work, not after it."""

from pathlib import Path

from evenload.errors import ConfigError


def require_writable(*paths: Path | None) -> None:
    """Check the folders of output files; None stands for an option that was not given.

    Raises:
        ConfigError: a folder that does not exist, or a path that is a folder.
    """
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"cannot write {path}: its folder does not exist or it is a folder")


def write_output(path: Path, content: bytes) -> None:
    """Write a file.

    Raises:
        ConfigError: it cannot be written.
    """
    require_writable(path)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
