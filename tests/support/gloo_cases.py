"""What ranks of the process pool run: loaders that read together, and data-parallel training from them."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from evenload.errors import EvenloadError
from packed_cases import batch_fingerprint, documents_of, gradient_of, loader_of, packed_loss, tiny_model


def read_together(root, settings, stop=None, state=None):
    """This rank's documents by step, fingerprints, the state at the end."""
    loader = loader_of(root, **settings)
    if state is not None:
        loader.load_state_dict(state)
    documents, prints = [], []
    for index, step in enumerate(loader.steps()):
        documents.append([document for batch in step for document in documents_of(batch)])
        prints.append([batch_fingerprint(batch) for batch in step])
        if index + 1 == stop:
            break
    state = loader.state_dict()
    loader.close()
    return documents, prints, state


def message_of_error(root, settings):
    """What a loader that fails says on this rank."""
    try:
        list(loader_of(root, **settings))
    except EvenloadError as error:
        return str(error)
    return ""


def train_with_ddp(root, settings, num_steps):
    """Losses (summed over ranks) and gradients of steps under DDP, weights unchanged; the documents of each step."""
    model = tiny_model()
    wrapped = DistributedDataParallel(model)
    outcome = []
    loader = loader_of(root, **settings)
    for _, step in zip(range(num_steps), loader.steps(), strict=False):
        wrapped.zero_grad()
        total = torch.zeros(1, dtype=torch.float64)
        for batch in step:
            loss = packed_loss(wrapped, batch)
            # DDP averages over ranks; the loss is divided by the label tokens of all of them already.
            (loss * dist.get_world_size()).backward()
            total += loss.detach()
        dist.all_reduce(total)
        documents = [document for batch in step for document in documents_of(batch)]
        outcome.append((total.item(), gradient_of(model), documents))
    loader.close()
    return outcome


def read_in_group(root, settings):
    """Two groups of two ranks, each with all data."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    loader = loader_of(root, group=groups[rank // 2], **settings)
    documents = [document for batch in loader for document in documents_of(batch)]
    answer = loader.rank, loader.world_size, documents
    loader.close()
    return answer


def save_and_load(root, directory):
    """What is left after the first step; what another loader gives that loaded the checkpoint."""
    settings = {"format": "torchtitan", "epochs": 1}
    loader = loader_of(root, **settings)
    assert isinstance(loader, Stateful)
    steps = loader.steps()
    next(steps)
    dcp.save({"dataloader": loader}, checkpoint_id=str(directory))
    rest = [inputs["input"].tolist() for step in steps for inputs, _ in step]
    other = loader_of(root, **settings)
    dcp.load({"dataloader": other}, checkpoint_id=str(directory))
    return rest, [inputs["input"].tolist() for inputs, _ in other]
