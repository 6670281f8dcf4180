"""`greedy_tokens`: what a model writes on from a prompt, by the forwards that train it.

The prompt is one slice of a document, every new token the next slice, so keys and values of what stands are kept as
those of a document that is cut. One stage, whole matrices; rank 0 writes, the others wait for the next step. Price: a
forward of one row for every new token, on a GPU bound by its launches.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from evenload.config.sections import SamplesConfig
from evenload.config.train_config import TrainConfig
from evenload.data.encoding.text_encoder import with_opening
from evenload.data.encoding.tokenize import ByteTokenizer, FileTokenizer
from evenload.errors import ConfigError
from evenload.runtime.replay.forward_store import ForwardStore
from evenload.runtime.replay.pack_tokens import PackTokens
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.layout import ParallelLayout
from evenload.types.sample import Sample
from evenload.types.token_range import Range


def require_whole_model(config: TrainConfig, layouts: Sequence[ParallelLayout]) -> None:
    """One process holds all of the model in every layout of a run with `[samples]`.

    Raises:
        ConfigError: none does in one of them, or the records of the run are ids, whose text nobody knows.
    """
    if config.samples is None:
        return
    for layout in layouts:
        if layout.num_stages > 1 or layout.tp > 1:
            raise ConfigError(
                f"[samples] is set, but in layout {layout.describe()} no process holds the whole model; samples need "
                "pp, virtual and tp 1. Leave [samples] out, and write from the exported model"
            )
    if config.data.record == "tokens":
        raise ConfigError("[samples] is set, but data.record is 'tokens': there is no tokeniser for the prompts")


class Sampler:
    """Of a run with `[samples]`, on one rank.

    Args:
        opening: ids that the run's texts begin with, and so the prompts.
    """

    def __init__(
        self,
        settings: SamplesConfig,
        tokenizer: ByteTokenizer | FileTokenizer,
        longest: int | None,
        opening: tuple[int, ...] = (),
    ) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self._prompts = [with_opening(tokenizer.encode(prompt), opening) for prompt in settings.prompts]
        for prompt, tokens in zip(settings.prompts, self._prompts, strict=True):
            if not len(tokens):
                raise ConfigError(
                    f"samples: prompt {prompt!r} is no token of tokenizer '{tokenizer.name}', and a model writes on "
                    "from at least one; give another text in samples.prompts"
                )
            if longest is not None and len(tokens) + settings.max_new_tokens > longest:
                raise ConfigError(
                    f"samples: prompt '{prompt}' of {len(tokens)} tokens and samples.max_new_tokens "
                    f"{settings.max_new_tokens} are more than the model's {longest} positions; lower max_new_tokens"
                )

    def is_due(self, steps_done: int) -> bool:
        """After so many steps."""
        return steps_done % self._settings.every_steps == 0

    def run(self, step: int, stage: PipelineStage) -> tuple[Sample, ...]:
        """What the model writes on after a step."""
        found = []
        for prompt, tokens in zip(self._settings.prompts, self._prompts, strict=True):
            written = greedy_tokens(stage, tokens, self._settings.max_new_tokens, self._tokenizer.eos_id)
            found.append(Sample(step=step, prompt=prompt, text=self._tokenizer.decode(written)))
        return tuple(found)


@torch.no_grad()
def greedy_tokens(
    stage: PipelineStage, prompt: NDArray[np.int32], max_new_tokens: int, end_id: int | None
) -> NDArray[np.int64]:
    """The likeliest tokens after a prompt, at most so many; int64[n], without the token that ends it."""
    total = len(prompt) + max_new_tokens
    store = ForwardStore({0: total}, {0: [0, 1]})
    stage.begin_step({0: total})
    written: list[int] = []
    coming, start = torch.from_numpy(prompt.astype(np.int64)).to(stage.device), 0
    while len(written) < max_new_tokens:
        stop = start + len(coming)
        positions = torch.arange(start, stop, device=stage.device)
        pack = PackTokens((Range(0, start, stop),), coming, torch.full_like(coming, -100), positions)
        hidden = stage.forward(pack, None, store)
        token = int(stage.next_logits(hidden[-1:]).argmax())
        if token == end_id:
            break
        written.append(token)
        coming, start = torch.tensor([token], device=stage.device), stop
    store.end_pack(1)
    return np.array(written, np.int64)
