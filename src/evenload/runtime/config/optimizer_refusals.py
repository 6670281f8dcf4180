"""`require_optimizer`: what no test trains together with Muon or a moving average of weights is refused, by name."""

from collections.abc import Iterator

from evenload.errors import ConfigError
from evenload.runtime.config.train_config import TrainConfig
from evenload.types.model import ModelSpec


def require_optimizer(config: TrainConfig, model: ModelSpec, num_layouts: int) -> None:
    """The settings of the optimizer go with the model and with so many layouts that the run may take.

    Raises:
        ConfigError: they do not; says which, and why.
    """
    for setting, why in _refusals(config, model, num_layouts):
        raise ConfigError(f"{setting} {why}")


def _refusals(config: TrainConfig, model: ModelSpec, num_layouts: int) -> Iterator[tuple[str, str]]:
    live = "and the layout may change while the run trains, which moves AdamW's state alone; leave one of both out"
    if config.train.ema_decay is not None and num_layouts > 1:
        yield f"train.ema_decay is {config.train.ema_decay},", live
    if config.optimizer.name != "muon":
        return
    setting = "optimizer.name is 'muon',"
    if config.parallel.tp > 1:
        yield (
            setting,
            (
                f"and parallel.tp is {config.parallel.tp}: it orthogonalises whole matrices, of which ranks of a "
                "tensor-parallel group hold parts; use dp, cp or pp, or optimizer.name = 'adamw'"
            ),
        )
    if model.num_experts:
        yield (
            setting,
            (
                f"and {model.name} has experts, whose matrices lie in one tensor that it does not take apart; use "
                "optimizer.name = 'adamw'"
            ),
        )
    if config.model.lora is not None:
        yield setting, "and adapters (model.lora) are trained, which is not tested; use optimizer.name = 'adamw'"
    if num_layouts > 1:
        yield setting, live
