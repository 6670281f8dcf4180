"""What the files beside a `tokenizer.json` say: special tokens by name, and tokens that it lacks.

Read as `TokenizersBackend` of transformers 5 reads them, so that ids agree: `added_tokens_decoder` of
`tokenizer_config.json`; where that has none, `added_tokens.json`, and `special_tokens_map.json` goes before it; then
every special token that is not there yet. New tokens get the next free ids, whatever ids the files give them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from evenload.errors import ConfigError

NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Special tokens that all tokenisers of transformers have, in the order in which it adds them."""
TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
_DECODER, _EXTRA, _OLD_EXTRA = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"


def read_settings(file: Path) -> dict[str, Any]:
    """A JSON object beside a tokeniser; empty where there is no such file, a `ConfigError` where it is no object."""
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict)
    except msgspec.DecodeError as err:
        raise ConfigError(f"'{file}' is not a JSON object: {err}; repair or remove it") from err


def special_settings(directory: Path) -> dict[str, Any]:
    """`tokenizer_config.json` of a directory, with what transformers takes from `special_tokens_map.json`."""
    own = read_settings(directory / TOKENIZER_CONFIG)
    special = {} if _DECODER in own else read_settings(directory / SPECIAL_TOKENS_MAP)
    named = {}
    for part in (own, special):
        if isinstance(part.get(_EXTRA), dict):
            named |= part.pop(_EXTRA)
    is_old = _OLD_EXTRA in special and _EXTRA not in special and not {_EXTRA, _OLD_EXTRA} & own.keys()
    extra = [*(own.get(_EXTRA) or own.get(_OLD_EXTRA) or []), *(special.get(_OLD_EXTRA if is_old else _EXTRA) or [])]
    kept = {key: text for key, text in own.items() if key not in NAMED_TOKENS and isinstance(text, str)}
    return {**own, **special, **kept, **named, _EXTRA: extra}


def special_token_text(value: Any) -> str | None:
    """A special token as `tokenizer_config.json` writes it: text, or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def add_tokens_beside(tokenizer: tokenizers.Tokenizer, directory: Path, settings: Mapping[str, Any]) -> bool:
    """Add to a tokeniser what transformers adds because of the files beside it, in its order; whether that changed it.

    Args:
        settings: `special_settings` of the directory.

    Raises:
        ConfigError: a token that is neither text nor an object with `content`.
    """
    own = tokenizer.get_added_tokens_decoder()
    # Others that end so are switches, such as add_bos_token.
    keys = [*NAMED_TOKENS, *(key for key in settings if key.endswith("_token") and key not in NAMED_TOKENS)]
    special = [_token(settings[key], directory) for key in keys if special_token_text(settings.get(key))]
    named = {token.content for token in special}
    special += [_token(token, directory) for token in settings[_EXTRA]]
    listed = {int(index): _token(token, directory) for index, token in settings.get(_DECODER, {}).items()}
    if _DECODER not in settings:
        known = {token.content for token in special}
        for text, index in read_settings(directory / "added_tokens.json").items():
            listed[index] = AddedToken(text, normalized=text not in known, special=text in known)
        listed |= own
    found = [listed[index] for index in sorted(listed)]
    there = {token.content for token in (*own.values(), *found)}
    # One text may come twice with different flags; then the last counts.
    found += {repr(token): token for token in special if token.content not in there}.values()
    for token in found:
        token.special = token.special or token.content in named
    tokenizer.add_tokens(found)
    return repr(tokenizer.get_added_tokens_decoder()) != repr(own)


def _token(value: Any, directory: Path) -> AddedToken:
    if not special_token_text(value):
        raise ConfigError(
            f"beside tokenizer '{directory}' is {value!r}, must be a token: text or an object with content; repair it"
        )
    fields: dict[str, Any] = {"content": value, "special": True} if isinstance(value, str) else value
    return AddedToken(**{key: field for key, field in fields.items() if key != "__type"})
