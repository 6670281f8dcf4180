"""Copies to host memory under which every mistake about that memory changes results."""

import torch

from evenload.runtime.replay.host_copies import HostArena, HostRows, ThreadHostCopies


class SpoiledHostCopies(ThreadHostCopies):
    """What is freed is overwritten by the copying thread as soon as the next one to take it may do so, and tensors are
    cut into pieces of a few rows. 255 in every byte is NaN in every floating type."""

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
