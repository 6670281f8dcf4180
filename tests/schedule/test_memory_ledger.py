"""Bytes that ranks hold, event by event and in timelines."""

import numpy as np

from cost_samples import sample_coefficients, sample_model
from evenload.cost.memory import ReplicaPacks, bytes_by_kind
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_pricing import pipeline_tasks
from evenload.schedule.packflow import packflow_static
from evenload.schedule.simulate import memory_ledger, simulate, to_timeline
from evenload.types.columns import SliceColumns
from evenload.types.layout import even_layout
from evenload.types.timeline import MEMORY_KINDS
from pipeline_cases import columns_of, random_tasks


def test_hand_ledger_event_by_event():
    """One stage, three layers, bf16: document 0 of 10 tokens in two forward and two backward slices, document 1 of 3.

    A token keeps 3·152 + 16 = 472 of activations and 48 of K and V (of all the document's tokens, at its first slice);
    a cut document adds 96 a token of dK and dV. Buffers a token: 96 forward; 224 backward, and logits 320.
    Each row: activations, K and V, dK and dV, layer buffers, logits, at the start and at the end of an action.
    """
    forward = SliceColumns.from_ranges([[(0, 0, 6)], [(0, 6, 10), (1, 0, 3)]])
    backward = SliceColumns.from_ranges([[(0, 6, 10)], [(0, 0, 6), (1, 0, 3)]])
    packs, layout = ReplicaPacks(forward, backward, np.array([10, 3])), even_layout(3)
    tasks = pipeline_tasks(PackCosts(sample_model(), sample_coefficients(), layout), packs)
    actions = columns_of("0F0 0F1 0B0 0B1")
    kinds = bytes_by_kind(sample_model(), layout, tasks, packs)
    result = memory_ledger(kinds, actions)
    names = ("activations_replay", "keys_and_values", "key_value_gradients", "layer_buffers", "head_logits")
    assert result[:, [MEMORY_KINDS.index(name) for name in names]].tolist() == [
        [0, 0, 0, 0, 0],
        [6 * 472, 480, 0, 6 * 96, 0],
        [6 * 472, 480, 0, 0, 0],
        [13 * 472, 624, 0, 7 * 96, 0],
        [13 * 472, 624, 0, 0, 0],
        [13 * 472, 624, 960, 4 * 224, 4 * 320],
        [9 * 472, 624, 960, 0, 0],
        [9 * 472, 624, 960, 9 * 224, 9 * 320],
        [0, 0, 0, 0, 0],
    ]
    static = result[:, [MEMORY_KINDS.index(name) for name in ("weights", "gradients", "optimizer_state")]]
    parameters = 3 * 592 + 2 * 256 + 8
    assert (static == [2 * parameters, 4 * parameters, 12 * parameters]).all()
    simulation = simulate(tasks, actions)
    timeline = to_timeline(tasks, actions, simulation, 0, simulation.makespan_s)
    assert result.sum(axis=1).tolist() == timeline.memory_bytes.tolist()
    assert result.sum(axis=1).max() == simulation.peak_bytes[0]


def test_samples_hold_the_simulated_peak_in_time_order():
    rng = np.random.default_rng(0)
    for _ in range(100):
        tasks = random_tasks(rng)
        actions = packflow_static(tasks, inject=False)
        simulation = simulate(tasks, actions)
        timeline = to_timeline(tasks, actions, simulation, dp_rank=0, step_time_s=simulation.makespan_s)
        for rank, peak in enumerate(simulation.peak_bytes):
            own = timeline.memory_rank == rank
            assert timeline.memory_bytes[own].max() == peak
            assert (np.diff(timeline.memory_time_s[own]) >= 0).all()
        assert timeline.num_tasks == len(actions.kind)
