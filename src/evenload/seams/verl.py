"""verl 0.9.1: which rank trains which sequences, and the micro-batches of every rank.

A module of one's own, say `even.py`, which verl imports in every process with `VERL_USE_EXTERNAL_MODULES=even`:

    from evenload.seams import verl

    verl.install(max_tokens=16_384, cost="llama3-8b")

What changes: ranks are chosen so that their micro-batches take equally long, not only all their work. The micro-batches
of all ranks are chosen together: heavy ones meet heavy ones. Each rank gathers the lengths of others once, where verl
agrees on a number of micro-batches in two all-reduces or more. What stays: no micro-batch is empty or above
`max_token_len`, all ranks have equally many of them, and equally many sequences; losses and gradients are those of the
same sequences. `calculate_workload` gives verl's trainer the lengths back, by which it sorts as before.
"""

from functools import partial
from importlib import import_module
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.planning.micro_batches import Cost, MicroBatches, Rules, micro_batches, priced
from evenload.seams.replacing import Replaced, module_of

_COST = Cost()
_TESTED = "verl 0.9.1"
Waits = Literal["micro_batch", "step"]


def install(max_tokens: int | None = None, cost: Cost | str = _COST, waits: Waits = "micro_batch") -> Replaced:
    """Put the functions of this module in the place of verl's.

    Args:
        max_tokens: what a micro-batch may hold, `ppo_max_token_len_per_gpu` times the ranks that share a sequence. Only
            with it are ranks chosen for their micro-batches; None = for equal works.
        cost: predicts seconds, or names a model, as for `evenload.micro_batches`.
        waits: at what ranks wait for each other: every "micro_batch" (FSDP, expert parallelism), or once a "step"
            (Megatron else).

    Raises `MissingPackageError` and `ConfigError` as `module_of` and `Replaced`.
    """
    deciding = module_of("verl.utils.seqlen_balancing", _TESTED)
    return Replaced(
        _TESTED,
        (deciding, partial(calculate_workload)),
        (deciding, partial(get_seqlen_balanced_partitions, max_tokens=max_tokens, cost=cost, waits=waits)),
        (deciding, partial(get_group_balanced_partitions, cost=cost)),
        (deciding, partial(rearrange_micro_batches, cost=cost, waits=waits)),
    )


def calculate_workload(seqlen_list: Any) -> Any:
    """Return the lengths themselves: functions below take these, and what they cost decides there."""
    return seqlen_list


def get_seqlen_balanced_partitions(
    seqlen_list: Any,
    k_partitions: int,
    equal_size: bool,
    *,
    max_tokens: int | None = None,
    cost: Cost | str = _COST,
    waits: Waits = "micro_batch",
) -> list[list[int]]:
    """Return the sequences of every rank, ascending, k_partitions lists, none of them empty; else see `install`.

    Raises:
        ConfigError: the sequences are no k_partitions equal shares, with equal_size.
        DataError: a sequence is longer than max_tokens.
        InfeasiblePlanError: there are fewer sequences than ranks.
    """
    waits = "step" if max_tokens is None else waits
    rules: Rules = {"cost": cost, "waits": waits, "equal_documents": equal_size, "no_empty": True}
    return _parts(micro_batches(_tokens(seqlen_list), k_partitions, max_tokens, **rules))


def get_group_balanced_partitions(
    seqlen_list: list[int], uid_list: list, k_partitions: int, *, cost: Cost | str = _COST
) -> list[list[int]]:
    """Return the sequences of every rank, ascending: ranks get equal works and equally many groups of one uid, whole;
    a `ConfigError` where the lists differ in length, or there are no k_partitions equal shares of groups."""
    if len(seqlen_list) != len(uid_list):
        raise ConfigError(f"{len(uid_list)} uids for {len(seqlen_list)} sequences; give one for each")
    groups: dict[Any, list[int]] = {}
    for sequence, uid in enumerate(uid_list):
        groups.setdefault(uid, []).append(sequence)
    members, (sequence_s, _) = list(groups.values()), priced(cost, _tokens(seqlen_list), k_partitions)
    work_s = [sequence_s[group].sum() for group in members]
    rules: Rules = {"work_s": work_s, "waits": "step", "equal_documents": True, "no_empty": True}
    made = micro_batches(np.ones(len(members), np.int64), k_partitions, **rules)
    return [sorted(sequence for group in part for sequence in members[group]) for part in _parts(made)]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
    *,
    cost: Cost | str = _COST,
    waits: Waits = "micro_batch",
) -> tuple[list[Any], list[list[int]]]:
    """Return this rank's micro-batches, TensorDicts as `batch`, and the sequences of each, ascending.

    Every rank of dp_group calls this, with its own batch and the same settings, which mean what verl says.

    Raises:
        DataError: a sequence or group above max_token_len.
        ConfigError: n is no multiple of force_group_size.
        InfeasiblePlanError: some rank has fewer groups than micro-batches are needed.
    """
    from torch import distributed

    select = import_module("verl.utils.tensordict_utils").index_select_tensor_dict

    ids = batch["input_ids"]
    tokens = (ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)).tolist()
    rank, of_rank = 0, [tokens]
    if distributed.is_initialized() and same_micro_num_in_dp and dp_group is not None:
        rank, of_rank = distributed.get_rank(dp_group), [tokens] * distributed.get_world_size(dp_group)
        distributed.all_gather_object(of_rank, tokens, group=dp_group)
    # What is refused is refused on all ranks: none waits for another that has stopped.
    sizes = [len(of_one) for of_one in of_rank]
    if any(size % force_group_size for size in sizes):
        raise ConfigError(f"force_group_size is {force_group_size}, ranks have {sizes} sequences; give multiples")
    rules: Rules = {
        "cost": cost,
        "waits": waits,
        "no_empty": True,
        "rank_of": np.repeat(np.arange(len(sizes)), sizes),
        "groups": np.arange(sum(sizes)) // force_group_size if force_group_size > 1 else None,
        "keep": "micro_batch",
        "count_multiple": num_batches_divided_by or 1,
        "min_count": min_num_micro_batch or 1,
    }
    made = micro_batches(_tokens([one for of_one in of_rank for one in of_one]), len(of_rank), max_token_len, **rules)
    order = list(range(made.seconds.shape[1]))
    if use_dynamic_bsz_balance:
        order.sort(key=lambda index: (-made.seconds[:, index].max(), index))
        order = order[::2][::-1] + order[1::2]
    first = sum(sizes[:rank])
    parts = [[sequence - first for sequence in made.ranks[rank][index]] for index in order]
    return [select(batch, part) for part in parts], parts


def _parts(made: MicroBatches) -> list[list[int]]:
    return [sorted(sequence for part in rank for sequence in part) for rank in made.ranks]


def _tokens(lengths: Any) -> NDArray[np.int64]:
    """Return the tokens of every sequence, int64[n]; one that is padding alone needs a place as one token does."""
    return np.maximum(np.asarray(lengths.tolist() if hasattr(lengths, "tolist") else lengths).astype(np.int64), 1)
