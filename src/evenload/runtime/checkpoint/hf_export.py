"""The trained model as a Hugging Face directory: sharded safetensors, index and config.json; or a PEFT directory. Every
stage's first replica writes its own tensors, so no rank ever holds the whole model."""

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from evenload.config.train_config import ModelConfig
from evenload.data.config import DataConfig
from evenload.runtime.comm.mesh import Mesh, gather_from_all
from evenload.runtime.model.export_files import copy_tokenizer, save_tensors, shard_units, write_index
from evenload.runtime.model.hf_model import empty_model
from evenload.runtime.model.lora import write_adapter
from evenload.runtime.model.tensor_weights import join_parts, tensor_split
from evenload.runtime.model.weight_conversion import stored_tensors
from evenload.runtime.optim.data_parallel import FlatBuffer


def export_run(
    output: Path,
    model: ModelConfig,
    data: DataConfig,
    hf_config: PretrainedConfig,
    buffers: list[FlatBuffer],
    constants: Mapping[str, Tensor],
    mesh: Mesh,
    suffix: str = "",
) -> Path:
    """Write the model, or the adapter, into a directory of `output` with this suffix; return it. `constants`: what this
    rank's stages store and do not train, by name. Collective."""
    if model.lora is not None:
        directory = output / f"adapter{suffix}"
        own = {n: t for unit in _own_units(buffers, {}, mesh) for n, t in _joined(unit, mesh).items()}
        everyone = gather_from_all(own, mesh, "the trained adapters")
        if mesh.rank == 0:
            tensors = {name: tensor for part in everyone for name, tensor in part.items()}
            write_adapter(directory, tensors, model.lora, model.path)
        dist.barrier(group=mesh.control)
        return directory
    directory = output / f"model{suffix}"
    export_model(directory, hf_config, buffers, constants, mesh)
    if mesh.rank == 0:
        copy_tokenizer(directory, data, model.path)
    return directory


def export_model(
    directory: Path, config: PretrainedConfig, buffers: list[FlatBuffer], constants: Mapping[str, Tensor], mesh: Mesh
) -> None:
    """Write what transformers' `save_pretrained` would; a rank holds the tensors of one file at a time. Collective."""
    whole, units = empty_model(config), _own_units(buffers, constants, mesh)
    if mesh.rank == 0:
        config.dtype, config.architectures = buffers[0].values.dtype, [type(whole).__name__]
        config.save_pretrained(directory)
    dist.barrier(group=mesh.control)
    shards = shard_units([sum(t.nbytes for t in unit.values()) * mesh.layout.tp for unit in units])
    counts = gather_from_all(len(shards) if mesh.tp_rank == 0 else 0, mesh, "the number of exported files")
    files: dict[str, tuple[str, int]] = {}
    for number, shard in enumerate(shards, 1 + sum(counts[: mesh.rank])):
        tensors: dict[str, Tensor] = {}
        for unit in shard:
            tensors |= stored_tensors(whole, _joined(units[unit], mesh))
        if mesh.tp_rank == 0:
            file = f"model-{number:05d}-of-{sum(counts):05d}.safetensors"
            save_tensors(tensors, directory / file)
            files |= {name: (file, tensor.nbytes) for name, tensor in tensors.items()}
    written = gather_from_all(files, mesh, "the exported files")
    if mesh.rank == 0:
        write_index(directory, {name: entry for part in written for name, entry in part.items()})
    dist.barrier(group=mesh.control)


def _own_units(buffers: list[FlatBuffer], constants: Mapping[str, Tensor], mesh: Mesh) -> list[Mapping[str, Tensor]]:
    """What this rank's tensor-parallel group writes, by name, on the first replica only: trained parameters unit by
    unit, then what is not trained."""
    if mesh.data_rank != 0:
        return []
    units: dict[int, dict[str, Tensor]] = {}
    for buffer in buffers:
        # transformers stores a tied weight once, under the embedding's name.
        if not (buffer.tied and mesh.is_last_stage):
            units.setdefault(buffer.unit, {}).update(zip(buffer.names, buffer.parameters, strict=True))
    return [unit for unit in (*units.values(), constants) if unit]


def _joined(unit: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Whole tensors in host memory, on the first rank of a tensor-parallel group. Collective in it."""
    joined = {name: join_parts(t.detach(), tensor_split(t), mesh.tensor).cpu() for name, t in unit.items()}
    return joined if mesh.tp_rank == 0 else {}
