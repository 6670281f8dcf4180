"""Tokenise with plain bytes, or with a Hugging Face `tokenizer.json` through the `tokenizers` library.

Truncation and padding of a file are switched off, and no special tokens are added: encoders put what a post-processor
writes before a text there (`opening_ids`), and the end-of-document token after it. Text that spells a special token
becomes that token. Files next to `tokenizer.json` may add tokens; they are read as `TokenizersBackend` of transformers
5 reads them: `added_tokens_decoder` of `tokenizer_config.json`; where that has none, `added_tokens.json`, and
`special_tokens_map.json` goes before it; then every special token that is not there yet. A run compares ids before it
starts (`runtime.model.export_files`).
"""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken

from evenload.data.hub import local_path
from evenload.errors import ConfigError

NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Special tokens of all tokenisers of transformers, in the order in which it adds them."""
TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
_DECODER, _EXTRA, _OLD_EXTRA = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"


def read_settings(file: Path) -> dict[str, Any]:
    """Read a JSON object next to a tokeniser, empty where there is no file; `ConfigError` where it is no object."""
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict)
    except msgspec.DecodeError as err:
        raise ConfigError(f"'{file}' is not a JSON object: {err}; repair or remove it") from err


def special_settings(directory: Path) -> dict[str, Any]:
    """Read `tokenizer_config.json` of a directory, with what transformers takes from `special_tokens_map.json`."""
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
    """Return the text of a special token that is given as text, or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def add_tokens_of_files(tokenizer: tokenizers.Tokenizer, directory: Path, settings: Mapping[str, Any]) -> bool:
    """Add the tokens that transformers adds because of files next to a tokeniser; return whether that changed it."""
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
    added = [listed[index] for index in sorted(listed)]
    present = {token.content for token in (*own.values(), *added)}
    # One text may come twice with different flags; then the last counts.
    added += {repr(token): token for token in special if token.content not in present}.values()
    for token in added:
        token.special = token.special or token.content in named
    tokenizer.add_tokens(added)
    return repr(tokenizer.get_added_tokens_decoder()) != repr(own)


def _token(value: Any, directory: Path) -> AddedToken:
    if not special_token_text(value):
        must = "a token: text or an object with content"
        raise ConfigError(f"next to tokenizer '{directory}' is {value!r}, must be {must}")
    fields: dict[str, Any] = {"content": value, "special": True} if isinstance(value, str) else value
    return AddedToken(**{key: field for key, field in fields.items() if key != "__type"})


_USUAL_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>")
_BYTE_VALUES = 256
MAX_BYTE_VOCABULARY = 320
"""Most ids of a vocabulary of bytes: 257, rounded up to a multiple of 64. No published tokeniser is that small."""
BYTES = "bytes"
"""`DataConfig.tokenizer` for plain bytes."""


class TokensWithOffsets(NamedTuple):
    """Tokens of a text, int32[num_tokens], and the characters `[start, stop)` of each, int32[num_tokens, 2], neither
    descending. Tokens that make up one character together all have its range."""

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int32]


