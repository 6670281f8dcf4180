"""What ranks of the process pool run: the export of a model that each holds a part of."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from evenload.runtime.checkpoint import hf_export
from evenload.runtime.checkpoint.hf_export import export_model
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model import export_files
from evenload.runtime.optim.data_parallel import FlatBuffer
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S
from stored_families import units_of


def export_in_stages(stored: Path, directory: Path, pp: int, shard_bytes: int) -> int:
    """Export a stored model whose units lie on `pp` ranks, in flat buffers; return the most bytes that were in memory
    for one file."""
    model = AutoModelForCausalLM.from_pretrained(stored)
    mesh = create_meshes([even_layout(pp, pp=pp)], torch.device("cpu"), TIMEOUT_S).start
    buffers: list[FlatBuffer] = []
    constants: dict[str, Tensor] = {}
    units = list(units_of(model).items())
    part = -(-len(units) // pp)
    for number, (name, unit) in enumerate(units[mesh.pp_rank * part :][:part]):
        named = {n: t for n, t in unit.named_parameters(prefix=name) if n not in model.all_tied_weights_keys}
        constants |= {n: t for n, t in unit.named_buffers(prefix=name) if n in model.state_dict()}
        if named:
            values = torch.cat([t.detach().flatten() for t in named.values()])
            parts = values.split([t.numel() for t in named.values()])
            for parameter, flat in zip(named.values(), parts, strict=True):
                parameter.data = flat.view(parameter.shape)
            group = {"names": tuple(named), "parameters": tuple(named.values()), "unit": number, "decays": True}
            buffers.append(FlatBuffer(**group, is_part=False, values=values, grads=values))
    most_bytes = []
    save = hf_export.save_tensors

    def noted(tensors, file):
        most_bytes.append(sum(tensor.nbytes for tensor in tensors.values()))
        save(tensors, file)

    hf_export.save_tensors, export_files.SHARD_BYTES = noted, shard_bytes
    try:
        export_model(directory, model.config, buffers, constants, mesh)
    finally:
        hf_export.save_tensors, export_files.SHARD_BYTES = save, 5 * 10**9
    return max(most_bytes)
