"""What the checks that compute run on: the user's model, shortened where it is large, and a small part of the data.

Isolation, invariance and resume do not depend on how many layers there are or how many documents a batch holds, so a
minute is enough: the model keeps its first layers (with its own weights), a step has a few documents, long ones are
cut, and two replicas stand for all. Everything that was made smaller is said in `notes`. Ledger and memory look at the
user's own batches and model.
"""

import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec

from evenload.config.train_config import TrainConfig
from evenload.data.hub import local_path
from evenload.runtime.model.configured import load_config, model_spec
from evenload.runtime.model.supported import check_supported
from evenload.runtime.model.weight_files import INDEX_FILE, LEFT_OUT, stored_weights
from evenload.types.architectures.architecture import ModuleNames
from evenload.types.counted import counted

STEPS = 5
"""Steps of the run that is resumed."""

# A forward and backward of so many FLOPs takes about a second on two CPU cores.
_STEP_FLOPS = 4e10
_MAX_PARAMETERS = 30e6
_MIN_TOKENS, _MAX_TOKENS = 512, 6144
_DOCUMENTS = 8
_REPLICAS = 2


class Scope(NamedTuple):
    """The settings of a smaller run of the same kind, and what is smaller than in the user's."""

    config: TrainConfig
    notes: tuple[str, ...]


def checked_scope(config: TrainConfig, directory: Path) -> Scope:
    """The smaller run; `directory`, for a shortened model and its checkpoint, is visible to all ranks."""
    model = model_spec(config)
    notes = []
    settings, parallel = config.model, config.parallel
    wanted_layers = max(parallel.pp * parallel.virtual, 2, int(_MAX_PARAMETERS // model.stored_parameters_per_layer))
    layers = min(model.num_layers, wanted_layers)
    parameters = layers * model.stored_parameters_per_layer + 2 * model.embedding_parameters
    if layers < model.num_layers:
        notes.append(f"first {layers} of {model.num_layers} layers")
        source = local_path(settings.path, "model.path", "settings" if settings.random_init else "weights")
        _write_short_model(Path(source), directory / "model", layers, random_init=settings.random_init)
        settings = msgspec.structs.replace(settings, path=str(directory / "model"))
        parallel = msgspec.structs.replace(parallel, stage_layers=None)
    # The reference trains no balance of routers; other models have none.
    settings = msgspec.structs.replace(settings, router_aux_loss_coef=0.0)
    tokens = int(min(max(_STEP_FLOPS / (6 * parameters), _MIN_TOKENS), _MAX_TOKENS))
    data, options = config.data, config.plan.options
    longest = min(data.max_document_tokens, tokens // 4)
    if longest < data.max_document_tokens:
        notes.append(f"documents cut to {longest:,} of {data.max_document_tokens:,} tokens")
    if parallel.dp > _REPLICAS:
        notes.append(f"{_REPLICAS} of {parallel.dp} replicas")
        parallel = msgspec.structs.replace(parallel, dp=_REPLICAS)
    documents = min(data.batch_documents or _DOCUMENTS, _DOCUMENTS)
    if documents != data.batch_documents:
        notes.append(f"{counted(documents, 'document')} a step")
    smaller_data = msgspec.structs.replace(
        data,
        batch_documents=documents,
        batch_tokens=None,
        max_document_tokens=longest,
        overlong="truncate" if longest < data.max_document_tokens else data.overlong,
        epochs=None,
        workers=0,
        shuffle_window=min(data.shuffle_window, 64),
    )
    # Room for several documents in a pack, so that there is something to keep apart.
    pack_tokens = max(longest, min(options.max_pack_tokens or 2 * longest, 2 * longest))
    options = msgspec.structs.replace(options, max_pack_tokens=pack_tokens)
    train = msgspec.structs.replace(
        config.train,
        steps=max(config.train.steps or STEPS, STEPS),
        output_dir=str(directory / "run"),
        checkpoint_every_steps=3,
        keep_checkpoints=0,
        background_checkpoints=False,
        resume=True,
    )
    smaller = msgspec.structs.replace(
        config,
        model=settings,
        parallel=parallel,
        data=smaller_data,
        # Whether the user's run fits its limit is another check.
        plan=msgspec.structs.replace(config.plan, options=options, memory_bytes=None),
        train=train,
    )
    return Scope(config=smaller, notes=tuple(notes))


def _write_short_model(path: Path, directory: Path, layers: int, *, random_init: bool) -> None:
    """A directory with the first layers' config.json and, unless weights are random, their weights."""
    source = path if path.is_dir() else path.parent
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config = load_config(str(path))
    architecture, settings = check_supported(config), config.to_dict()
    num_layers = settings[architecture.layers_key]
    settings[architecture.layers_key] = layers
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == num_layers:
            settings[key] = value[:layers]
    (directory / "config.json").write_text(json.dumps(settings))
    if random_init:
        return
    # Links to the files, and an index that leaves out the other layers' tensors.
    names = architecture.names
    stored = stored_weights(source)
    kept = {name: tensor.file for name, tensor in stored.items() if _layer_of(name, names) < layers}
    for file in sorted(set(kept.values())):
        (directory / file).symlink_to((source / file).resolve())
    index = {"metadata": {LEFT_OUT: sorted(stored.keys() - kept)}, "weight_map": kept}
    (directory / INDEX_FILE).write_text(json.dumps(index))


def _layer_of(name: str, names: ModuleNames) -> int:
    """Index of a tensor's layer; -1 for those of none."""
    found = re.match(rf"({names.decoder}\.)?{names.layers}\.(\d+)\.", name)
    return int(found.group(2)) if found else -1
