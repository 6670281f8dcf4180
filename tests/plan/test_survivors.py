"""What lives on when ranks die: by hand, and against a state that is really spread over ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.cost.memory import static_kinds
from evenload.errors import ConfigError
from evenload.plan.reconfiguration.survivors import Buddies, buddy_bytes, surviving_holders
from evenload.types.layout import even_layout
from evenload.types.model_catalog import MODELS

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2))


def test_a_dead_replica_leaves_weights_and_takes_its_shards() -> None:
    """dp=2 pp=2: ranks 0, 1 are the first stage's replicas, 2 and 3 the second's."""
    found = surviving_holders(even_layout(4, dp=2, pp=2), {3})
    assert not found.hold_everything
    assert found.places[0].shards == ((0,), (1,))
    assert found.places[1].weights == (2,)
    assert found.places[1].shards == ((2,), ())
    assert list(found.lost()) == ["1 of 2 shards of the optimizer of layers 2-3"]


def test_a_dead_stage_is_gone_whole() -> None:
    found = surviving_holders(even_layout(5, pp=2, virtual=2), {0})
    assert list(found.lost()) == ["weights and optimizer state of layers 0-1, 3-3"]


def test_a_buddy_brings_everything_back() -> None:
    layout = even_layout(4, dp=2, pp=2)
    found = surviving_holders(layout, {3}, Buddies(copies=1))
    assert found.hold_everything
    assert found.places[1].shards == ((2,), (0,)), "the rank after 3 is 0"
    assert not list(found.lost())
    assert not surviving_holders(layout, {3, 0}, Buddies(copies=1)).hold_everything, "owner and buddy"
    assert surviving_holders(layout, {2, 3}, Buddies(copies=1, spacing=2)).hold_everything, "a whole machine of two"


@given(sizes=SIZES, copies=st.integers(0, 3), spacing=st.integers(1, 4), data=st.data())
def test_what_is_said_to_be_held_is_what_ranks_hold(sizes, copies, spacing, data) -> None:
    """Every rank's memory written out: its weights by place, its shard, and the shards of whom it is a buddy."""
    dp, cp, pp, tp = sizes
    layout, buddies = even_layout(3, dp=dp, cp=cp, pp=pp, tp=tp), Buddies(copies, spacing)
    dead = data.draw(st.sets(st.integers(0, layout.world_size - 1), max_size=layout.world_size))
    memory: dict[int, set[tuple]] = {rank: set() for rank in range(layout.world_size)}
    everything = set()
    for place in np.ndindex(pp, dp, cp, tp):
        pp_rank, dp_rank, cp_rank, tp_rank = map(int, place)
        rank = layout.global_rank(pp_rank=pp_rank, dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=tp_rank)
        shard = (pp_rank, tp_rank, dp_rank * cp + cp_rank)
        everything.add(shard)
        memory[rank].add(shard)
        for number in range(1, copies + 1):
            memory[(rank + number * spacing) % layout.world_size].add(shard)
    living = [held for rank, held in memory.items() if rank not in dead]
    left = set().union(*living) if living else set()
    found = surviving_holders(layout, dead, buddies)
    assert found.hold_everything == (left == everything)
    for place in found.places:
        for data_rank, holders in enumerate(place.shards):
            shard = (place.pp_rank, place.tp_rank, data_rank)
            assert set(holders) == {rank for rank in memory if shard in memory[rank] and rank not in dead}
            assert len(holders) == len(set(holders))
    assert bool(list(found.lost())) == (not found.hold_everything)


def test_copies_cost_what_a_shard_has() -> None:
    """bf16: masters, which are the weights, and moments; fp32: weights and moments."""
    model, layout = MODELS["llama-7b"], even_layout(32, dp=4, pp=2)
    assert buddy_bytes(model, layout, 2).tolist() == (2 * static_kinds(model, layout)[:, 2]).tolist()


def test_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dead ranks \[4\] of layout dp=4 with 4 ranks"):
        surviving_holders(even_layout(4, dp=4), {4})
