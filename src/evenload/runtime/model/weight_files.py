"""Check the tensors of a Hugging Face directory against the configured model, and load them.

Headers of safetensors files name every tensor with its type, shape and place, so damage, quantised weights, and tensors
that the model lacks or has no place for are found without reading a weight. What transformers would only warn about is
refused. A tensor that the model computes or ties itself is read and compared.
"""

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from evenload.errors import ConfigError, UnsupportedModelError
from evenload.types.architectures import ExpertNames, ModuleNames

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_FLOATS = ("F64", "F32", "F16", "BF16")
_COMPUTED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias))")
"""Rotary frequencies and GPT-2's causal masks, which the model computes and old versions of transformers stored."""
_HEAD = "lm_head.weight"
LEFT_OUT = "evenload_left_out"
"""Key of an index's metadata: names of tensors that its files hold and that are not the model's."""


@dataclass(frozen=True)
class StoredTensor:
    """Locates a stored tensor; `name` in its file, "" = as it is looked up; dtype as safetensors names it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    name: str = ""


def stored_weights(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a directory by name; `ConfigError` where there are none, or files are damaged."""
    index, adapter = directory / INDEX_FILE, directory / "adapter_config.json"
    if adapter.is_file():
        raise ConfigError(f"{adapter}: transformers would load it too; name it in model.lora.path, or move it away")
    if index.is_file():
        return _indexed_weights(index)
    if not (directory / SINGLE_FILE).is_file():
        raise ConfigError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}; or set model.random_init = true")
    return read_header(directory / SINGLE_FILE)


