"""Run what the checks compute: a smaller run of the same kind, observed row by row; and verdicts.

Isolation, invariance and resume do not depend on the number of layers or documents, so the model keeps its first layers
with its own weights, a step has a few documents, long ones are cut, and two replicas stand for all (`smaller_run`).
`StepRunner` runs plans through the real executor and records the hidden states before the head and the gradients of the
layers' input, by document and slice.

`exact_casts` makes float64 models compute in float64 throughout: transformers' modules cast to float32 in norms,
softmax, routers, rotary angles and losses, which makes exact computations differ by 1e-8.
"""

import functools
import json
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from evenload.attention.range_attention import RangeAttention
from evenload.config.train_config import TrainConfig
from evenload.data.hub import local_path
from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.executor import Executor
from evenload.runtime.model.hf_model import empty_model
from evenload.runtime.model.model_config import load_config, model_spec, own_key
from evenload.runtime.model.narrow import Float64Casts
from evenload.runtime.model.structure import structure_of
from evenload.runtime.model.tensor_weights import join_parts, tensor_split
from evenload.runtime.model.weight_files import INDEX_FILE, LEFT_OUT, stored_weights
from evenload.runtime.optim.data_parallel import FlatBuffer, GradientReduction
from evenload.runtime.replay.rank_packs import Exchange, PackTokens
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.runtime.stages.live_stages import build_rank_stages
from evenload.runtime.step_source import prepare_step
from evenload.types.base import Frozen
from evenload.types.plan import StepPlan
from evenload.types.text import counted

Outcome = Literal["pass", "fail", "skipped"]


class Verdict(Frozen):
    """Result of one check: what was measured with its tolerance, and why it failed or was skipped ("" = passed)."""

    name: str
    outcome: Outcome
    found: str
    why: str = ""


def judged(name: str, result: str, why: str = "") -> Verdict:
    return Verdict(name=name, outcome="fail" if why else "pass", found=result, why=why)


def skipped(name: str, result: str, why: str) -> Verdict:
    return Verdict(name=name, outcome="skipped", found=result, why=why)


def exit_code(verdicts: list[Verdict]) -> int:
    """Return 0 where nothing failed, 3 where only memory did (as where no plan fits), else 1."""
    failed = {verdict.name for verdict in verdicts if verdict.outcome == "fail"}
    return 0 if not failed else 3 if failed == {"memory"} else 1


@contextmanager
def exact_casts() -> Iterator[None]:
    """Run every module whose first floating input, or else parameter, is float64 under `Float64Casts`; all threads."""
    plain, thread = nn.Module.__call__, threading.local()

    @functools.wraps(plain)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = chain(args, kwargs.values(), module.parameters())
        dtypes = (value.dtype for value in given if isinstance(value, Tensor) and value.is_floating_point())
        is_known = getattr(thread, "is_inside", False) or type(module).__module__.startswith("torch.")
        if is_known or next(dtypes, None) is not torch.float64:
            return plain(module, *args, **kwargs)
        thread.is_inside = True
        try:
            with Float64Casts():
                return plain(module, *args, **kwargs)
        finally:
            thread.is_inside = False

    nn.Module.__call__ = call
    try:
        yield
    finally:
        nn.Module.__call__ = plain


STEPS = 5
"""Steps of the run that is resumed."""

# A forward and backward of so many FLOPs takes about a second on two CPU cores.
_STEP_FLOPS = 4e10
_MAX_PARAMETERS = 30e6
_MIN_TOKENS, _MAX_TOKENS = 512, 6144
_DOCUMENTS = 8
_REPLICAS = 2