class DocumentTokenizer(Protocol):
    """What the loader needs of a tokeniser: equal names give equal tokens; ids are in `[0, vocab_size)`."""

    name: str
    vocab_size: int
    eos_id: int | None

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Tokenise texts to int32[num_tokens] each, without the end-of-document token; on all cores."""

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        """Tokenise as `encode_batch`, with the place of every token in its text."""


class ByteTokenizer:
    """UTF-8 bytes as tokens 0..255, and 256 for the end of a document."""

    name: str = BYTES
    vocab_size: int = _BYTE_VALUES + 1
    eos_id: int | None = _BYTE_VALUES

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        located = []
        for tokens in self.encode_batch(texts):
            # All bytes of a character but the first are 0b10xxxxxx.
            character = np.cumsum((tokens & 0xC0) != 0x80, dtype=np.int32) - 1
            located.append(TokensWithOffsets(tokens, np.stack([character, character + 1], axis=1)))
        return located

    def decode(self, tokens: NDArray[np.integer]) -> str:
        return bytes(tokens[tokens < _BYTE_VALUES].astype(np.uint8)).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, or a directory with one; `ConfigError` where it cannot be read, or `eos_token` is not in it.

    `opening_ids` are what its post-processor writes before a text; `bos_id` begins a document, None where no file names
    it. By default `eos_token` is that of `tokenizer_config.json`, else the one usual name among the special tokens.
    """

    def __init__(self, path: str | Path, eos_token: str | None = None) -> None:
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise ConfigError(f"tokenizer '{path}' is not a file; give a tokenizer.json, its directory, or \"bytes\"")
        content = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as err:  # tokenizers raises the bare class
            raise ConfigError(f"tokenizer '{file}' is not a tokenizer.json that tokenizers can read: {err}") from err
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = special_settings(file.parent)
        self.has_settings = (file.parent / TOKENIZER_CONFIG).is_file()
        is_changed = add_tokens_of_files(self._tokenizer, file.parent, settings)
        splits = self._tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
        self.opening_ids: tuple[int, ...] = post_processor_ids(self._tokenizer)[0]
        # It would cut white space out of offsets, and add special tokens, which are not the text's.
        self._tokenizer.post_processor = None  # type: ignore[missing-attribute]
        self.added_tokens = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        # Ids may have gaps, so the largest one counts, not the number of entries.
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.path = file
        self.eos_id = self._find_eos(special_token_text(settings.get("eos_token")) if eos_token is None else eos_token)
        self.bos_id: int | None = self._tokenizer.token_to_id(special_token_text(settings.get("bos_token")) or "")
        self.kind: str = type(self._tokenizer.model).__name__
        if is_changed or splits:
            content += repr((self._tokenizer.get_added_tokens_decoder(), splits)).encode()
        self.name = f"{file.name} {hashlib.sha256(content).hexdigest()[:16]}"

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        # The fast variant leaves offsets out, which costs a fifth less.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        return [
            TokensWithOffsets(
                np.array(encoding.ids, dtype=np.int32),
                np.fromiter(chain.from_iterable(encoding.offsets), np.int32, 2 * len(encoding)).reshape(-1, 2),
            )
            for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, tokens: NDArray[np.integer]) -> str:
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def token_text(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token)

    def special_tokens(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {added[index].content: index for index in sorted(added) if added[index].special}

    def _find_eos(self, named: str | None) -> int | None:
        special = self.special_tokens()
        if named is None:
            usual = [index for token, index in special.items() if token in _USUAL_EOS]
            return usual[0] if len(usual) == 1 else None
        if (index := self._tokenizer.token_to_id(named)) is None:
            raise ConfigError(
                f"end-of-document token '{named}' is not in tokenizer '{self.path}'; its special tokens are "
                f"{list(special)}: set data.eos_token to one of them"
            )
        return index


def open_tokenizer(tokenizer: str | None, eos_token: str | None = None) -> ByteTokenizer | FileTokenizer:
    """Open the tokeniser that `DataConfig.tokenizer` names; None = bytes, which have no `eos_token`."""
    if tokenizer not in (None, BYTES):
        return FileTokenizer(local_path(tokenizer, "data.tokenizer", "tokenizer"), eos_token)
    if eos_token is not None:
        raise ConfigError(f"data.eos_token is '{eos_token}', but bytes have no named tokens; leave it out")
    return ByteTokenizer()


def describe_tokenizer(tokenizer: DocumentTokenizer, origin: str = "") -> str:
    """Describe a tokeniser: where it comes from (`origin`, else its file), its kind and size."""
    size = f"{tokenizer.vocab_size:,} ids"
    if isinstance(tokenizer, ByteTokenizer):
        return f"plain bytes and an end of document, {size}"
    if isinstance(tokenizer, FileTokenizer):
        return f"{origin or tokenizer.path} ({tokenizer.kind}, {size})"
    return f"{origin or tokenizer.name} ({type(tokenizer).__name__}, {size})"


def required_eos(tokenizer: DocumentTokenizer) -> int:
    """Return the end-of-document id; `ConfigError` where no file names a single one."""
    if tokenizer.eos_id is None:
        special = list(tokenizer.special_tokens()) if isinstance(tokenizer, FileTokenizer) else []
        raise ConfigError(
            f"data.append_eos is on, but tokenizer '{tokenizer.name}' does not name the token that ends a document "
            f"(special tokens: {special}); set data.eos_token, or data.append_eos = false"
        )
    return tokenizer.eos_id


def required_opening(tokenizer: DocumentTokenizer, prepend_bos: bool | None) -> tuple[int, ...]:
    """Return the ids that `DataConfig.prepend_bos` puts before a text; `ConfigError` where no file names them."""
    own, bos_id = (tokenizer.opening_ids, tokenizer.bos_id) if isinstance(tokenizer, FileTokenizer) else ((), None)
    if not prepend_bos or own:
        return own if prepend_bos is not False else ()
    if bos_id is None:
        raise ConfigError(
            f"data.prepend_bos is on, but tokenizer '{tokenizer.name}' does not name the token that begins a document; "
            "set bos_token in tokenizer_config.json next to it, or leave data.prepend_bos out"
        )
    return (bos_id,)


def train_byte_pair_tokenizer(texts: Iterable[str], vocab_size: int, path: str | Path) -> FileTokenizer:
    """Train a byte-level BPE tokeniser of at most `vocab_size` tokens and write its `tokenizer.json`, whole or not at
    all, so that several processes may train one at once; the same texts give the same file."""
    if vocab_size < _BYTE_VALUES + 1:
        raise ConfigError(f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {_BYTE_VALUES + 1}")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    special = [_USUAL_EOS[0]]
    tokenizer.train_from_iterator(texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=special)
    directory = os.path.dirname(path) or "."
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as own:
        whole = os.path.join(own, "tokenizer.json")
        tokenizer.save(whole)
        os.replace(whole, path)
    return FileTokenizer(path)


def post_processor_ids(tokenizer: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what the post-processor writes before and after any text."""
    for text in tokenizer.get_vocab() if tokenizer.num_special_tokens_to_add(False) else ():
        ids, is_written = (encoding := tokenizer.encode(text)).ids, encoding.special_tokens_mask
        if not all(is_written):
            return tuple(ids[: is_written.index(0)]), tuple(ids[len(ids) - is_written[::-1].index(0) :])
    return (), ()
