"""What Megatron-Core cannot do with a plan, refused before anything runs, with the reason and what works instead.

Every rule here is one that Megatron-Core 0.16.1 breaks late or without a word: a shape that a neighbour does not
expect, a mean of means instead of a mean over label tokens, ranks that wait for each other forever.
"""

from typing import Any

from evenload.errors import ConfigError
from evenload.integrations.loader_options import LoaderOptions


def require_runnable(config: Any, options: LoaderOptions) -> None:
    """Refuse settings of a model and a loader that do not go together.

    Args:
        config: the model's `TransformerConfig`.
        options: of the loader; it has refused strategies that cut documents itself.

    Raises:
        ConfigError: with the reason, and the nearest thing that works.
    """
    if options.format != "megatron":
        raise ConfigError(
            f"format of the loader is '{options.format}', Megatron-Core reads 'megatron'; make it with "
            'PackedLoader(..., engine="megatron", group=parallel_state.get_data_parallel_group())'
        )
    _require_sums(config)
    _require_shapes(config, options)
    _require_schedule(config)


def rows_multiple(config: Any) -> int:
    """What the rows of a pack have to be a multiple of."""
    return config.tensor_model_parallel_size if config.sequence_parallel else 1


def _require_sums(config: Any) -> None:
    if not config.calculate_per_token_loss:
        raise ConfigError(
            "calculate_per_token_loss is False: Megatron-Core would take the mean of each micro-batch, and the mean of "
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


def _require_schedule(config: Any) -> None:
    if config.num_moe_experts is not None:
        raise ConfigError(
            f"num_moe_experts is {config.num_moe_experts}: a router's balance and capacity count the tokens of a "
            "micro-batch, so the gradient would depend on how documents are packed; and where experts are spread over "
            "replicas, one with fewer micro-batches than another leaves it waiting forever. Train a dense model here, "
            "mixtures of experts with 'evenload train'"
        )
    if config.virtual_pipeline_model_parallel_size is not None:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size is {config.virtual_pipeline_model_parallel_size}: the interleaved "
            "schedule takes some numbers of micro-batches only, and with two pipeline ranks it waits forever for "
            "shapes, since those for both neighbours go to one rank; leave it out, so that 1F1B runs"
        )