def _indexed_weights(index: Path) -> dict[str, StoredTensor]:
    try:
        content = json.loads(index.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{index} is not JSON ({error}); fetch it again") from error
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ConfigError(f"{index} has no 'weight_map' that names a file for every tensor; fetch it again")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name, file in places.items():
        if Path(file).name != file:
            raise ConfigError(f"{index} names the file '{file}' for '{name}', which is not in its directory")
        if file not in headers:
            if not (index.parent / file).is_file():
                raise ConfigError(f"{index} names '{file}' for '{name}', and there is no such file; fetch it")
            headers[file] = read_header(index.parent / file)
        if name not in headers[file]:
            raise ConfigError(f"{index} says that '{name}' is in {file}, which does not hold it; fetch both again")
    if headers.keys() != {SINGLE_FILE} and (index.parent / SINGLE_FILE).is_file():
        raise ConfigError(f"{index} names other files than {SINGLE_FILE}, which transformers reads; remove one of both")
    metadata = content.get("metadata")
    left_out = metadata.get(LEFT_OUT, ()) if isinstance(metadata, dict) else ()
    stored: dict[str, StoredTensor] = {}
    # transformers reads whole files, so a tensor that the index does not name counts as well.
    for tensors in headers.values():
        for name, tensor in tensors.items():
            if name in stored:
                raise ConfigError(f"{index.parent}: '{name}' is in {stored[name].file} and {tensor.file}; remove one")
            if name not in left_out:
                stored[name] = tensor
    return stored


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by name; `ConfigError` where the file is not a complete one."""
    size_bytes = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(_LENGTH_BYTES))
            if length > min(size_bytes, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length:,} bytes")
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        stored = {name: StoredTensor(file.name, one["dtype"], tuple(one["shape"])) for name, one in tensors.items()}
        stop = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (struct.error, ValueError, LookupError, AttributeError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{file} is not a safetensors file ({what}); fetch it again") from error
    needed_bytes = _LENGTH_BYTES + length + stop
    if size_bytes != needed_bytes:
        sizes = f"it has {size_bytes:,} bytes and its header says {needed_bytes:,}"
        raise ConfigError(f"{file} is damaged: {sizes}; fetch it again")
    return stored


def require_fitting(
    stored: dict[str, StoredTensor], whole: Any, directory: Path, names: ModuleNames, experts: ExpertNames | None
) -> None:
    """Refuse weights that are not exactly those of the whole model: `UnsupportedModelError` for quantised ones, else
    `ConfigError`. Where only the head of tied embeddings is stored, it is entered in `stored` as the embedding."""
    embedding, tied = f"{names.embedding_path}.weight", bool(whole.config.tie_word_embeddings)
    source = next(stored_parts(stored, embedding, torch.empty(0), None))[0]
    if tied and _HEAD in stored and source not in stored:
        stored[source] = replace(stored.pop(_HEAD), name=_HEAD)
    places = {name: parameter for name, parameter in whole.named_parameters() if not (tied and name == _HEAD)}
    known = {_HEAD} if tied else set()
    for name, parameter in places.items():
        for part, view in stored_parts(stored, name, parameter.detach(), experts):
            if part not in stored:
                raise ConfigError(
                    f"{directory}: no tensor '{part}'{' (tie_word_embeddings = false)' if name == _HEAD else ''}; is "
                    "this the directory of the configured model, and whole?"
                )
            require_plain(stored[part], part, directory)
            if stored[part].shape != tuple(view.shape):
                raise ConfigError(
                    f"{directory / stored[part].file}: '{part}' has shape {stored[part].shape}, the model needs "
                    f"{tuple(view.shape)}"
                )
            known.add(part)
    extra = [name for name in stored if name not in known and not _COMPUTED.fullmatch(name)]
    if extra:
        require_plain(stored[extra[0]], extra[0], directory)
        raise ConfigError(
            f"{directory / stored[extra[0]].file}: the model of config.json has no place for {len(extra)} tensors, "
            f"such as '{extra[0]}' of shape {stored[extra[0]].shape}. Correct config.json (biases, quantisation, tied "
            "embeddings), or remove these tensors"
        )
    for name in stored:
        if (tied and name == _HEAD) or name not in known:
            _require_computed(stored, name, directory, whole, source)


def _require_computed(
    stored: Mapping[str, StoredTensor], name: str, directory: Path, whole: Any, embedding: str
) -> None:
    """Refuse a tensor that is not, to the precision it is stored in, what the model has in its place."""

    def read(name: str) -> Tensor:
        with safe_open(directory / stored[name].file, framework="pt") as tensors:
            return tensors.get_tensor(name)

    result, computed = read(name), None
    why, fix = "what the model of config.json computes", "Correct config.json (rope_theta, rope scaling), or remove it"
    if not name.endswith("bias"):
        require_plain(stored[name], name, directory)
    if name == _HEAD:
        computed, why = read(embedding), f"'{embedding}', which config.json ties to it (tie_word_embeddings = true)"
        fix = "Set tie_word_embeddings to false to train both, as transformers would, or remove it to train one"
    elif name.endswith("masked_bias"):
        computed = result.clamp(max=-1e4)  # of any such number the softmax is 0
    elif name.endswith("bias"):
        computed = torch.ones(result.shape).tril() if result.dim() > 1 else None
    elif (rotary := getattr(whole.base_model, "rotary_emb", None)) is not None:
        computed = getattr(type(rotary)(whole.config), "inv_freq", None)
    off = "of another shape"
    if computed is not None and computed.shape == result.shape:
        ours, info = (
            computed.to(result.dtype),
            torch.finfo(result.dtype if result.is_floating_point() else torch.float32),
        )
        slack = 8 * info.eps, info.tiny * info.eps
        if torch.equal(result, ours) or (name != _HEAD and torch.allclose(result.double(), ours.double(), *slack)):
            return
        off = f"off by up to {(result.float() - ours.float()).abs().max():.3g}"
    raise ConfigError(f"{directory / stored[name].file}: '{name}' is not {why}; it is {off}. {fix}")


def require_plain(tensor: StoredTensor, name: str, directory: Path) -> None:
    """Raise `UnsupportedModelError` for a tensor whose numbers need a scale."""
    if tensor.dtype not in _FLOATS:
        raise UnsupportedModelError(
            f"{directory / tensor.file}: '{name}' is stored as {tensor.dtype}, so the weights are quantised; only "
            f"{', '.join(_FLOATS)} are read. Dequantise them once (transformers: from_pretrained, dequantize(), "
            "save_pretrained) and give that directory"
        )


def stored_parts(
    stored: Mapping[str, Any], name: str, tensor: Tensor, experts: ExpertNames | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in this directory, view) of the parts of a parameter; fused as in transformers' modules, or one by
    one. Directories that were saved without the head (the published GPT-2) leave the decoder's name out."""
    without_decoder = name.partition(".")[2]
    if name in stored:
        yield name, tensor
    elif without_decoder in stored:
        yield without_decoder, tensor
    else:
        yield from stored_tensors(name, tensor, experts)


def stored_tensors(name: str, tensor: Tensor, experts: ExpertNames | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in files, view) of the parts of a parameter; itself for all but a block with experts."""
    if experts is None or ".mlp." not in name:
        yield name, tensor
        return
    stem, part = name.replace(".mlp.", f".{experts.block}.").rsplit(".", 1)
    if not stem.endswith(".experts"):
        yield f"{stem}.{part}", tensor
        return
    for index, weight in enumerate(tensor.unbind(0)):
        if part == "down_proj":
            yield f"{stem}.{index}.{experts.down}.weight", weight
        else:
            gate, up = weight.chunk(2, dim=0)
            yield f"{stem}.{index}.{experts.gate}.weight", gate
            yield f"{stem}.{index}.{experts.up}.weight", up


POSITIONS, EMBEDDING, NORM, HEAD, LAYERS = range(-1, 4)
"""Numbers of the modules that have a seed of their own; layers count on from the last."""


def initialise_weights(whole: Any, number: int, unit: nn.Module, seed: int) -> None:
    """Fill a unit of a transformers model by the model's own rules, from a seed of its own."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(unit_seed(number, seed))
        # Children first: GPT-2's blocks fill a matrix of theirs again.
        unit.apply(whole._init_weights)


def unit_seed(number: int, seed: int) -> int:
    return seed * 1_000_003 + number


def load_weights(
    prefix: str, unit: nn.Module, directory: Path, stored: Mapping[str, StoredTensor], experts: ExpertNames | None
) -> None:
    """Copy the tensors of a Hugging Face directory into a unit, after `require_fitting`."""
    by_file: dict[str, list[tuple[str, Tensor]]] = {}
    for name, parameter in unit.named_parameters(prefix=prefix):
        for part, view in stored_parts(stored, name, parameter.detach(), experts):
            by_file.setdefault(stored[part].file, []).append((part, view))
    with torch.no_grad():
        for file, wanted in by_file.items():
            with safe_open(directory / file, framework="pt") as tensors:
                for name, view in wanted:
                    view.copy_(tensors.get_tensor(stored[name].name or name))


def fill_constants(unit: nn.Module) -> None:
    """Fill buffers that no file holds and that a model built without memory has lost: Gemma's factor of embeddings."""
    if isinstance(getattr(unit, "embed_scale", None), Tensor):
        unit.embed_scale.fill_(unit.scalar_embed_scale)  # type: ignore[operator]
