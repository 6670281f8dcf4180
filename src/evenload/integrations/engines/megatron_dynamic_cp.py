"""Evenload as the scheduler of Megatron's dynamic context parallelism: who shares which document, micro-batch by
micro-batch.

    register_scheduler(costs)  # before Megatron's training loop, on every rank; then as ever:
    --dynamic-context-parallel --sequence-packing-scheduler default_dynamic_cp --calculate-per-token-loss

Megatron gathers the lengths of a step's documents, asks the scheduler that `scheduler_map` names for
`get_groups_and_subsamples` ([micro-batch][rank][document]), sends tokens accordingly and trains as many micro-batches
as came back. Its settings accept the names that it knows only, so Evenload's scheduler takes the place of
`default_dynamic_cp`. It inherits everything else from Megatron's, and asks Megatron's too: of both answers the one
with fewer predicted seconds is taken, so it is never slower under the cost model.

`scheduler_map` came after Megatron-Core 0.16.1. Written from the sources of Megatron-LM's development branch and of
later releases (keys of the map are names in some and members of an enum in others; both work); docs/engines.md says
with which it was run.
"""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from evenload.cost.pack_cost import PackCosts
from evenload.engines.context_groups import (
    RankDocuments,
    group_prices,
    group_sizes,
    groups_of,
    step_seconds,
)
from evenload.engines.placed_groups import fastest_groups
from evenload.errors import ConfigError

_NAME = "default_dynamic_cp"
_log = logging.getLogger("evenload.engines")


def register_scheduler(costs: PackCosts) -> None:
    """Let Megatron plan with Evenload where it would with `default_dynamic_cp`. On every rank, before training.

    Args:
        costs: of the model, on a layout with Megatron's numbers of pipeline and tensor ranks, and all data- and
            context-parallel ranks as `dp`. The same on all ranks: each plans by itself, and groups that differ would
            wait for each other for ever, so the ranks compare them before the first step.

    Raises:
        ConfigError: the installed Megatron-Core has no schedulers to replace, or was given this one already. Before the
            first step, on all ranks: their costs differ.
    """
    try:
        from megatron.core.datasets import data_schedule  # type: ignore[missing-import]

        # No release has it, so a type checker does not know it either.
        known: dict[Any, Any] = vars(data_schedule)["scheduler_map"]
    except (ImportError, KeyError) as err:
        raise ConfigError(
            "the installed Megatron-Core has no scheduler_map (megatron.core.datasets.data_schedule), which dynamic "
            f"context parallelism needs: {err}; install a later one, or train whole documents with "
            "evenload.integrations.engines.megatron_step"
        ) from err
    keys = [key for key in known if _name_of(key) == _NAME]
    if not keys:
        raise ConfigError(
            f"Megatron-Core's scheduler_map has {sorted(map(_name_of, known))} and no '{_NAME}' to replace; this "
            "version is not known"
        )
    if getattr(known[keys[0]], "evenload_costs", None) is not None:
        raise ConfigError("register_scheduler was called before; call it once in a process")
    known[keys[0]] = scheduler_class(known[keys[0]], costs)


