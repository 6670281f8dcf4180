"""`forward_losses`: the losses of a step's documents, by its forwards alone; nothing of training changes.

    F   receive hidden states, run the forward pack, send hidden states on; the last stage runs the head at once

It follows a plan without backwards (`stepplan.forward_only`) through the channels, groups and packs of training, under
every layout that trains. Kept are keys and values that rows still to come read (`replay.forward_store`), so it holds
less than the step that the plan was made for. Price: that of forwards and of the head's product, about a third of a
step, with planning and reading that nothing hides.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.device import to_device
from evenload.runtime.executor import open_channels
from evenload.runtime.replay.forward_store import ForwardStore
from evenload.runtime.replay.held_bytes import HeldBytes
from evenload.runtime.replay.rank_packs import RankStep
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.token_range import Range


def forward_losses(
    step: RankStep, stages: Mapping[int, PipelineStage], mesh: Mesh, stream: torch.cuda.Stream | None = None
) -> Tensor:
    """This rank's share of the sum of label losses of every document of a plan without backwards, in the plan's order;
    float64[n] on the CPU. The shares of all ranks add up to the sums. Collective with the ranks of its pipeline.

    Args:
        stages: this rank's virtual stages by index, with whole weights.
        stream: on which receives are posted; None on a CPU.
    """
    plan, mine = step.plan, step.packs
    packs = plan.pack_plans[mesh.dp_rank]
    actions = plan.schedules[mesh.dp_rank].ranks[mesh.pp_rank]
    document_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
    place = {document.doc_id: at for at, document in enumerate(plan.documents)}
    packs_of: dict[int, dict[int, list[int]]] = {number: defaultdict(list) for number in stages}
    for action in actions:
        for piece in packs.forward[action.pack].slices:
            packs_of[action.stage][piece.doc_id].append(action.pack)
    held, stored = HeldBytes(), mine.stored_tokens()
    stores = {
        number: ForwardStore(stored, packs_of[number], held=held, shard=stage.row_shard)
        for number, stage in stages.items()
    }
    for stage in stages.values():
        stage.begin_step(document_tokens)
    sums = torch.zeros(len(plan.documents), dtype=torch.float64, device=mesh.device)
    # All ranks of a tensor-parallel group know the losses, and one reports them.
    reports = mesh.tp_rank == 0
    channels = open_channels(step, actions, stages, mesh, stream)
    for at, action in enumerate(actions):
        mesh.watch.note(action)
        channels.before_action(at)
        stage, store = stages[action.stage], stores[action.stage]
        batch = mine.load(packs.forward[action.pack])
        hidden = stage.forward(batch, channels.receive_hidden(action.stage, action.pack), store)
        if stage.model.is_last:
            losses = stage.losses(batch, hidden)
            if reports and batch.ranges:
                sums.index_add_(0, _documents_of_rows(batch.ranges, place, mesh.device), losses.double())
        channels.send_hidden(action.stage, action.pack, hidden)
        store.end_pack(action.pack)
    channels.close()
    for store in stores.values():
        store.check_empty()
    assert held.held_bytes == 0, f"{held.held_by_kind} bytes are counted as held by no document"
    return sums.cpu()


def _documents_of_rows(ranges: tuple[Range, ...], place: Mapping[int, int], device: torch.device) -> Tensor:
    """Of every row of a pack the place of its document in the plan; int64[T]."""
    documents = np.array([place[r.doc_id] for r in ranges], np.int64)
    return to_device(torch.from_numpy(np.repeat(documents, [r.stop - r.start for r in ranges])), device)
