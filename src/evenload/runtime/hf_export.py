"""The trained model as a Hugging Face directory: sharded safetensors, index and config.json.

Every stage's first replica writes its own tensors, so no rank ever holds the whole model.
"""

import json
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from transformers import PretrainedConfig

from evenload.runtime.mesh import Mesh
from evenload.runtime.parameter_units import FlatBuffer


def export_hf(directory: Path, config: PretrainedConfig, buffers: list[FlatBuffer], mesh: Mesh) -> None:
    """Write `directory` so that `AutoModelForCausalLM.from_pretrained(directory)` loads it. Collective."""
    if mesh.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        config.dtype = buffers[0].values.dtype
        config.save_pretrained(directory)
    dist.barrier(group=mesh.control)
    files = mesh.layout.pp
    name = f"model-{mesh.pp_rank + 1:05d}-of-{files:05d}.safetensors"
    tensors = {}
    if mesh.data_rank == 0:
        for buffer in buffers:
            # transformers stores a tied weight once, under the embedding's name.
            if not (buffer.tied and mesh.is_last_stage):
                pairs = zip(buffer.names, buffer.parameters, strict=True)
                tensors |= {n: p.detach().clone().contiguous() for n, p in pairs}
        save_file(tensors, directory / name, metadata={"format": "pt"})
    sizes = {n: (name, t.nbytes) for n, t in tensors.items()}
    everyone: list[dict[str, tuple[str, int]]] = [{} for _ in range(mesh.layout.world_size)]
    dist.all_gather_object(everyone, sizes, group=mesh.control)
    if mesh.rank == 0:
        merged = {n: entry for part in everyone for n, entry in part.items()}
        index = {
            "metadata": {"total_size": sum(size for _, size in merged.values())},
            "weight_map": {n: file for n, (file, _) in sorted(merged.items())},
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    dist.barrier(group=mesh.control)
