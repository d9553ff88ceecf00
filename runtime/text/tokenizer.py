"""One tokenizer for every door: ids, exact bytes, special ids, stop ids and the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from runtime.errors import ModelLoadError
from runtime.text.gguf_meta import read_gguf_metadata
from runtime.text.gguf_vocab import backend_from_gguf
from runtime.text.stretches import Stretches
from runtime.text.vocab import token_bytes_of

_TURN_ENDS = (  # names that end a turn, whatever the configuration forgets to say
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "</s>",
    "<|EOT|>",
    "<|endofturn|>",
    "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>",
)


class Tokenizer:
    """Text to ids and back. Immutable, safe to share between threads.

    `token_bytes[i]` are the exact bytes of id i (a special token's own text), so text can be cut and
    joined at byte level. `eos_ids` are all ids that end a turn. Imports neither torch nor transformers.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        named_templates: dict[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        bos: str = "",
        eos: str = "",
        path: str = "",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._stretches = Stretches.of(backend)
        self.path = path
        self.chat_template = chat_template
        self.named_templates = named_templates or {}
        self.token_bytes: list[bytes] = token_bytes_of(backend)
        self.vocab_size = len(self.token_bytes)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        ends = (backend.token_to_id(name) for name in _TURN_ENDS)
        self.eos_ids: tuple[int, ...] = tuple(sorted({*eos_ids, *(i for i in ends if i is not None)}))
        self.bos_token = bos
        self.eos_token = eos

    @classmethod
    def from_model(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a GGUF file or of a Hugging Face folder. Raises ModelLoadError."""
        path = Path(path)
        if path.is_dir():
            return _from_folder(path)
        if path.is_file():
            return _from_gguf(path)
        raise ModelLoadError(f"There is no model at {path}, so no tokenizer either.")

    @classmethod
    def from_json(
        cls, text: str, *, chat_template: str | None = None, eos_ids: Iterable[int] = (), bos: str = "", eos: str = ""
    ) -> Tokenizer:
        """The tokenizer that `to_json` wrote, on another machine. Raises ModelLoadError."""
        try:
            backend = Backend.from_str(text)
        except Exception as error:
            raise ModelLoadError(f"This is no tokenizer: {error}") from error
        return cls(backend, chat_template=chat_template, eos_ids=eos_ids, bos=bos, eos=eos)

    def to_json(self) -> str:
        """The vocabulary and its rules as text (without the chat template)."""
        return self._backend.to_str()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written out in it become their ids; `add_special` adds BOS and EOS."""
        if self._stretches is None or add_special:
            return self._backend.encode(text, add_special_tokens=add_special).ids
        return self._stretches.encode(text, self._encode_plain)

    def _encode_plain(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        """`encode` of many texts, in parallel where cores are free."""
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special)]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. An id outside the vocabulary has no text."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = True) -> bytes:
        """The exact bytes of `ids`."""
        table, size = self.token_bytes, self.vocab_size
        hidden = self.special_ids if skip_special else frozenset()
        return b"".join([table[i] for i in ids if i not in hidden and 0 <= i < size])

    def id_of(self, piece: str) -> int | None:
        """The id of a piece as the vocabulary spells it, None when there is no such piece."""
        return self._backend.token_to_id(piece)

    def piece(self, token: int) -> str:
        """A token as the vocabulary spells it."""
        return self._backend.id_to_token(token) or ""


def _from_gguf(path: Path) -> Tokenizer:
    meta = read_gguf_metadata(path)
    tokens: list[str] = meta.get("tokenizer.ggml.tokens", [])

    def text_of(key: str) -> str:
        token = meta.get(f"tokenizer.ggml.{key}_token_id")
        return tokens[token] if token is not None and token < len(tokens) else ""

    ends = (meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return Tokenizer(
        backend_from_gguf(meta),
        chat_template=meta.get("tokenizer.chat_template"),
        eos_ids=[i for i in ends if i is not None],
        bos=text_of("bos"),
        eos=text_of("eos"),
        path=str(path),
    )


def _from_folder(folder: Path) -> Tokenizer:
    config = _read_json(folder / "tokenizer_config.json")
    backend = _folder_backend(folder)
    templates = _templates(folder, config)
    bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    ends = {backend.token_to_id(eos)} if eos else set()
    for name in ("config.json", "generation_config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ends.update(value if isinstance(value, list) else [value])
    return Tokenizer(
        backend,
        chat_template=templates.get("default"),
        named_templates=templates,
        eos_ids=[i for i in ends if isinstance(i, int)],
        bos=bos,
        eos=eos,
        path=str(folder),
    )


def _folder_backend(folder: Path) -> Backend:
    """`tokenizer.json` where there is one (quick); else transformers converts the older formats."""
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return Backend.from_file(str(file))
        from transformers import AutoTokenizer  # slow to import, and rarely needed

        return Backend.from_str(AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer.to_str())
    except Exception as error:
        raise ModelLoadError(f"The tokenizer in {folder} cannot be loaded: {error}") from error


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: `chat_template.jinja` wins over the one in tokenizer_config.json."""
    found: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        found.update({item["name"]: item["template"] for item in value})
    file = folder / "chat_template.jinja"
    if file.is_file():
        found["default"] = file.read_text()
    return found


def _token_text(value: Any) -> str:
    return value.get("content", "") if isinstance(value, dict) else value or ""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}
