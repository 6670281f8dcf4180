"""Memory of a switch, by hand: what both layouts hold, once where it is the same."""

import msgspec
import pytest

from cost_samples import sample_model
from evenload.cost.memory import embedding_parameters, layer_parameters, optimizer_bytes_per_parameter, static_bytes
from evenload.plan.layouts.moves import SwitchPieces, model_pieces
from evenload.plan.layouts.switch_prices import switch_memory
from evenload.types.layout import even_layout

MODEL = sample_model()
LAYERS = MODEL.num_layers
STATE = optimizer_bytes_per_parameter(MODEL)
EACH = MODEL.bytes_per_element + max(MODEL.bytes_per_element, 4)
WHOLE = 2 * embedding_parameters(MODEL, 1) + MODEL.norm_parameters + LAYERS * layer_parameters(MODEL, 1)
PIECES = model_pieces(MODEL, 1)
SENT = SwitchPieces(pieces=PIECES, shared=frozenset(), ranks_per_machine=8)
SHARED = msgspec.structs.replace(SENT, shared=frozenset(range(len(PIECES))))


def test_a_layout_that_stays_takes_what_it_takes():
    layout = even_layout(LAYERS, pp=2, dp=2)
    found = switch_memory(SHARED, layout, layout)
    assert found.left_bytes == 0
    assert found.switch_bytes == pytest.approx(int(static_bytes(MODEL, layout).max()), rel=1e-3)


def test_one_rank_becomes_two_replicas_and_back():
    """Alone it has all optimizer state; beside another one it has half, which it had before or keeps."""
    alone, two = even_layout(LAYERS), even_layout(LAYERS, dp=2)
    grown = switch_memory(SHARED, alone, two)
    assert grown.switch_bytes == WHOLE * (EACH + STATE)
    assert grown.left_bytes == pytest.approx(WHOLE * STATE / 2, rel=1e-3)
    shrunk = switch_memory(SHARED, two, alone)
    assert shrunk.switch_bytes == WHOLE * (EACH + STATE)
    # Rank 1 leaves its half behind; rank 0 nothing.
    assert shrunk.left_bytes == pytest.approx(WHOLE * STATE / 2, rel=1e-3)


def test_without_shared_memory_what_is_kept_is_copied():
    """Alone to two replicas: the half that rank 0 keeps lies twice while it is copied."""
    alone, two = even_layout(LAYERS), even_layout(LAYERS, dp=2)
    found = switch_memory(SENT, alone, two)
    assert found.switch_bytes == pytest.approx(WHOLE * (EACH + 1.5 * STATE), rel=1e-3)
    assert found.left_bytes == pytest.approx(WHOLE * STATE, rel=1e-3)
    still = switch_memory(SENT, two, two)
    assert still == switch_memory(SHARED, two, two)


def test_what_a_budget_leaves_out_is_copied_and_the_rest_is_not():
    """Alone to two replicas, all but the embedding shared: half of its state lies twice."""
    alone, two = even_layout(LAYERS), even_layout(LAYERS, dp=2)
    some = msgspec.structs.replace(SENT, shared=SHARED.shared - {0})
    found = switch_memory(some, alone, two)
    half = -(-PIECES[0].num_elements // 2) * STATE
    assert found.switch_bytes == switch_memory(SHARED, alone, two).switch_bytes + half
