"""`validation.jsonl`: the losses of a run's validation data, one JSON object a pass, appended and read back.

A torn last line (a crash while writing) is left out, as in `metrics.jsonl`; `metrics_file.drop_torn_line` cuts it off
before a resumed run appends. Passes that a resumed run repeats stand there twice: the last one counts.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from evenload.errors import DataError
from evenload.types.sample import Sample
from evenload.types.validation import Validation


def append_validation(path: str | os.PathLike[str], validation: Validation) -> None:
    """Add one pass to the file, made if needed."""
    with open(path, "ab") as file:
        file.write(msgspec.json.encode(validation) + b"\n")


def append_samples(path: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Add what the model wrote, one JSON object a line, to `samples.jsonl`, made if needed."""
    lines = [msgspec.json.encode(sample) + b"\n" for sample in samples]
    if lines:
        with open(path, "ab") as file:
            file.writelines(lines)


def read_validations(path: str | os.PathLike[str]) -> tuple[Validation, ...]:
    """By ascending step; () where there is no file. `DataError` where a whole line is none."""
    try:
        *lines, _ = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return ()
    found = [_decode(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    latest = {(one.step, one.of_average): one for one in found}
    return tuple(latest[key] for key in sorted(latest))


def _decode(line: bytes, where: str) -> Validation:
    try:
        return msgspec.json.decode(line, type=Validation)
    except msgspec.MsgspecError as error:
        raise DataError(f"{where} is no pass over validation data ({error}); remove the line or restore it") from error
