"""What Megatron-Core cannot do with a plan, refused before anything runs, with the reason and what works instead.

Every rule here is one that Megatron-Core 0.16.1 breaks late or without a word: a shape that a neighbour does not
expect, a mean of means instead of a mean over label tokens, ranks that wait for each other forever.
"""

from typing import Any

from evenload.errors import ConfigError
from evenload.integrations.loader_options import LoaderOptions


def require_runnable(config: Any, options: LoaderOptions, num_chunks: int) -> None:
    """Refuse settings of a model and a loader that do not go together.

    Args:
        config: the model's `TransformerConfig`.
        options: of the loader; it has refused strategies that cut documents itself.
        num_chunks: of the model on this rank: more than one under the interleaved schedule.

    Raises:
        ConfigError: with the reason, and the nearest thing that works.
    """
    if options.format != "megatron":
        raise ConfigError(
            f"format of the loader is '{options.format}', Megatron-Core reads 'megatron'; make it with "
            'PackedLoader(..., format="megatron", equal_micro_batches=False, '
            "group=parallel_state.get_data_parallel_group())"
        )
    _require_sums(config)
    _require_shapes(config, options)
    _require_counts(config, options, num_chunks)


def rows_multiple(config: Any) -> int:
    """What the rows of a pack have to be a multiple of."""
    return config.tensor_model_parallel_size if config.sequence_parallel else 1


def count_that_runs(count: int, config: Any, num_chunks: int) -> int:
    """The least number of micro-batches, at least `count` and 1, that the schedule takes.

    The interleaved schedule takes groups of `microbatch_group_size_per_vp_stage` micro-batches through a chunk before
    it turns to the next one. The last group may be smaller, but not smaller than the pipeline is long.
    """
    count = max(1, count)
    if num_chunks == 1:
        return count
    group, pipeline = config.microbatch_group_size_per_vp_stage, config.pipeline_model_parallel_size
    count = max(count, group)
    last = count % group
    return count + pipeline - last if 0 < last < pipeline else count


def _require_sums(config: Any) -> None:
    if not config.calculate_per_token_loss:
        raise ConfigError(
            "calculate_per_token_loss is False: Megatron-Core would take the mean of every micro-batch, and the mean of "
            "those, so that a label token of a small pack counts more than one of a large pack; set it to True"
        )
    if config.finalize_model_grads_func is None:
        raise ConfigError(
            "finalize_model_grads_func is None: gradients would be neither summed over replicas nor divided by the "
            "label tokens; set it to megatron.core.distributed.finalize_model_grads"
        )


def _require_shapes(config: Any, options: LoaderOptions) -> None:
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        raise ConfigError(
            f"variable_seq_lengths is False with pipeline_model_parallel_size {config.pipeline_model_parallel_size}: "
            "stages would expect packs of one length; set it to True"
        )
    if config.context_parallel_size > 1:
        raise ConfigError(
            f"context_parallel_size is {config.context_parallel_size}, and every rank would train whole packs as if "
            "they were its part; set it to 1, or let Megatron's dynamic context parallelism share documents "
            "(evenload.integrations.engines.megatron_dynamic_cp)"
        )
    multiple = rows_multiple(config)
    if options.pack_multiple % multiple:
        raise ConfigError(
            f"sequence_parallel divides the rows of a pack among {multiple} tensor-parallel ranks, and pack_multiple "
            f"of the loader is {options.pack_multiple}; give PackedLoader pack_multiple={multiple}"
        )


def _require_counts(config: Any, options: LoaderOptions, num_chunks: int) -> None:
    has_equal_counts = options.equal_micro_batches or options.micro_batches is not None
    if config.num_moe_experts is not None and config.expert_model_parallel_size > 1 and not has_equal_counts:
        raise ConfigError(
            f"expert_model_parallel_size is {config.expert_model_parallel_size}: replicas exchange tokens in every "
            "layer, and one with fewer micro-batches than another would leave it waiting forever; make the loader with "
            "equal_micro_batches=True, its default"
        )
    group, pipeline = config.microbatch_group_size_per_vp_stage, config.pipeline_model_parallel_size
    if num_chunks > 1 and group < pipeline:
        raise ConfigError(
            f"microbatch_group_size_per_vp_stage is {group}, and the interleaved schedule takes groups of at least as "
            f"many micro-batches as the pipeline is long, {pipeline}; raise it, or use one chunk a stage"
        )
