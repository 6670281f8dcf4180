"""`ForwardStore`: what a stage keeps where no backward follows: keys and values that rows still to come will read.

Of a document that lies in one forward pack those of the running layer, of one that is cut those of all layers until its
last pack is done. Nothing else is recorded. Counted as `ActivationStore` counts them; always less than it holds.
"""

from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

from evenload.runtime.comm.tensor_group import RowShard
from evenload.runtime.replay.blocks import StoredBlock
from evenload.runtime.replay.held_bytes import HeldBytes
from evenload.runtime.replay.store import ActivationStore, num_rows
from evenload.types.token_range import Range


class ForwardStore(ActivationStore):
    """Keys and values of one stage during one step's forwards.

    Args:
        num_tokens: as of `ActivationStore`.
        packs: by document the forward packs of the stage, on this rank, that have rows of it, ascending.
        held, shard: as of `ActivationStore`.
    """

    def __init__(
        self,
        num_tokens: dict[int, int],
        packs: Mapping[int, Sequence[int]],
        *,
        held: HeldBytes | None = None,
        shard: RowShard | None = None,
    ) -> None:
        super().__init__(num_tokens, (), held=held, shard=shard)
        self._ending: dict[int, list[int]] = {}
        for doc_id, own in packs.items():
            self._ending.setdefault(own[-1], []).append(doc_id)
        self._in_one_pack = {doc_id for doc_id, own in packs.items() if len(own) == 1}

    def open_pack(self, ranges: tuple[Range, ...]) -> None:
        rows = slice(0, num_rows(ranges))
        self.open_blocks = [StoredBlock(ranges, "replay", rows, rows, len(ranges))]

    def record(
        self,
        key: Hashable,
        rows: Tensor,
        *,
        is_product: bool = False,
        is_own_rows: bool = False,
        stays_on_device: bool = False,
    ) -> None:
        """Nobody will read it."""

    def end_layer(self, layer: int) -> None:
        """Whole documents of the open pack have been read by all rows that there are."""
        freed, ranges = 0, (r for block in self.open_blocks for r in block.ranges)
        for doc_id in {r[0] for r in ranges if r[0] in self._in_one_pack and self.is_whole(r)}:
            buffers = self._buffers.get(doc_id)
            if buffers is not None and layer in buffers.kept:
                keys, values = buffers.kept.pop(layer)
                buffers.num_bytes["keys_and_values"] -= keys.nbytes + values.nbytes
                freed += keys.nbytes + values.nbytes
        self.held.count("keys_and_values", -freed)

    def end_pack(self, pack: int) -> None:
        """After a forward pack: let go of the documents that have no rows in later ones."""
        for doc_id in self._ending.get(pack, ()):
            if (buffers := self._buffers.pop(doc_id, None)) is not None:
                self.held.count("keys_and_values", -buffers.num_bytes["keys_and_values"])
