"""`CallbackCalls`: every callback that has begun is told of the end, and what failed first is what stops the run."""

from types import SimpleNamespace

import pytest

from evenload.cli.callback_calls import CallbackCalls
from evenload.config.sections import LogConfig
from evenload.errors import CheckpointError, ConfigError, EvenloadError
from evenload.integrations.callback import Callback
from evenload.types.layout import even_layout

TRAINER = SimpleNamespace(
    config=SimpleNamespace(log=LogConfig()),
    model=None,
    mesh=SimpleNamespace(rank=0, num_ranks=1, layout=even_layout(1)),
    steps_done=3,
)


class Closing(Callback):
    """Writes down what it is told at the end, then raises what it was given."""

    def __init__(self, told: list[str], error: EvenloadError | None = None) -> None:
        self.told, self.error = told, error

    def on_end(self, end):
        self.told.append(end.reason)
        if self.error is not None:
            raise self.error


def test_an_error_of_our_own_in_on_end_stops_no_other_one(capfd):
    told = []
    calls = CallbackCalls([Closing(told, ConfigError("no room")), Closing(told), Closing(told)], TRAINER)
    calls.end_reason = "finished"
    with pytest.raises(ConfigError, match="no room"), calls.running():
        pass
    assert told == ["finished", "failed", "failed"]
    assert "no room" not in capfd.readouterr().err


def test_what_failed_first_is_told_and_not_what_fails_at_the_end(capfd):
    told = []
    calls = CallbackCalls([Closing(told, ConfigError("no room")), Closing(told)], TRAINER)
    with pytest.raises(CheckpointError, match="disk is full"), calls.running():
        raise CheckpointError("disk is full")
    assert told == ["failed", "failed"]
    assert "warning: no room" in capfd.readouterr().err
