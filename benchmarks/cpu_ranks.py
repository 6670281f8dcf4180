"""CPU processes that train or run packs, as benchmarks of the runtime start them: runs on random tokens, stages."""

import functools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing
from transformers import LlamaConfig

from evenload.attention.backends import select_backend
from evenload.cost.coefficients import CostCoefficients, PassCoefficients
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.model.hf_model import build_rank_models, build_stage_model
from evenload.runtime.optim.data_parallel import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.cluster import LinkSpec
from setups import ROOT  # puts tests/support on the path

from token_run import write_run, write_token_run  # isort: skip

__all__ = ["COSTS", "ROOT", "cpu_rank", "leave", "llama", "rank_stages", "spawn_ranks", "write_run", "write_token_run"]

# Of one CPU core and a small model; what matters is the ratio of work to messages.
COSTS = CostCoefficients(
    source="analytic",
    device="cpu",
    peak_flops_per_s=2e10,
    forward=PassCoefficients(linear_s_per_token=1e-4, attention_s_per_pair=4e-8, slice_s=1e-4, pack_s=1e-3),
    backward=PassCoefficients(linear_s_per_token=2e-4, attention_s_per_pair=1e-7, slice_s=2e-4, pack_s=2e-3),
    p2p_bandwidth_bytes_per_s=1e9,
    p2p_latency_s=1e-4,
    reduce_bandwidth_bytes_per_s=1e9,
    reduce_latency_s=1e-4,
    intra_node=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-4),
    devices_per_node=4,
)


def llama(hidden: int, layers: int, *, heads: int = 8, key_heads: int = 4, vocabulary: int = 4096) -> LlamaConfig:
    """A small Llama without tied embeddings."""
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=1 << 17,
        tie_word_embeddings=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def spawn_ranks(num_ranks: int, run_rank: Callable[..., None], *arguments: object) -> None:
    """Call `run_rank(rank, *arguments)` in a process each, which find each other by torch's variables."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_run_rank, (num_ranks, port, run_rank, arguments), nprocs=num_ranks)


def _run_rank(rank: int, num_ranks: int, port: int, run_rank: Callable[..., None], arguments: tuple) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    run_rank(rank, *arguments)


@contextmanager
def cpu_rank() -> Iterator[None]:
    """One thread, and a gloo group of all ranks that end together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def leave(directory: str, result: object) -> None:
    """Write what rank 0 measured where the parent reads it; other ranks leave nothing."""
    if dist.get_rank() == 0:
        Path(directory, "found.json").write_bytes(msgspec.json.encode(result))


def rank_stages(config: LlamaConfig, mesh: Mesh) -> dict[int, PipelineStage]:
    """The stages of the first pipeline rank, in float32."""
    build = functools.partial(build_stage_model, dtype=torch.float32, device=mesh.device, weights=None, seed=0)
    models = build_rank_models(config, mesh.layout, 0, build)
    flatten_units(tuple(models.values()), dp=mesh.data_size)
    return {stage: PipelineStage(model, select_backend("auto", "cpu")) for stage, model in models.items()}
