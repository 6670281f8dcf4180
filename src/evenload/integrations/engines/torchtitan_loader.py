"""`PackedDataLoader`: a `PackedLoader` under torchtitan's contract of a data loader.

    dataloader=PackedDataLoader.Config(loader={"data": "corpus", "batch_tokens": 262_144})

torchtitan builds it, moves its batches and saves its state. What a batch is depends on torchtitan's version: [1, T] up
to its release 0.3.0, [T] afterwards (`resolve_format`). Attention learns the boundaries of documents from `positions`,
which begin at 0 in every document: torchtitan makes the `BlockMask` or the `VarlenMetadata` of its attention from them.

The state is the same on every rank and says nothing of ranks, so a checkpoint goes on under another number of
data-parallel ranks, which torchtitan's own loaders refuse. It is one string, because torch.distributed.checkpoint asks
for the same keys in saving and loading.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.distributed as dist

from evenload.errors import ConfigError, DataError
from evenload.integrations.packed_loader import PackedLoader
from evenload.integrations.packed_step import PackedStep

try:
    import tyro  # type: ignore[missing-import]
    from torchtitan.components.dataloader import (  # type: ignore[missing-import]
        BaseDataLoader,
        DataloaderExhaustedError,
    )
except ImportError as err:
    raise ConfigError(
        f"torchtitan cannot be imported ({err}); install it: pip install 'evenload[torchtitan]'. Its batches alone "
        'need no torchtitan: PackedLoader(format="torchtitan_batched")'
    ) from err

_STATE = "evenload"
_OF_THE_MESH = {
    "rank": "torchtitan's mesh says which rank this is",
    "world_size": "torchtitan's mesh says how many ranks there are",
    "group": "torchtitan's mesh says which ranks share a global batch",
    "engine": "it is torchtitan",
    "format": "the installed torchtitan says which one it takes",
    "equal_micro_batches": "sharded parameters are gathered in every pass, so all ranks make equally many",
    "accept_slices": "torchtitan's attention reads the keys of its own micro-batch alone",
    "evaluation": "not tried with torchtitan's Validator, which takes a loader of its own in validator.dataloader",
}


class PackedDataLoader(BaseDataLoader):
    """Micro-batches of this data-parallel rank, epoch after epoch.

    Args:
        config: see `Config`.
        dp_world_size, dp_rank: as torchtitan has them.
        tokenizer: torchtitan's; its directory is our tokeniser's where `config.loader` names none.
        sizes: of torchtitan's batches; only the longest context is read (`seq_len`, later `max_context_length`).

    Attributes:
        loader: the `PackedLoader`.

    Raises:
        ConfigError: settings that cannot work, with the reason. Collective in training.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """
        Args:
            loader: arguments of `PackedLoader`. `max_tokens` is torchtitan's sequence length where it is left out.
        """

        loader: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, tokenizer: Any = None, **sizes: Any) -> None:
        settings = _loader_settings(config.loader, tokenizer, sizes)
        together = dist.is_initialized() and dp_world_size == dist.get_world_size()
        # With tensor or pipeline ranks nobody hands us the group that shares a batch: each reads by itself then.
        place: dict[str, Any] = {} if together else {"rank": dp_rank, "world_size": dp_world_size}
        self.loader = PackedLoader(**(settings | place))
        if (self.loader.rank, self.loader.world_size) != (dp_rank, dp_world_size):
            raise ConfigError(
                f"torchtitan calls this data-parallel rank {dp_rank} of {dp_world_size}, torch.distributed rank "
                f"{self.loader.rank} of {self.loader.world_size}; this mesh is not supported"
            )
        self._step: PackedStep | None = None
        self._given = 0

    def begin_step(self) -> int:
        """Make the next step ready; how many micro-batches it has left, the same on all ranks.

        Raises:
            DataloaderExhaustedError: no step is left.
            DataError: nothing in the step has a loss, so that torchtitan would divide by 0.
        """
        step = self._next_step()
        if step is None:
            raise DataloaderExhaustedError
        if not step.num_label_tokens:
            raise DataError(
                f"step {step.plan.step} has no token with a loss, and torchtitan divides by their number (documents "
                f"{[document.doc_id for document in step.plan.documents[:5]]} ...); look at the labels of the source, "
                "or make batches larger"
            )
        return len(step) - self._given

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while (step := self._next_step()) is not None:
            inputs, labels = step.batches[self._given]
            self._given += 1
            # Of its own: torchtitan writes the tensors on the device back into it.
            yield {"input": inputs["input"], "positions": inputs["positions"]}, labels

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands between two steps, in one string; the same on all ranks."""
        if self._step is not None and self._given < len(self._step):
            raise ConfigError(
                f"state_dict() inside step {self._step.plan.step}, after {self._given} of {len(self._step)} "
                "micro-batches; save between two steps"
            )
        return {_STATE: json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was made, also under another number of ranks.

        Raises:
            ConfigError: a state of torchtitan's own loaders, or of other data.
        """
        if _STATE not in state_dict:
            raise ConfigError(
                f"the checkpoint's loader has keys {sorted(state_dict)}, so it is none of ours; to train on from its "
                'weights alone set checkpoint.exclude_from_loading = ["dataloader"]'
            )
        self.loader.load_state_dict(json.loads(state_dict[_STATE]))
        self._step, self._given = None, 0

    def close(self) -> None:
        """End threads and worker processes."""
        self.loader.close()

    def _next_step(self) -> PackedStep | None:
        """The step that has micro-batches left, or the next one."""
        if self._step is not None and self._given < len(self._step):
            return self._step
        self._step = next(self.loader.steps(), None)
        if self._step is None and not self.loader.has_ended:
            self._step = next(self.loader.steps(), None)
        self._given = 0
        return self._step


def _loader_settings(given: dict[str, Any], tokenizer: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the `PackedLoader`, without its place."""
    for name, reason in _OF_THE_MESH.items():
        if name in given:
            raise ConfigError(f"loader[{name!r}] is not yours to set: {reason}; leave it out")
    if "data" not in given:
        raise ConfigError('PackedDataLoader needs loader={"data": ...}, what PackedLoader reads')
    longest = sizes.get("seq_len", sizes.get("max_context_length"))
    if longest is None:
        raise ConfigError(
            f"this torchtitan builds its loader with {sorted(sizes)}, and neither seq_len nor max_context_length; "
            "0.3.0 is the version that is tested"
        )
    settings: dict[str, Any] = {"max_tokens": longest, "engine": "torchtitan"} | given
    if settings["max_tokens"] > longest:
        raise ConfigError(
            f"max_tokens is {settings['max_tokens']}, torchtitan's sequence length {longest}: its rotary embedding has "
            f"no positions beyond; set training.seq_len = {settings['max_tokens']}, or lower max_tokens"
        )
    path = getattr(tokenizer, "tokenizer_path", None)
    if path is not None:
        settings.setdefault("tokenizer", path)
    return settings
