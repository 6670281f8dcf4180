"""Check the tensors of a Hugging Face directory against the configured model, and load them.

Headers of safetensors files name every tensor with its type, shape and place, so damage, quantised weights, and tensors
that the model lacks or has no place for are found without reading a weight. What transformers would only warn about is
refused. A head that the model ties to its embedding is read and compared.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.model.weight_conversion import Conversion, find_conversions, is_ignored, of_other_parts

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_HEAD = "lm_head.weight"
_DEQUANTISED_BY = {
    "fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config", "compressed-tensors": "CompressedTensorsConfig",
}  # fmt: skip
"""transformers' settings that can dequantise weights while it loads them, by method."""
LEFT_OUT = "evenload_left_out"
"""Key of an index's metadata: names of tensors that its files hold and that are not the model's."""


@dataclass(frozen=True)
class StoredTensor:
    """Locates a stored tensor; dtype as safetensors names it."""

    file: str
    dtype: str
    shape: tuple[int, ...]


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
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(file.name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()
            }
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged, or not a safetensors file ({error}); fetch it again") from error


Place = tuple[Conversion, str]
"""By which conversion a tensor of a model comes from files, and how that names it."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Holds where all tensors of a model lie in a directory (`fitting_weights`).

    Args:
        whole: the model, on the meta device.
        places: by name in the model; tied tensors have one place.
    """

    directory: Path
    whole: PreTrainedModel
    stored: Mapping[str, StoredTensor]
    places: Mapping[str, Place]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors of a unit, parameters and buffers, by their names in the model; read no others."""
        wanted: dict[Conversion, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            conversion, made_as = self.places[name]
            wanted.setdefault(conversion, {})[made_as] = tensor
        with torch.no_grad(), self._reading() as read:
            for conversion, results in wanted.items():
                # Cast before they are joined, as transformers does: it takes less memory.
                dtype = next(iter(results.values())).dtype
                made = conversion.convert(self.whole, lambda name, dtype=dtype: read(name).to(dtype))  # type: ignore[misc]
                for name, tensor in results.items():
                    tensor.copy_(made[name])

    def read(self, place: Place) -> Tensor:
        """Return a tensor of the model in the precision in which it is stored."""
        conversion, name = place
        with self._reading() as read:
            return conversion.convert(self.whole, read)[name]

    @contextmanager
    def _reading(self) -> Iterator[Callable[[str], Tensor]]:
        with ExitStack() as stack:
            files = cache(lambda file: stack.enter_context(safe_open(self.directory / file, framework="pt")))
            yield lambda name: files(self.stored[name].file).get_tensor(name)


def fitting_weights(whole: PreTrainedModel, directory: Path) -> Weights:
    """Find all tensors of a model, which is on the meta device, by the headers of a directory. `UnsupportedModelError`
    for quantised weights, `ConfigError` for any that are not exactly the model's."""
    stored, state = stored_weights(directory), whole.state_dict()
    try:
        conversions, others = find_conversions(whole, stored)
    except ValueError as error:
        raise ConfigError(f"{directory}: {error}; remove one") from error
    pictures = of_other_parts(stored)
    ignored = [name for name in others if name in pictures or is_ignored(whole, name)]
    # Whole numbers that the model itself keeps are no quantised weights.
    numbers = [one.stored_names[0] for one in conversions if not state[one.name].is_floating_point()]
    unscaled = {*ignored, *numbers}
    for name, tensor in stored.items():
        if name not in unscaled:
            require_plain(tensor, name, directory)
    made = {
        name: (conversion, name)
        for conversion in conversions
        for name in _require_shapes(conversion, stored, whole, state, directory)
    }
    places, ties = dict(made), whole.all_tied_weights_keys
    for head, words in ties.items():
        if one := made.get(words) or made.get(head):
            places[words] = places[head] = one
    if missing := [name for name in state if name not in places]:
        untied = " (tie_word_embeddings = false)" if missing[0] == _HEAD else ""
        raise ConfigError(
            f"{directory}: no tensor '{missing[0]}'{untied}; is this the directory of the configured model, and whole?"
        )
    if extra := [name for name in others if name not in ignored]:
        raise ConfigError(
            f"{directory / stored[extra[0]].file}: the model of config.json has no place for {len(extra)} tensors, "
            f"such as '{extra[0]}' of shape {stored[extra[0]].shape}. Correct config.json (biases, quantisation, tied "
            "embeddings), or remove these tensors"
        )
    weights = Weights(directory, whole, stored, places)
    for head, words in ties.items():
        if head in made and words in made:
            _require_tied(weights, made[head], made[words])
    return weights