def smaller_run(config: TrainConfig, directory: Path) -> tuple[TrainConfig, list[str]]:
    """Return the settings of a smaller run of the same kind, and what is smaller than in the user's; `directory`, for a
    shortened model and its checkpoint, all ranks see."""
    model = model_spec(config)
    notes = []
    settings, parallel = config.model, config.parallel
    of_layers = list(accumulate(model.kinds[kind].parameters for kind in model.layers))
    fitting = sum(parameters <= _MAX_PARAMETERS for parameters in of_layers)
    layers = min(model.num_layers, max(parallel.pp * parallel.virtual, 2, fitting))
    parameters = of_layers[layers - 1] + 2 * model.embedding_parameters
    if layers < model.num_layers:
        notes.append(f"first {layers} of {model.num_layers} layers")
        source = local_path(settings.path, "model.path", "settings" if settings.random_init else "weights")
        _write_short_model(Path(source), directory / "model", layers, random_init=settings.random_init)
        settings = msgspec.structs.replace(settings, path=str(directory / "model"))
        parallel = msgspec.structs.replace(parallel, stage_layers=None)
    # The reference trains no balance of routers; other models have none.
    settings = msgspec.structs.replace(settings, router_aux_loss_coef=0.0)
    tokens = int(min(max(_STEP_FLOPS / (6 * parameters), _MIN_TOKENS), _MAX_TOKENS))
    data, options = config.data, config.plan.options
    longest = min(data.max_document_tokens, tokens // 4)
    if longest < data.max_document_tokens:
        notes.append(f"documents cut to {longest:,} of {data.max_document_tokens:,} tokens")
    if parallel.dp > _REPLICAS:
        notes.append(f"{_REPLICAS} of {parallel.dp} replicas")
        parallel = msgspec.structs.replace(parallel, dp=_REPLICAS)
    documents = min(data.batch_documents or _DOCUMENTS, _DOCUMENTS)
    if documents != data.batch_documents:
        notes.append(f"{counted(documents, 'document')} a step")
    smaller_data = msgspec.structs.replace(
        data,
        batch_documents=documents,
        batch_tokens=None,
        max_document_tokens=longest,
        max_tree_tokens=None,
        overlong="truncate" if longest < data.max_document_tokens else data.overlong,
        epochs=None,
        workers=0,
        shuffle_window=min(data.shuffle_window, 64),
    )
    # Several documents fit into a pack, so that there is something to keep apart.
    pack_tokens = max(longest, min(options.max_pack_tokens or 2 * longest, 2 * longest))
    options = msgspec.structs.replace(options, max_pack_tokens=pack_tokens)
    train = msgspec.structs.replace(
        config.train,
        steps=max(config.train.steps or STEPS, STEPS),
        output_dir=str(directory / "run"),
        checkpoint_every_steps=3,
        keep_checkpoints=0,
        background_checkpoints=False,
        resume=True,
    )
    # Whether the user's run fits its limit is another check.
    plan = msgspec.structs.replace(config.plan, options=options, memory_bytes=None)
    smaller = msgspec.structs.replace(
        config, model=settings, parallel=parallel, data=smaller_data, plan=plan, train=train
    )
    return smaller, notes


def _write_short_model(path: Path, directory: Path, layers: int, *, random_init: bool) -> None:
    """Write a directory with the first layers' config.json and, unless weights are random, links to their weights."""
    source = path if path.is_dir() else path.parent
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config = load_config(str(path))
    settings, key = config.to_dict(), own_key(config, "num_hidden_layers")
    num_layers = settings[key]
    settings[key] = layers
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == num_layers:
            settings[key] = value[:layers]
    (directory / "config.json").write_text(json.dumps(settings))
    if random_init:
        return
    # Links to the files, and an index that leaves out the other layers' tensors.
    name_of_list = structure_of(empty_model(config)).layers.rsplit(".", 1)[-1]
    stored = stored_weights(source)
    kept = {name: tensor.file for name, tensor in stored.items() if _layer_of(name, name_of_list) < layers}
    for file in sorted(set(kept.values())):
        (directory / file).symlink_to((source / file).resolve())
    index = {"metadata": {LEFT_OUT: sorted(stored.keys() - kept)}, "weight_map": kept}
    (directory / INDEX_FILE).write_text(json.dumps(index))


def _layer_of(name: str, name_of_list: str) -> int:
    """Return the index of a tensor's layer; -1 for those of none."""
    match = re.search(rf"(?:^|\.){name_of_list}\.(\d+)\.", name)
    return int(match[1]) if match else -1


Seen = dict[tuple[str, int, int], Tensor]
"""("output" or "gradient", document, first token of the slice) -> rows [n, hidden] that this rank has."""


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """Result of one step on this rank: the loss of the whole global batch, gradients of this rank's parameters by name,
    summed over replicas, and this rank's rows."""

    loss: float
    gradients: dict[str, Tensor]
    seen: Seen


class ObservedStage(PipelineStage):
    """A stage that copies what passes its ends."""

    seen: Seen

    def forward_layers(self, pack: PackTokens, hidden: Tensor | None, store: ActivationStore) -> Tensor:
        hidden = super().forward_layers(pack, hidden, store)
        if self.model.is_last:
            self._see("output", pack, hidden)
        return hidden

    def backward_layers(self, pack: PackTokens, grad: Tensor, *rest: Any, **named: Any) -> Tensor:
        grad = super().backward_layers(pack, grad, *rest, **named)
        if self.model.is_first:
            self._see("gradient", pack, grad)
        return grad

    def _see(self, what: str, pack: PackTokens, rows: Tensor) -> None:
        assert self.num_rows(pack.ranges) == len(rows)
        row = 0
        for own in pack.ranges:
            count = self.num_rows((own,))
            # Of a short slice another rank of a tensor-parallel group may have all rows.
            if count:
                self.seen[what, own.doc_id, own.start] = rows[row : row + count].detach().clone()
            row += count


class StepRunner:
    """Runs steps of a configuration without training, with its attention or another."""

    def __init__(self, config: TrainConfig, mesh: Mesh, backend: RangeAttention | None = None) -> None:
        held = build_rank_stages(config.model, config.train, model_spec(config), mesh, ObservedStage, backend)
        self._mesh, self._buffers, self._stages = mesh, held.buffers, held.stages
        self._executor = Executor(self._stages, mesh)
        self._exchange: Exchange = config.parallel.cp_exchange
        self._overlaps_reduction = config.train.overlap_reduction

    def run(self, plan: StepPlan, tokens: Mapping[int, NDArray[np.int32]]) -> StepOutcome:
        """Run a step on zero gradients, with the tokens of every document of it. Collective."""
        mesh = self._mesh
        mesh.watch.step = plan.step
        for buffer in self._buffers:
            buffer.grads.zero_()
        for stage in self._stages.values():
            stage.seen = {}
        # As the configuration says, whether or not it would pay: what is proved is that it changes nothing.
        is_overlapped = self._overlaps_reduction
        with closing(GradientReduction(self._buffers, mesh, is_overlapped=is_overlapped)) as sums:
            run = self._executor.run(prepare_step(plan, tokens, mesh, self._exchange), on_final=sums.release)
            shards = sums.finish()
        loss = torch.tensor([float(run.loss_sum)], dtype=torch.float64)
        dist.all_reduce(loss, group=mesh.control)
        seen = {key: rows for stage in self._stages.values() for key, rows in stage.seen.items()}
        return StepOutcome(float(loss), gathered_gradients(self._buffers, shards, mesh), seen)


def gathered_gradients(buffers: Sequence[FlatBuffer], shards: Sequence[Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Gather gradients of which every rank has shards; return them whole, by parameter's name. Collective."""
    gradients: dict[str, Tensor] = {}
    for buffer, shard in zip(buffers, shards, strict=True):
        flat = torch.empty_like(buffer.grads)
        all_gather_single(flat, shard, group=mesh.data)
        parts = flat[: buffer.num_elements].split([parameter.numel() for parameter in buffer.parameters])
        for name, parameter, own in zip(buffer.names, buffer.parameters, parts, strict=True):
            gradients[name] = join_parts(own.view(parameter.shape), tensor_split(parameter), mesh.tensor)
    return gradients
