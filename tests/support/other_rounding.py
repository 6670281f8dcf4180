"""Another processor's float32: the last bit of what norms compute differs, as it does between vector units."""

from contextlib import AbstractContextManager
from unittest import mock

import torch


def rounded_up(share: int) -> AbstractContextManager[object]:
    """Of float32 roots, every value whose place divides by `share` is the next larger one; float64 stays as it is."""
    rsqrt = torch.rsqrt

    def other(values: torch.Tensor) -> torch.Tensor:
        result = rsqrt(values)
        if result.dtype != torch.float32 or result.is_meta:
            return result
        is_other = (torch.arange(result.numel()) % share == 0).view(result.shape)
        ulp = torch.nextafter(result.detach(), torch.tensor(torch.inf)) - result.detach()
        return result + ulp * is_other

    return mock.patch("torch.rsqrt", other)
