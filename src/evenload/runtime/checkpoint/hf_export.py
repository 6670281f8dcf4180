"""The trained model as a Hugging Face directory: sharded safetensors, index and config.json; or a PEFT directory. Every
stage's first replica writes its own tensors, so no rank ever holds the whole model."""

import json
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from evenload.config.train_config import ModelConfig
from evenload.data.config import DataConfig
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.model.export_files import copy_tokenizer, save_tensors
from evenload.runtime.model.lora import write_adapter
from evenload.runtime.model.supported import check_supported
from evenload.runtime.model.tensor_weights import join_parts, tensor_split
from evenload.runtime.model.weight_files import stored_tensors
from evenload.runtime.optim.parameter_units import FlatBuffer


def export_run(
    output: Path,
    model: ModelConfig,
    data: DataConfig,
    hf_config: PretrainedConfig,
    buffers: list[FlatBuffer],
    mesh: Mesh,
    suffix: str = "",
) -> Path:
    """Write the model, or the adapter, into a directory of `output` with this suffix; return it. Collective."""
    if model.lora is not None:
        directory = output / f"adapter{suffix}"
        everyone: list[dict[str, Tensor]] = [{} for _ in range(mesh.num_ranks)]
        dist.all_gather_object(everyone, _own_parameters(buffers, mesh), group=mesh.control)
        if mesh.rank == 0:
            tensors = {name: tensor for part in everyone for name, tensor in part.items()}
            write_adapter(directory, tensors, model.lora, model.path)
        dist.barrier(group=mesh.control)
        return directory
    directory = output / f"model{suffix}"
    _export_model(directory, hf_config, buffers, mesh)
    if mesh.rank == 0:
        copy_tokenizer(directory, data, model.path)
    return directory


def _export_model(directory: Path, config: PretrainedConfig, buffers: list[FlatBuffer], mesh: Mesh) -> None:
    if mesh.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        config.dtype = buffers[0].values.dtype
        config.save_pretrained(directory)
    dist.barrier(group=mesh.control)
    name = f"model-{mesh.pipeline_stage + 1:05d}-of-{mesh.layout.pp:05d}.safetensors"
    experts = check_supported(config).experts
    tensors = {
        stored: view.clone().contiguous()
        for parameter_name, parameter in _own_parameters(buffers, mesh).items()
        for stored, view in stored_tensors(parameter_name, parameter, experts)
    }
    if tensors:
        save_tensors(tensors, directory / name)
    sizes = {n: (name, t.nbytes) for n, t in tensors.items()}
    everyone: list[dict[str, tuple[str, int]]] = [{} for _ in range(mesh.num_ranks)]
    dist.all_gather_object(everyone, sizes, group=mesh.control)
    if mesh.rank == 0:
        merged = {n: entry for part in everyone for n, entry in part.items()}
        index = {
            "metadata": {"total_size": sum(size for _, size in merged.values())},
            "weight_map": {n: file for n, (file, _) in sorted(merged.items())},
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    dist.barrier(group=mesh.control)


def _own_parameters(buffers: list[FlatBuffer], mesh: Mesh) -> dict[str, Tensor]:
    """What this rank writes, by name: its stages' trained parameters, on the first replica only. Collective."""
    if mesh.data_rank != 0:
        return {}
    whole = {
        # Joined by all ranks of the group, together; in host memory, where they are written from.
        name: join_parts(parameter.detach(), tensor_split(parameter), mesh.tensor).cpu()
        for buffer in buffers
        # transformers stores a tied weight once, under the embedding's name.
        if not (buffer.tied and mesh.is_last_stage)
        for name, parameter in zip(buffer.names, buffer.parameters, strict=True)
    }
    return whole if mesh.tp_rank == 0 else {}