def scheduler_class(megatron_scheduler: type, costs: PackCosts) -> type:
    """A subclass of Megatron's `DefaultDynamicCPScheduler` that plans with Evenload."""

    class EvenloadDynamicCPScheduler(megatron_scheduler):
        """`get_groups_and_subsamples` by predicted seconds."""

        evenload_costs = costs
        ranks_agree = False

        def run(
            self,
            data_iterator: Any,
            num_microbatches: int,
            dp_group: Any,
            tp_group: Any,
            pp_group: Any,
            dp_cp_group: Any,
            dev: Any,
            config: Any,
        ) -> Any:
            """Megatron's, which makes a step's micro-batches on all ranks; before its first one they compare costs.

            Raises:
                ConfigError: the ranks were given different costs.
            """
            if not self.ranks_agree:
                require_same_costs(costs, (dp_cp_group, tp_group, pp_group), dev)
                self.ranks_agree = True
            groups = dp_group, tp_group, pp_group, dp_cp_group
            return super().run(data_iterator, num_microbatches, *groups, dev, config)

        def get_groups_and_subsamples(self, sample_id_seqlens: Any) -> list[list[list[int]]]:
            """Documents of every micro-batch and rank.

            Args:
                sample_id_seqlens: (id, tokens) of every document of the step.

            Raises:
                InfeasiblePlanError: a document that all ranks together have no room for.
            """
            pairs = [(int(name), int(tokens)) for name, tokens in sample_id_seqlens]
            best = _faster(self, costs, [tokens for _, tokens in pairs], self._megatron_answer(pairs))
            return [[[pairs[place][0] for place in places] for places in ranks] for ranks in best]

        def _megatron_answer(self, pairs: list[tuple[int, int]]) -> tuple[RankDocuments, ...] | None:
            """Of Megatron's own scheduler, documents by their places in the list; None where it has none."""
            try:
                answer = super().get_groups_and_subsamples(list(pairs))
            except (AssertionError, ValueError) as err:
                # It is asked for comparison only, and some batches break its assertions.
                _log.warning("Megatron's own scheduler has no answer for a step: %s: %s", type(err).__name__, err)
                return None
            place = {name: index for index, (name, _) in enumerate(pairs)}
            return tuple(tuple(tuple(sorted(place[name] for name in ids)) for ids in ranks) for ranks in answer)

    return EvenloadDynamicCPScheduler


def require_same_costs(costs: PackCosts, groups: Sequence[Any], device: Any) -> None:
    """A `ConfigError` on all ranks where one has other costs. Collective.

    Args:
        groups: that together join all ranks, each rank in one of every kind: largest and smallest digest go round in
            one after the other.
        device: of the groups' collectives.
    """
    settings = msgspec.json.encode((costs.model, costs.coefficients, costs.layout, costs.keeps_short_whole))
    digest = int.from_bytes(hashlib.sha256(settings).digest()[:7])
    both = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    for group in groups:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    largest, smallest = both[0].item(), -both[1].item()
    if largest != smallest:
        raise ConfigError(
            f"register_scheduler was given other costs on some ranks than on others (digest {digest:014x} here, from "
            f"{smallest:014x} to {largest:014x} on all ranks), so ranks would plan different groups and wait for each "
            "other for ever; read one cost file on every rank, or make the costs on rank 0 and broadcast them"
        )


def _faster(
    scheduler: Any, costs: PackCosts, num_tokens: list[int], theirs: tuple[RankDocuments, ...] | None
) -> tuple[RankDocuments, ...]:
    """Evenload's micro-batches, or Megatron's where these are predicted to be faster."""
    num_ranks = scheduler.dp_size * scheduler.cp_size
    if costs.layout.dp * costs.layout.cp != num_ranks:
        raise ConfigError(
            f"register_scheduler was given costs of {costs.layout.dp * costs.layout.cp} data- and context-parallel "
            f"ranks, Megatron runs with {num_ranks}; give it costs of a layout with dp={num_ranks}"
        )
    limits = scheduler.max_seqlen_per_dp_cp_rank, getattr(scheduler, "max_num_seqs", None)
    sizes = group_sizes(num_ranks, scheduler.min_cp_size)
    offered = getattr(scheduler, "cp_group_sizes", sizes)
    prices = group_prices(costs, num_tokens, tuple(size for size in sizes if size in offered), *limits)
    own = fastest_groups(prices, scheduler.microbatch_group_size_per_vp_stage or 1)
    if not theirs:
        return own
    used = {size for ranks in theirs for _, size, _ in groups_of(ranks)}
    seconds = (
        step_seconds(prices, own),
        step_seconds(group_prices(costs, num_tokens, tuple(sorted(used)), *limits), theirs),
    )
    _log.debug("dynamic context parallelism: predicted %.4f s, Megatron's own %.4f s", *seconds)
    return own if seconds[0] <= seconds[1] else theirs


def _name_of(key: Any) -> str:
    return str(getattr(key, "value", key))
