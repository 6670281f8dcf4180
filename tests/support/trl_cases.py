"""TRL's `SFTTrainer` with our loader, for tests in this process and on several ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import trl
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from evenload.check.smaller_run import Float64Casts
from evenload.integrations.trainer import PackedTrainerMixin
from trainer_cases import PLAIN
from trainer_engine_cases import Recording


@contextmanager
def kernel_in_float64() -> Iterator[None]:
    """TRL's product of the head adds gradients up in float32, in a backward that no module calls; not here."""
    backward = ChunkedLogProbFunction.backward

    def exact(*arguments):
        with Float64Casts():
            return backward(*arguments)

    with mock.patch.object(ChunkedLogProbFunction, "backward", staticmethod(exact)):
        yield


class PackedSFTTrainer(PackedTrainerMixin, trl.SFTTrainer):
    """TRL's own."""


class RecordingSFTTrainer(Recording, PackedSFTTrainer):
    """Writes down what it trains."""

    def train(self, *arguments, **settings):
        with kernel_in_float64():
            return super().train(*arguments, **settings)


def sft_arguments(output, **changes):
    """As `trainer_cases.arguments`, of TRL."""
    return trl.SFTConfig(output_dir=str(output), **(PLAIN | {"bf16": False} | changes))
