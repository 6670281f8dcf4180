"""DeepSpeed as the conformance suite drives it (`engine_conformance`)."""

import itertools
import os
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist

from engine_records import EngineCase, Perturbed, RankRecord, TrainOrder, perturb_by_hand, small_model, train_by_hand
from evenload.integrations.deepspeed_loop import DeepSpeedLoop, sequence_share, share_sequences
from evenload.integrations.engine_loop import model_inputs
from evenload.integrations.packed_loader import PackedStep
from packed_cases import batch_fingerprint, error_of, loader_of


def import_deepspeed() -> Any:
    """DeepSpeed on CPUs, without the all-reduce in shared memory of its inference: compiling that takes two minutes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    return deepspeed


def deepspeed_engine(case: EngineCase, learning_rate: float, **changes: Any) -> Any:
    """The small Llama in float32 under ZeRO."""
    deepspeed = import_deepspeed()
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = small_model().float()
    groups = share_sequences(model, case.loader.get("sequence_ranks", 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": case.engine["stage"]},
        "gradient_clipping": 0.0,  # left out, DeepSpeed clips to a norm of 1
        "zero_allow_untested_optimizer": True,
        **changes,
    }
    settings = {"optimizer": case.optimizer(model.parameters(), learning_rate), "config": config, "mpu": groups}
    return deepspeed.initialize(model=model, **settings, dist_init_required=False)[0]


class DeepSpeedRun:
    def __init__(self, case: EngineCase, corpus: Path, learning_rate: float, **changes: Any) -> None:
        self._engine = deepspeed_engine(case, learning_rate, **changes)
        self.loader = case.open_loader(corpus)
        settings = {key: value for key, value in case.engine.items() if key != "stage"}
        self._loop = DeepSpeedLoop(self._engine, self.loader, **settings)
        self.update, self.save, self.load = self._loop.update, self._loop.save, self._loop.load

    def accumulate(self, step: PackedStep) -> float:
        return self._loop.accumulate(step).item()

    def gradients(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(parameter) for name, parameter in self._engine.module.named_parameters()}

    def parameters(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(parameter) for name, parameter in self._engine.module.named_parameters()}

    def logits(self, batch: dict) -> torch.Tensor:
        ranks = self.loader.options.sequence_ranks
        own = batch if ranks == 1 else sequence_share(batch, dist.get_rank() % ranks, ranks)
        logits = self._engine(**model_inputs(own)).logits[0].detach()
        if ranks == 1:
            return logits
        shares = [torch.empty_like(logits) for _ in range(ranks)]
        dist.all_gather(shares, logits, group=self._engine.get_sequence_parallel_group())
        return torch.cat(shares)


def train_deepspeed(case: EngineCase, order: TrainOrder) -> RankRecord:
    changes = {}
    if order.load_from is not None and _ranks_of(order.load_from) != dist.get_world_size():
        make_universal(order.load_from)
        changes["checkpoint"] = {"load_universal": True}
    return train_by_hand(DeepSpeedRun(case, order.corpus, order.learning_rate, **changes), order)


def _ranks_of(saved: Path) -> int:
    """Data-parallel ranks that wrote the newest checkpoint: each its part of the optimizer's state."""
    return len(list((saved / (saved / "latest").read_text()).glob("*optim_states.pt")))


def make_universal(saved: Path) -> None:
    """What `python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state` does, once."""
    if dist.get_rank() == 0 and not (saved / "latest_universal").exists():
        import_deepspeed()
        from deepspeed.checkpoint import ds_to_universal

        tag = (saved / "latest").read_text()
        folders = {"input_folder": str(saved / tag), "output_folder": str(saved / f"{tag}-universal")}
        settings = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        ds_to_universal.main(SimpleNamespace(**folders, **settings, inject_missing_state=True))
    dist.barrier()


def perturb_deepspeed(case: EngineCase, corpus: Path) -> Perturbed | None:
    return perturb_by_hand(DeepSpeedRun(case, corpus, 0.0))


def deepspeed_case(stage: int, engine: dict | None = None, loader: dict | None = None, **changes) -> EngineCase:
    """ZeRO of a stage, in float32."""
    return EngineCase(train_deepspeed, perturb_deepspeed, {"stage": stage} | (engine or {}), loader or {}, **changes)


def refusals_of_deepspeed(corpus: Path) -> dict[str, str]:
    """What is said of engines that would train something else, and of ranks that would wait for each other."""
    wanted = {
        "accumulation": (1, {}, {"gradient_accumulation_steps": 4}),
        "stage": (0, {}, {}),
        "sum": (1, {}, {"gradient_allreduce_op": "sum"}),
        "unmanaged": (2, {}, {"managed_gradient_accumulation": False}),
        "own sums": (1, {}, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
        "counts": (3, {"equal_micro_batches": False}, {}),
    }
    messages = {}
    for name, (stage, loader, config) in wanted.items():
        engine = deepspeed_engine(deepspeed_case(stage), 0.0, **config)
        messages[name] = error_of(DeepSpeedLoop, engine, loader_of(corpus, **loader))
    return messages | {"checkpoint": error_of(DeepSpeedLoop(engine, loader_of(corpus)).load, corpus)}


def refusals_of_ulysses(corpus: Path) -> dict[str, str]:
    """What is said of sequence groups that cannot be made, or would train something else."""
    case = deepspeed_case(1, loader={"engine": "deepspeed", "sequence_ranks": 2})
    import_deepspeed()
    messages = {"early": error_of(share_sequences, small_model(), 2)}
    import_deepspeed().init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    messages["ranks"] = error_of(share_sequences, small_model(), 3)
    engine = deepspeed_engine(case, 0.0)
    messages["loader"] = error_of(DeepSpeedLoop, engine, loader_of(corpus, engine="deepspeed"))
    messages["again"] = error_of(share_sequences, small_model(), 2)
    loader = loader_of(corpus, engine="deepspeed", sequence_ranks=2)
    engine.module.set_attn_implementation("sdpa")
    return messages | {"sdpa": error_of(DeepSpeedLoop, engine, loader)}


def updates_that_overflow(corpus: Path) -> list[tuple[int, bool]]:
    """Number and `was_updated` of every step up to the second update, as one rank of an engine that leaves every other
    update out, as one does whose fp16 overflowed."""
    model = small_model()
    engine = Mock(side_effect=model, module=model, device=torch.device("cpu"), pipeline_parallelism=False)
    engine.seq_dp_world_size = engine.sequence_parallel_size = 1
    engine.zero_optimization_stage.return_value, engine.gradient_accumulation_steps.return_value = 2, 1
    engine.backward, engine.step, engine.coalesce_grad_reduction = torch.Tensor.backward, model.zero_grad, nullcontext
    engine.was_step_applied.side_effect = itertools.cycle([False, True])
    with loader_of(corpus) as loader:
        return [(step.number, step.was_updated) for step in DeepSpeedLoop(engine, loader).train(2)]


def shared_epoch(corpus: Path) -> list[tuple]:
    """What a rank of groups of two gets in an epoch."""
    with loader_of(corpus, engine="deepspeed", sequence_ranks=2, epochs=1) as loader:
        return [batch_fingerprint(batch) for batch in loader]
