"""Which modules of a model become fused ones in a run (`fused_norms`, `fused_elementwise`)."""

from collections.abc import Sequence

import torch
from torch import nn

from evenload.config.sections import RunConfig
from evenload.runtime.model.fused_elementwise import fuse_elementwise, require_compiler
from evenload.runtime.model.fused_norms import fuse_norms
from evenload.types.architectures.architecture import Architecture


def fuse_modules(
    modules: Sequence[nn.Module | None], architecture: Architecture, run: RunConfig, device: torch.device
) -> None:
    """Fuse what a run's settings say, in place; `ConfigError` where the device lacks what compiles it."""
    if run.fuses_norms:
        fuse_norms(modules, architecture)
    if run.fuses_elementwise:
        require_compiler(device)
        fuse_elementwise(modules, architecture)
