"""Shared memory of ranks that keep their last steps, beside what they hold anyway."""

import msgspec
import pytest

from evenload.cost.memory import static_kinds, trained_parameters_per_rank
from evenload.cost.survivor_memory import survivor_bytes, survivor_bytes_of_all
from evenload.types.layout import even_layout
from evenload.types.model_catalog import MODELS


def test_masters_are_the_weights_and_are_not_kept_twice() -> None:
    model, layout = MODELS["llama-7b"], even_layout(32, dp=4, pp=2)
    assert model.bytes_per_element == 2
    assert survivor_bytes(model, layout).tolist() == (2 * static_kinds(model, layout)[:, 2]).tolist()


@pytest.mark.parametrize(("element", "expected"), [(2, 24), (4, 24), (8, 48)])
def test_bytes_a_parameter(element, expected) -> None:
    model, layout = msgspec.structs.replace(MODELS["llama-7b"], bytes_per_element=element), even_layout(32, pp=2, tp=2)
    trained = trained_parameters_per_rank(model, layout)
    assert survivor_bytes(model, layout).tolist() == (expected * trained).tolist()
    assert survivor_bytes_of_all(model, layout) == 2 * expected * trained.sum()
