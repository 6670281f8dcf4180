"""Arguments of a `PackedLoader` that contradict each other, refused before anything is opened."""

from evenload.data.config import DataConfig
from evenload.errors import ConfigError
from evenload.integrations.loader_peers import LoaderPlace
from evenload.plan.strategies import WHOLE_STRATEGIES


def check_numbers(max_tokens: int, micro_batches: int | None, pack_multiple: int, strategy: str) -> None:
    """Sizes, before anything is opened.

    Raises:
        ConfigError: naming the value.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens}, must be at least 1")
    if micro_batches is not None and micro_batches < 1:
        raise ConfigError(f"micro_batches is {micro_batches}, must be at least 1, or None")
    if pack_multiple < 1:
        raise ConfigError(f"pack_multiple is {pack_multiple}, must be at least 1")
    if max_tokens % pack_multiple:
        raise ConfigError(
            f"max_tokens is {max_tokens}, pack_multiple {pack_multiple}: a full pack padded to a multiple would pass "
            f"max_tokens; set max_tokens to a multiple, such as {-(-max_tokens // pack_multiple) * pack_multiple}"
        )
    if pack_multiple > 1 and strategy not in WHOLE_STRATEGIES:
        raise ConfigError(
            f"pack_multiple is {pack_multiple}, and strategy '{strategy}' cuts documents, so that later packs attend "
            "to tokens of earlier ones; packs can be padded only where documents stay whole: choose one of "
            f"{', '.join(WHOLE_STRATEGIES)}, or leave pack_multiple out"
        )


def check_together(
    config: DataConfig,
    place: LoaderPlace,
    strategy: str,
    max_tokens: int,
    micro_batches: int | None,
    equal: bool,
    evaluation: bool,
) -> None:
    """Settings that contradict each other.

    Args:
        equal: all ranks run equally many micro-batches.

    Raises:
        ConfigError: what, the values, the fix.
    """
    if config.max_document_tokens > max_tokens and strategy in WHOLE_STRATEGIES:
        raise ConfigError(
            f"max_document_tokens is {config.max_document_tokens}, max_tokens of a pack {max_tokens}: such a document "
            "fits no pack; raise max_tokens, or lower max_document_tokens and choose overlong"
        )
    if micro_batches is not None and config.batch_tokens is not None:
        room = micro_batches * place.world_size * max_tokens
        if config.batch_tokens > room:
            raise ConfigError(
                f"batch_tokens is {config.batch_tokens}, but {place.world_size} ranks x {micro_batches} micro_batches "
                f"x {max_tokens} max_tokens hold {room}; lower batch_tokens (packs of whole documents are seldom "
                "full), or raise one of the others"
            )
    if strategy == "fixed_exact" and place.reads_alone and place.world_size > 1:
        raise ConfigError(
            "strategy 'fixed_exact' depends on the time its solver takes, and ranks that do not talk (rank and "
            "world_size given) would plan differently; use fixed_greedy, or group"
        )
    if evaluation and (micro_batches is not None or not equal):
        raise ConfigError(
            f"evaluation=True with micro_batches = {micro_batches}, equal_micro_batches = {equal}; in evaluation every "
            "rank runs as many as the rank with the most: leave both out"
        )