def _require_shapes(
    conversion: Conversion,
    stored: Mapping[str, StoredTensor],
    whole: PreTrainedModel,
    state: Mapping[str, Tensor],
    directory: Path,
) -> list[str]:
    """Return the names of what a conversion makes; refuse stored tensors of which it makes other shapes."""
    if absent := conversion.absent_name():
        raise ConfigError(f"{directory}: no tensor '{absent}', but others of its kind; is this the whole directory?")
    names = conversion.stored_names
    of = f"'{names[0]}' has shape {stored[names[0]].shape}"
    if conversion.rule is not None and len(names) > 1:
        kinds = " and ".join(conversion.rule.source_patterns)
        of = f"{of}, and with {len(names) - 1} others makes '{conversion.name}', which transformers makes of {kinds}"
    where = directory / stored[names[0]].file
    try:
        made = conversion.convert(whole, lambda name: torch.empty(stored[name].shape, device="meta"))
    except Exception as error:  # its operations have no common class
        why = " ".join(str(error).split())
        raise ConfigError(f"{where}: {of}; these do not fit together ({why})") from error
    for name, tensor in made.items():
        needed = tuple(state[name].shape) if name in state else "no such tensor"
        if tuple(tensor.shape) != needed:
            result = f"; it has shape {tuple(tensor.shape)}" if len(names) > 1 else ""
            raise ConfigError(f"{where}: {of}{result}, the model needs {needed}")
    return list(made)


def _require_tied(weights: Weights, head: Place, words: Place) -> None:
    """Refuse a head that is not, to the precision it is stored in, the embedding to which the model ties it."""
    result, expected = weights.read(head), weights.read(words)
    if result.shape == expected.shape and torch.equal(result, expected.to(result.dtype)):
        return
    off = "of another shape"
    if result.shape == expected.shape:
        off = f"off by up to {(result.float() - expected.to(result.dtype).float()).abs().max():.3g}"
    raise ConfigError(
        f"{weights.directory / weights.stored[head[1]].file}: '{head[1]}' is not '{words[1]}', which config.json "
        f"ties to it (tie_word_embeddings = true); it is {off}. Set tie_word_embeddings to false to train both, as "
        "transformers would, or remove it to train one"
    )


def require_plain(tensor: StoredTensor, name: str, directory: Path) -> None:
    """Raise `UnsupportedModelError` for a tensor whose numbers need a scale."""
    if tensor.dtype not in _FLOATS:
        raise UnsupportedModelError(
            f"{directory / tensor.file}: '{name}' is stored as {tensor.dtype}, so the weights are quantised; only "
            f"{', '.join(_FLOATS)} are read. Fetch the config.json that belongs to them: its "
            "quantization_config says how to dequantise them"
        )


def dequantise_once(directory: str, method: str) -> str:
    """Return what to do about quantised weights, by the `quant_method` of config.json: a command, if there is one."""
    if (settings := _DEQUANTISED_BY.get(method)) is None:
        return f"Give weights that are not quantised: transformers has no way to save those of {method} dequantised"
    return (
        f"Dequantise them once and give '{directory}-bf16', with the tokeniser's files: python -c "
        f"\"from transformers import AutoModelForCausalLM as M, {settings} as C; M.from_pretrained('{directory}', "
        f"dtype='bfloat16', quantization_config=C(dequantize=True)).save_pretrained('{directory}-bf16', "
        'save_original_format=False)"'
    )


POSITIONS, EMBEDDING, NORM, HEAD, LAYERS = range(-1, 4)
"""Numbers of the modules that have a seed of their own; layers count on from the last."""


def initialise_weights(whole: PreTrainedModel, number: int, unit: nn.Module, seed: int) -> None:
    """Fill a unit of a transformers model by the model's own rules, from a seed of its own."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(unit_seed(number, seed))
        # Children first: GPT-2's blocks fill a matrix of theirs again.
        unit.apply(whole._init_weights)


def unit_seed(number: int, seed: int) -> int:
    return seed * 1_000_003 + number


def empty_parameters(unit: nn.Module, device: torch.device | str) -> None:
    """Give the parameters of a unit memory without values, one where modules share one; buffers stay as they are."""
    made: dict[int, nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    values = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]


def fill_buffers(whole: PreTrainedModel, device: torch.device | str) -> None:
    """Give all buffers of a model without memory the values with which it makes them itself: frequencies of rotary
    embeddings, Gemma's factor of embeddings, biases that choose experts (which `Weights.load` fills then)."""
    parameters = set(whole.parameters())
    for module in whole.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for parameter in parameters:
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves these as they are
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        whole.initialize_weights()
    for parameter in parameters:
        del parameter._is_hf_initialized  # type: ignore[attr-defined]
