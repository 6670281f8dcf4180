"""transformers 5.23 and 5.24: `train_sampling_strategy="batch_rebalance"` divided by our search.

    from evenload.seams import transformers as seam
    seam.install(max_tokens=16_384)
    args = TrainingArguments(train_sampling_strategy="batch_rebalance", per_device_train_batch_size=32,
                             gradient_accumulation_steps=4, ...)
    Trainer(model, args, train_dataset=data, data_collator=DataCollatorWithFlattening(), ...).train()

What it changes: the documents of an optimizer step, drawn by the Trainer, are divided among ranks and micro-batches by
`micro_batches` instead of by `BatchRebalanceSampler`, which takes neighbours by length and has no limit of tokens.
Steps hold the same documents, every rank has as many micro-batches as before, and none is empty; the loss of a step, a
mean over its tokens, is the same. It is for collators that do not pad, such as `DataCollatorWithFlattening` and that of
TRL's `SFTTrainer` with `padding_free=True`: where rows are padded to the longest, neighbours by length are better, and
a collator that is known to pad is refused.
"""

from typing import Any

from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.planning.micro_batches import Cost, micro_batches
from evenload.seams.replacing import Replaced, require_release


def install(max_tokens: int | None = None, cost: Cost | str | None = None) -> Replaced:
    """Divide the steps of every Trainer in this process; returns what undoes it.

    Args:
        max_tokens: of a micro-batch; None = not limited, as in transformers. An `InfeasiblePlanError` in training where
            the documents of a step do not fit into `gradient_accumulation_steps` micro-batches of every rank.
        cost: predicts seconds, or names a model, as for `micro_batches`; None = `Cost()`.

    Raises `MissingPackageError` and `ConfigError` as `require_release` and `Replaced`.
    """
    tested = require_release("transformers", ("5.23", "5.24"))
    from transformers import Trainer
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    their_sampler = Trainer._get_train_sampler

    def _get_train_sampler(self: Any, train_dataset: Any = None) -> Any:
        sampler = their_sampler(self, train_dataset)
        if isinstance(sampler, BatchRebalanceSampler):
            _require_unpadded(self.data_collator)
        return sampler

    def _assign(self: Any, indices: list[int], lengths: list[int]) -> list[list[list[int]]]:
        count = self.grad_accum
        try:
            made = micro_batches(lengths, self.dp_size, max_tokens, cost=cost, count=count, no_empty=True)
        except InfeasiblePlanError as error:
            raise InfeasiblePlanError(
                f"{len(lengths):,} documents of {sum(lengths):,} tokens do not fit into {count} micro-batches of "
                f"{self.dp_size} ranks with max_tokens = {max_tokens}; raise gradient_accumulation_steps or "
                "max_tokens, or lower per_device_train_batch_size"
            ) from error
        return [[[indices[at] for at in micro_batch] for micro_batch in rank] for rank in made.ranks]

    return Replaced(tested, (BatchRebalanceSampler, _assign), (Trainer, _get_train_sampler))


def _require_unpadded(collator: Any) -> None:
    """Refuse collators of transformers but for the one that flattens, and TRL's without `padding_free`."""
    kind = collator if hasattr(collator, "__qualname__") else type(collator)
    pads = kind.__module__ == "transformers.data.data_collator" and kind.__qualname__ != "DataCollatorWithFlattening"
    if pads or getattr(collator, "padding_free", True) is False:
        raise ConfigError(
            f"{kind.__qualname__} pads documents, for which batch_rebalance is better without this seam; give the "
            "Trainer DataCollatorWithFlattening(), SFTConfig padding_free=True, or uninstall() the seam"
        )
