"""Invariance: loss and gradients of one global batch do not depend on how it is packed, cut or scheduled.

The batch is planned by several strategies and with short slices, each plan runs on the configured layout, and each is
compared with plain training of the same documents in float64: transformers' own model and attention, one document at a
time, torch's autograd. Nothing of the runtime takes part in that, except that random weights come from it (they depend
on the seed and the unit); documents are divided over the ranks, and their gradients summed. The error of plain training
in the configured precision is the yardstick: ours may be twice that, of the loss and of the whole gradient (at least
1e-6 in float32 and 1e-2 in bfloat16; 1e-10 in float64, which is float64 throughout: `exact_casts`); and no single
parameter may be plainly wrong.

Price: a step a plan, and plain training twice.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from evenload.check.exact_casts import exact_casts
from evenload.check.step_runner import StepRunner
from evenload.check.verdict import Verdict, failed, passed, skipped
from evenload.config.train_config import TrainConfig
from evenload.data.blocks import TokenTable
from evenload.data.hub import local_path
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.model.configured import load_config
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.model.supported import attention_soft_cap
from evenload.types.counted import counted
from evenload.types.plan import StepPlan

_TIMES_PLAIN = 2.0
# Below this, rounding alone decides which of two right results is nearer.
_FLOOR = {"float64": 1e-10, "float32": 1e-6, "bfloat16": 1e-2}
# A parameter's own gradient is noisier than the whole; this far off it is wrong.
_PLAINLY_WRONG, _PARAMETER_TIMES_PLAIN = 0.1, 4.0


class Errors(NamedTuple):
    """Relative errors of a step's loss, of its whole gradient, and by name of each parameter's gradient (there of the
    whole gradient's norm, where its own is nearly zero)."""

    loss: float
    gradient: float
    parameter: dict[str, float]


@exact_casts()
def check_invariance(
    config: TrainConfig,
    runner: StepRunner,
    plans: list[tuple[str, StepPlan]],
    left_out: list[str],
    tokens: Mapping[int, NDArray[np.int32]],
    mesh: Mesh,
) -> Verdict:
    """Run every plan and the reference. Collective.

    Args:
        plans: by a name that tells them apart, of the same documents.
        left_out: plans that could not be made, with the reason.
        tokens: of every document.
    """
    name = "invariance"
    if config.model.lora is not None:
        return skipped(name, "", "plain training of adapters is compared in the tests only (peft)")
    if not plans:
        return skipped(name, "", f"nothing could be planned: {'; '.join(left_out)}")
    own = getattr(torch, config.model.dtype)
    exact = plain_step(config, tokens, torch.float64, mesh)
    plain = _errors(*(exact if own == torch.float64 else plain_step(config, tokens, own, mesh)), *exact, mesh)
    limits = [max(_TIMES_PLAIN * error, _FLOOR[config.model.dtype]) for error in (plain.loss, plain.gradient)]
    worst_loss, worst_gradient, failures = 0.0, 0.0, []
    for title, plan in plans:
        outcome = runner.run(plan, tokens)
        errors = _errors(outcome.loss, outcome.gradients, *exact, mesh)
        # NaN is the largest.
        worst_loss, worst_gradient = np.maximum((worst_loss, worst_gradient), (errors.loss, errors.gradient))
        parameter, error = max(errors.parameter.items(), key=lambda item: (math.isnan(item[1]), item[1]))
        bound = max(_PLAINLY_WRONG, _PARAMETER_TIMES_PLAIN * plain.parameter.get(parameter, 0.0))
        if not (errors.loss <= limits[0] and errors.gradient <= limits[1] and error <= bound):
            failures.append(
                f"{title}: loss off by {errors.loss:.1e}, gradient by {errors.gradient:.1e}, most in {parameter} "
                f"({error:.1e})"
            )
    found = (
        f"{', '.join(title for title, _ in plans)} in {config.model.dtype} on {mesh.layout.describe()}, "
        f"{counted(len(tokens), 'document')}, {sum(map(len, tokens.values())):,} tokens: loss within {worst_loss:.1e} "
        f"(allowed {limits[0]:.1e}), gradient within {worst_gradient:.1e} (allowed {limits[1]:.1e}) of plain float64"
    )
    if left_out:
        found += f"; not run: {'; '.join(left_out)}"
    if failures:
        return failed(name, found, "; ".join(failures))
    return passed(name, found)


def _errors(
    loss: float, gradients: dict[str, Tensor], exact_loss: float, exact: dict[str, Tensor], mesh: Mesh
) -> Errors:
    """Of a step whose gradients lie on the ranks of its stages. Collective."""
    sums: dict[str, tuple[float, float]] = {}
    for name, gradient in gradients.items():
        if name not in exact and name == "lm_head.weight":
            continue  # A tied head; the first stage has the same sum under the embedding's name.
        reference = exact[name]
        difference = (gradient.double() - reference).square().sum()
        sums[name] = (float(difference), float(reference.square().sum()))
    everyone: list[dict[str, tuple[float, float]]] = [{} for _ in range(mesh.layout.world_size)]
    dist.all_gather_object(everyone, sums, group=mesh.control)
    merged = {name: pair for part in everyone for name, pair in part.items()}
    assert merged.keys() == exact.keys(), sorted(exact.keys() - merged.keys())
    whole = sum(norm for _, norm in merged.values())
    total = math.sqrt(sum(difference for difference, _ in merged.values()) / whole)
    smallest = 1e-6 * whole / len(merged)
    parameters = {name: math.sqrt(d / max(n, smallest)) for name, (d, n) in merged.items()}
    return Errors(abs(loss - exact_loss) / max(abs(exact_loss), 1e-12), total, parameters)


def plain_step(
    config: TrainConfig, tokens: TokenTable | Mapping[int, NDArray[np.int32]], dtype: torch.dtype, mesh: Mesh
) -> tuple[float, dict[str, Tensor]]:
    """Loss and the gradient of every parameter, on every rank. Collective.

    Args:
        tokens: of all documents, with labels where they have some.
        dtype: to compute in; weights are those of the configured precision.
    """
    model = _plain_model(config, dtype)
    rows = {doc: tokens.labels_of(doc) if isinstance(tokens, TokenTable) else tokens[doc] for doc in sorted(tokens)}
    labels = {doc: torch.from_numpy(np.array(row)).long() for doc, row in rows.items()}
    num_labels = max(1, sum(int((row[1:] != -100).sum()) for row in labels.values()))
    total = torch.zeros(1, dtype=torch.float64)
    for doc in list(labels)[mesh.rank :: mesh.layout.world_size]:
        row = torch.from_numpy(np.asarray(tokens[doc])).long()
        logits = model(row[None], use_cache=False).logits[0, :-1]
        exact = logits if dtype == torch.float64 else logits.float()
        loss = nn.functional.cross_entropy(exact, labels[doc][1:], reduction="sum") / num_labels
        if loss.requires_grad and len(row) > 1:
            loss.backward()
            total += loss.detach().double()
    dist.all_reduce(total, group=mesh.control)
    gradients = {}
    for name, parameter in model.named_parameters():
        # Ranks add in float64: only the model's own arithmetic is in the configured precision.
        gradient = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).double()
        dist.all_reduce(gradient, group=mesh.control)
        gradients[name] = gradient
    return float(total), gradients


def _plain_model(config: TrainConfig, dtype: torch.dtype) -> Any:
    hf = load_config(config.model.path)
    # torch's own attention cannot cap scores, and its grouped products of experts know no float64.
    hf._attn_implementation = "eager" if attention_soft_cap(hf) else "sdpa"
    hf._experts_implementation = "eager"
    own = getattr(torch, config.model.dtype)
    if not config.model.random_init:
        weights = local_path(config.model.path, "model.path", "weights")
        whole: Any = AutoModelForCausalLM.from_pretrained(weights, config=hf, dtype=own)
        return whole.to(dtype)
    ours = build_stage_model(
        load_config(config.model.path),
        layers=(0, hf.num_hidden_layers),
        dtype=own,
        device=torch.device("cpu"),
        weights=None,
        seed=config.train.seed,
    )
    weights = {name: parameter.detach() for named in ours.unit_parameters() for name, parameter in named}
    model = AutoModelForCausalLM.from_config(hf, dtype=own)
    _, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    model.tie_weights()
    return model.to(dtype)
