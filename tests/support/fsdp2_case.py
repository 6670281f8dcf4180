"""FSDP2 as the conformance suite drives it (`engine_conformance`)."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module

from engine_records import (
    EngineCase,
    Perturbed,
    RankRecord,
    TrainOrder,
    perturb_by_hand,
    plain_sgd,
    small_model,
    train_by_hand,
)
from evenload.integrations.engine_loop import model_inputs
from evenload.integrations.fsdp2_loop import Fsdp2Loop
from evenload.integrations.packed_loader import PackedStep
from hybrid_models import hybrid_model
from packed_cases import error_of, loader_of


def sharded_model(dtype: torch.dtype, mesh_shape: tuple[int, ...]) -> torch.nn.Module:
    """The small Llama, each layer gathered by itself; two sizes = replicas of shards (HSDP)."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
    model = small_model().to(dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Fsdp2Run:
    def __init__(self, case: EngineCase, corpus: Path, learning_rate: float) -> None:
        settings = dict(case.engine)
        dtype = settings.pop("dtype", torch.float64)
        world_size = torch.distributed.get_world_size()
        self.model = sharded_model(dtype, settings.pop("mesh", (world_size,)))
        optimizer = case.optimizer(self.model.parameters(), learning_rate)
        self.loader = case.open_loader(corpus)
        self.loop = Fsdp2Loop(self.model, optimizer, self.loader, **settings)
        self.update, self.save, self.load = self.loop.update, self.loop.save, self.loop.load

    def accumulate(self, step: PackedStep) -> float:
        return self.loop.accumulate(step).item()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: parameter.grad.full_tensor() for name, parameter in self.model.named_parameters()}

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.full_tensor() for name, parameter in self.model.named_parameters()}

    def logits(self, batch: dict) -> torch.Tensor:
        return self.model(**model_inputs(batch)).logits[0]


def train_fsdp2(case: EngineCase, order: TrainOrder) -> RankRecord:
    return train_by_hand(Fsdp2Run(case, order.corpus, order.learning_rate), order)


def perturb_fsdp2(case: EngineCase, corpus: Path) -> Perturbed | None:
    return perturb_by_hand(Fsdp2Run(case, corpus, 0.0))


def fsdp2_case(engine: dict | None = None, loader: dict | None = None, **changes) -> EngineCase:
    """FSDP2 in float64, which it trains in as it does in any other type."""
    return EngineCase(train_fsdp2, perturb_fsdp2, engine or {}, loader or {}, **({"gradient_error": 1e-12} | changes))


def leaks_of_fsdp2(corpus: Path, kind: str) -> tuple[str, int]:
    """What is said of a model that mixes the documents of a pack, and how many updates were made."""
    model = hybrid_model(kind, vocab_size=257)
    for layer in model.model.layers:
        fully_shard(layer)
    model = fully_shard(model)
    loop = Fsdp2Loop(model, plain_sgd(model.parameters(), 0.5), loader_of(corpus))
    return error_of(next, loop.train(1)), loop.num_steps


def refusals_of_fsdp2(corpus: Path) -> list[str]:
    """What is said of ranks that would wait for each other, parameters that nobody sums, and other mistakes."""
    world_size = torch.distributed.get_world_size()
    sharded = sharded_model(torch.float32, (world_size,))
    partly = small_model()
    fully_shard(partly, mesh=init_device_mesh("cpu", (world_size,)), ignored_params={partly.lm_head.weight})
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "tensor"))
    of_tensor_ranks = distribute_module(small_model(), mesh["tensor"])
    fully_shard(of_tensor_ranks, mesh=mesh["data"])
    elsewhere = fully_shard(small_model().to("meta"), mesh=init_device_mesh("cpu", (world_size,)))
    wrong = (
        (sharded, {"equal_micro_batches": False}, {}),
        *((model, {}, {}) for model in (partly, of_tensor_ranks, elsewhere)),
        *((sharded, {}, settings) for settings in ({"max_grad_norm": 0.0}, {"stateful": {"loader": None}})),
    )
    return [error_of(Fsdp2Loop, one, None, loader_of(corpus, **of), **more) for one, of, more in wrong]
