"""`ValidationConfig`: the section `[validation]`, and the data settings that follow from it. Needs no torch.

Validation data are documents of their own (`sources`, `mixture`), or a share of those of `[data]`, which then are not
trained (`data.reading.held_out`).
"""

import hashlib

import msgspec

from evenload.data.config import DataConfig, MixturePart, RecordSettings
from evenload.errors import ConfigError

_OWN = ("every_steps", "at_end", "of_average", "batches", "share")
_OF_SHARE = (*_OWN, "batch_documents", "batch_tokens")


class ValidationConfig(RecordSettings):
    """Losses of other data while the model trains, by forwards alone. What is not set is as in `[data]`; all documents
    of the sources are read once, in the same order every time, and no token is left out but by `data.overlong`.

    Args:
        every_steps: after every so many steps; 0 = at the end alone.
        at_end: after the last step of the run, too.
        of_average: of the moving average of the weights (`train.ema_decay`) instead of the weights.
        batches: so many global batches of the data; unset = all of it.
        share: of the documents of `[data]`, such as 0.01, that are held out of training; chosen by a hash of source
            and place, whatever the order. One of `share`, `sources` and `mixture` is set.
        sources: files, directories, glob patterns or URLs.
        mixture: several data sets instead, each with a loss of its own; weights decide their order alone.
        batch_documents, batch_tokens: documents that are planned together; unset = as in `[data]`.
        format, record, include: as in `[data]`.
        text_column, messages_column, prompt_column, completion_column, tokens_column: likewise.
        labels_column, mask_column, ignore_columns, document_end_id, loss_on: likewise.
    """

    every_steps: int = 0
    at_end: bool = True
    of_average: bool = False
    batches: int | None = None
    share: float | None = None
    sources: tuple[str, ...] = ()
    mixture: tuple[MixturePart, ...] = ()
    batch_documents: int | None = None
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ConfigError(f"validation.every_steps is {self.every_steps}, must be 0 (at the end alone) or more")
        if self.batches is not None and self.batches < 1:
            raise ConfigError(f"validation.batches is {self.batches}, must be at least 1; leave it out for all data")
        if not self.every_steps and not self.at_end:
            raise ConfigError(
                "validation.every_steps is 0 and validation.at_end false, so nothing is ever validated; set one of "
                "them, or leave [validation] out"
            )
        if bool(self.sources) + bool(self.mixture) + (self.share is not None) != 1:
            share = "unset" if self.share is None else self.share
            raise ConfigError(
                f"validation.share is {share}, validation.sources is {list(self.sources)} and validation.mixture has "
                f"{len(self.mixture)} parts; set exactly one of them: a share of [data], which is then not trained, or "
                "other documents"
            )
        if self.share is not None:
            self._require_plain_share(self.share)
        if self.batch_documents is not None and self.batch_tokens is not None:
            raise ConfigError(
                f"validation.batch_documents is {self.batch_documents} and validation.batch_tokens is "
                f"{self.batch_tokens}; set one of them, or none"
            )

    def _require_plain_share(self, share: float) -> None:
        if not 0 < share < 1:
            raise ConfigError(f"validation.share is {share}, must be above 0 and below 1, such as 0.01")
        for field in msgspec.structs.fields(type(self)):
            if field.name not in _OF_SHARE and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"validation.share is {share} and validation.{field.name} is set, but documents of [data] are read "
                    "as it says; leave one of both out"
                )

    def is_due(self, steps_done: int) -> bool:
        """After so many steps, whether or not they are the last."""
        return bool(self.every_steps) and steps_done % self.every_steps == 0


def validation_data(data: DataConfig, validation: ValidationConfig) -> DataConfig:
    """How the validation data is read: once, by the training processes themselves.

    Raises:
        ConfigError: settings of both do not go together.
    """
    own = {name: value for name, value in msgspec.structs.asdict(validation).items() if value is not None}
    for name in _OWN:
        own.pop(name, None)
    if validation.share is None:
        own |= {"held_out_share": 0.0, "reads": "training"}
    else:
        del own["sources"], own["mixture"]
        own |= {"held_out_share": validation.share, "reads": "held_out"}
    if "batch_documents" in own or "batch_tokens" in own:
        own = {"batch_documents": None, "batch_tokens": None} | own
    try:
        return msgspec.structs.replace(data, **own, mixture_end="once", epochs=1, workers=0, prefetch_steps=0)
    except ConfigError as error:
        raise ConfigError(f"[validation]: {error}") from error


def with_held_out(data: DataConfig, validation: ValidationConfig | None) -> DataConfig:
    """The data of training, without what is held out for validation.

    Raises:
        ConfigError: `[data]` says another share, or reads what is held out.
    """
    if data.reads == "held_out":
        raise ConfigError('data.reads is "held_out", so the run would train on what is held out; leave it out')
    share = None if validation is None else validation.share
    if share is None or share == data.held_out_share:
        return data
    if data.held_out_share:
        raise ConfigError(
            f"validation.share is {share} and data.held_out_share is {data.held_out_share}; leave the latter out"
        )
    return msgspec.structs.replace(data, held_out_share=share)


def validation_digest(data: DataConfig, validation: ValidationConfig) -> str:
    """Of all that decides which losses a model has; losses under different ones are not to be compared."""
    decides = (validation_data(data, validation), validation.batches, validation.of_average)
    return hashlib.sha256(msgspec.json.encode(decides)).hexdigest()
