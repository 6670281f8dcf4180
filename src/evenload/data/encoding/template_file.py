"""`open_chat_template`: which chat template a run uses, and which special tokens it sees.

The template is the file `data.chat_template`; else `chat_template.jinja` beside the tokeniser; else `chat_template` in
its `tokenizer_config.json`, text or a list of named ones of which "default" is taken. This is the order of
transformers; special tokens come from where it takes them (`tokenizer_settings`). A template that asks for a
special token that no file says anything about is refused: it would be left out without a word.
"""

from pathlib import Path
from typing import Any

from evenload.data.config import DataConfig
from evenload.data.encoding.chat_template import ChatTemplate
from evenload.data.encoding.tokenize import BYTES, DocumentTokenizer, FileTokenizer
from evenload.data.encoding.tokenizer_settings import NAMED_TOKENS, special_settings, special_token_text
from evenload.errors import ConfigError


def open_chat_template(config: DataConfig, tokenizer: DocumentTokenizer) -> ChatTemplate:
    """The chat template of the settings.

    Raises:
        ConfigError: there is none, it is none, or it asks for a special token that is not known.
    """
    directory = None
    if config.tokenizer not in (None, BYTES):
        path = Path(config.tokenizer)
        directory = path if path.is_dir() else path.parent
    known = special_settings(directory) if directory else {}
    origin, source = _find_source(config, directory, known)
    variables = {
        name: text for name, value in known.items() if name.endswith("_token") and (text := special_token_text(value))
    }
    if config.eos_token is not None:
        variables["eos_token"] = config.eos_token
    elif "eos_token" not in known and isinstance(tokenizer, FileTokenizer) and tokenizer.eos_id is not None:
        variables["eos_token"] = tokenizer.token_text(tokenizer.eos_id) or ""
    template = ChatTemplate(source, variables, origin)
    missing = sorted((template.wanted_variables & set(NAMED_TOKENS)) - set(known) - set(variables))
    if missing and directory is None:
        raise ConfigError(
            f"chat template '{origin}' writes {', '.join(missing)}, but bytes have no such tokens; "
            "write other text there, or use a tokenizer.json"
        )
    if missing:
        raise ConfigError(
            f"chat template '{origin}' writes {', '.join(missing)}, but no file beside tokenizer '{config.tokenizer}' "
            "says what that is; set it in tokenizer_config.json (null = nothing)"
        )
    return template


def _find_source(config: DataConfig, directory: Path | None, settings: dict[str, Any]) -> tuple[str, str]:
    if config.chat_template is not None:
        return config.chat_template, _read_text(Path(config.chat_template))
    if directory is None:
        raise ConfigError(
            "the tokeniser is plain bytes, which has no chat template, and the records hold messages; set "
            "data.chat_template to a file with one, or data.tokenizer to a tokeniser that has one"
        )
    file = directory / "chat_template.jinja"
    if file.is_file():
        return str(file), _read_text(file)
    origin = str(directory / "tokenizer_config.json")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
        if found is None:
            raise ConfigError(
                f"'{origin}' has chat templates {sorted(map(str, named))} and no default; write the one to use into a "
                "file and set data.chat_template to it"
            )
    if found is None:
        raise ConfigError(
            f"the records hold messages, and there is no chat template in '{origin}' and no chat_template.jinja "
            "beside it; set data.chat_template to a file with one"
        )
    if not isinstance(found, str):
        raise ConfigError(f"chat_template in '{origin}' is of type {type(found).__name__}, must be text")
    return origin, found


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(
            f"chat template '{file}' cannot be read: {err}; set data.chat_template to a text file"
        ) from err
