"""`share_sequences`: DeepSpeed's sequence parallelism (Ulysses) of a transformers model that trains packs.

    ranks of a group         rank 0            rank 1
    rows of a pack           [0, T/2)          [T/2, T)          embedding, norms, feed-forward blocks, loss
    all-to-all
    attention                heads 0 .. 3      heads 4 .. 7      of all T rows, each document by itself
    all-to-all
    rows of a pack           [0, T/2)          [T/2, T)

Groups, all-to-alls and their place in the model are DeepSpeed's (`UlyssesSPAttentionHF.register_with_transformers`).
Attention between them is Evenload's (`document_attention`), because `sdpa` under Ulysses is one causal sequence: the
documents of a pack would see each other without a word. It reads the cumulative lengths of the whole pack, which every
rank of the group has.

DeepSpeed's `UlyssesSPDataLoaderAdapter` is not used: it wants a pack of its own from every rank of the group, takes
tensors [1, T] only, and so has no place for cumulative lengths. Here the loader gives a group's ranks the same packs
(`PackedLoader(sequence_ranks=...)`) and each takes its rows (`sequence_share`).
"""

from typing import Any

from torch import Tensor, nn

from evenload.data.encoders import IGNORE_INDEX
from evenload.errors import ConfigError
from evenload.integrations.engines.document_attention import document_attention
from evenload.integrations.engines.pack_loss import model_inputs, token_loss

DOCUMENTS = "evenload_documents"
"""Name of Evenload's attention among transformers' (`attn_implementation`)."""
_OTHER_ATTENTION = ("dropout", "sliding_window", "softcap", "s_aux")
"""What a model's attention may be given beside its scale, and `document_attention` does not have."""


class SequenceGroups:
    """DeepSpeed's groups of ranks that share sequences, as its `mpu`; none of these ranks is a tensor-parallel one.

    DeepSpeed's own module calls them model-parallel, too. Handed to the engine as it is, checkpoints say that they are
    of as many tensor-parallel ranks and cannot be made universal, and universal ones cannot be loaded.
    """

    def __init__(self, groups: Any) -> None:
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._groups, name)

    def get_tensor_model_parallel_world_size(self) -> int:
        """1."""
        return 1

    def get_tensor_model_parallel_rank(self) -> int:
        """0."""
        return 0


def share_sequences(model: Any, ranks: int) -> SequenceGroups | None:
    """Let groups of `ranks` neighbouring ranks share every pack of a transformers model. Collective, once a process,
    after `deepspeed.init_distributed()`, before `deepspeed.initialize(..., mpu=)`; sets the model's attention.

    Args:
        model: a transformers causal model whose query heads `ranks` divides, and whose key heads it divides or is a
            multiple of.
        ranks: of a group; 1 = nothing is shared, and nothing is changed.

    Returns:
        Groups for `deepspeed.initialize(mpu=)`; None for one rank.

    Raises:
        ConfigError: heads or ranks that do not divide, or a model whose attention cannot be set.
    """
    if ranks == 1:
        return None
    import deepspeed  # type: ignore[missing-import]
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF  # type: ignore[missing-import]
    from transformers import AttentionInterface

    if not deepspeed.comm.is_initialized():
        raise ConfigError("DeepSpeed's process group is not there yet; call deepspeed.init_distributed() first")
    if DOCUMENTS not in AttentionInterface().valid_keys():
        AttentionInterface.register(DOCUMENTS, _transformers_attention)
    model.set_attn_implementation(DOCUMENTS)
    if model.config._attn_implementation != DOCUMENTS:
        raise ConfigError(
            f"the attention of {type(model).__name__} cannot be set, so its packs cannot be shared; use a model of "
            "transformers that has set_attn_implementation, or sequence_ranks=1"
        )
    try:
        groups = UlyssesSPAttentionHF.register_with_transformers(model, DOCUMENTS, ranks, micro_batch_size=1)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"DeepSpeed cannot share sequences among {ranks} ranks: {error}") from error
    return SequenceGroups(groups)


def require_documents_apart(config: Any) -> None:
    """A `ConfigError` where documents of a shared pack would see each other."""
    name = getattr(config, "_attn_implementation", None)
    if name != DOCUMENTS and "flash_attention" not in str(name):
        raise ConfigError(
            f"the model's attention is '{name}', which under Ulysses runs a pack as one sequence, so its documents "
            "would see each other; call mpu = share_sequences(model, ranks) in the place of DeepSpeed's "
            "register_with_transformers"
        )


def sequence_share(batch: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """A rank's rows of an `hf` batch.

    Args:
        batch: of T tokens, which `ranks` divides.
        rank: of the sequence group.

    Returns:
        The batch with `input_ids` and `position_ids` [1, T / ranks], `shift_labels` [1, T / ranks] in the place of
        `labels` (row i has the label of token i + 1, which may lie on the next rank), and all else as it was:
        cumulative lengths are those of the whole pack.

    Raises:
        ConfigError: ranks that do not divide T.
    """
    tokens = batch["input_ids"].shape[1]
    if tokens % ranks:
        raise ConfigError(
            f"a pack of {tokens} tokens cannot be shared by {ranks} ranks; make the loader with sequence_ranks={ranks}"
        )
    rows = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks)
    shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    columns = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "shift_labels": shifted}
    rest = {key: value for key, value in batch.items() if key not in (*columns, "labels")}
    return {key: column[:, rows].contiguous() for key, column in columns.items()} | rest


def share_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """As `hf_pack_loss`, of a rank's share; those of a group add up to the pack's.

    Args:
        batch: of `sequence_share`.
    """
    return token_loss(model(**model_inputs(batch)).logits[0], batch["shift_labels"][0], batch)


def _transformers_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """As an attention of transformers' `AttentionInterface`.

    Args:
        query: [1, H, T, D]; key, value: [1, G, T, D].
        settings: of them `scaling` and `cu_seq_lens_q` of the T rows.

    Returns:
        [1, T, H, D], and no weights.
    """
    unknown = [name for name in _OTHER_ATTENTION if isinstance(settings.get(name), Tensor) or settings.get(name)]
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} attends with {', '.join(unknown)}, which attention '{DOCUMENTS}' does not have; "
            "train without it, or with sequence_ranks=1"
        )
    edges = settings.get("cu_seq_lens_q")
    if edges is None or attention_mask is not None or query.shape[0] != 1:
        raise ConfigError(
            f"attention '{DOCUMENTS}' trains packs only: batches of a PackedLoader with format='hf', and no "
            "attention_mask"
        )
    if not hasattr(edges, "evenload_edges"):
        edges.evenload_edges = tuple(edges.tolist())  # the host waits for the device once a pack, not once a layer
    q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    return document_attention(q, k, v, edges.evenload_edges, settings["scaling"])[None], None
