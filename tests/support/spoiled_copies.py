"""Copies to host memory under which every mistake about that memory changes results."""

import torch

from evenload.runtime.replay.host_copies import HostArena, HostRows, ThreadHostCopies


class SpoiledHostCopies(ThreadHostCopies):
    """Freed memory is overwritten (255 = NaN in every type) as soon as it may be taken; tensors are cut into pieces."""

    def __init__(self) -> None:
        super().__init__(HostArena(_spoiled_segment, segment_bytes=8192, smallest_piece_bytes=512))
        self.num_pieces = self.num_tensors = 0

    def to_host(self, tensor):
        host, copy = super().to_host(tensor)
        self.num_tensors += 1
        self.num_pieces += len(host.pieces)
        return host, copy

    def free(self, host: HostRows) -> None:
        self._thread.submit(_spoil, host.pieces).add_done_callback(lambda done: done.result())
        super().free(host)


def _spoil(pieces) -> None:
    for piece in pieces:
        piece.view(torch.uint8).fill_(255)


def _spoiled_segment(num_bytes: int) -> torch.Tensor:
    return torch.full((num_bytes,), 255, dtype=torch.uint8)
