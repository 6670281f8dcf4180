"""What ranks of the process pool run: loaders that read together."""

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from packed_cases import batch_fingerprint, documents_of, error_of, loader_of


def read_together(root, settings):
    """This rank's documents by step, fingerprints, the state at the end."""
    with loader_of(root, **settings) as loader:
        steps = [list(step) for step in loader.steps()]
        documents = [[document for batch in step for document in documents_of(batch)] for step in steps]
        return documents, [[batch_fingerprint(batch) for batch in step] for step in steps], loader.state_dict()


def message_of_error(root, settings):
    """What a loader that fails says on this rank."""
    return error_of(lambda: list(loader_of(root, **settings)))


def read_in_group(root, settings):
    """Two groups of two ranks, each with all data."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with loader_of(root, group=groups[rank // 2], **settings) as loader:
        return loader.rank, loader.world_size, [document for batch in loader for document in documents_of(batch)]


def save_and_load(root, directory):
    """What is left after the first step; what another loader gives that loaded the checkpoint."""
    with loader_of(root, epochs=1) as loader, loader_of(root, epochs=1) as other:
        assert isinstance(loader, Stateful)
        steps = loader.steps()
        next(steps)
        dcp.save({"dataloader": loader}, checkpoint_id=str(directory))
        rest = [batch_fingerprint(batch) for step in steps for batch in step]
        dcp.load({"dataloader": other}, checkpoint_id=str(directory))
        return rest, [batch_fingerprint(batch) for batch in other]
