"""A `tokenizers` backend built from the vocabulary in a GGUF header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from runtime.errors import ModelLoadError
from runtime.text.vocab import SPACE_MARK

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
_SPLITS = {  # `tokenizer.ggml.pre` -> the expression that cuts text into words
    "llama-bpe": f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}",
    "llama3": f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}",
    "qwen2": f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_REST}",
    "tekken": f"{_TEKKEN_WORDS}|\\p{{N}}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
}
_GPT2 = ("default", "gpt-2", "gpt2")
_GPT2_DIGITS = ("smollm", "starcoder", "refact", "command-r")


def backend_from_gguf(meta: dict[str, Any]) -> Backend:
    """Build the tokenizer that a GGUF header describes. Raises ModelLoadError for an unknown kind."""
    kind = meta.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in meta or kind not in ("gpt2", "llama"):
        raise ModelLoadError(f"The GGUF file has no usable tokenizer: tokenizer.ggml.model is {kind!r}.")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    backend = _byte_level(meta, tokens) if kind == "gpt2" else _sentencepiece(meta, tokens)
    backend.add_special_tokens(_added(tokens, kinds, _CONTROL, special=True))
    backend.add_tokens(_added(tokens, kinds, _USER, special=False))
    _add_borders(backend, meta, tokens, default_bos=kind == "llama")
    return backend


def _added(tokens: Sequence[str], kinds: Sequence[int], kind: int, *, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=special)
        for token, k in zip(tokens, kinds, strict=True)
        if k == kind and token
    ]


def _byte_level(meta: dict[str, Any], tokens: list[str]) -> Backend:
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in meta["tokenizer.ggml.merges"])]
    name = meta.get("tokenizer.ggml.pre", "default")
    ignore_merges = name in ("llama-bpe", "llama3", "tekken")
    backend = Backend(BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer = _pre_tokenizer(name)
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _GPT2:
        return plain
    if name in _GPT2_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    if name in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(sorted((*_GPT2, *_GPT2_DIGITS, *_SPLITS)))
    raise ModelLoadError(f"The GGUF file names the unknown pre-tokenizer {name!r}; known are {known}.")


def _sentencepiece(meta: dict[str, Any], tokens: list[str]) -> Backend:
    scores: list[float] = meta["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Backend(BPE(vocab, _merges_by_score(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", SPACE_MARK)
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), replace])
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece stores no merges: every split of a piece into two pieces is one, best scores first."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, token in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token], vocab[left], vocab[right], (left, right)))
    ranked.sort()
    return [pair for *_, pair in ranked]


def _add_borders(backend: Backend, meta: dict[str, Any], tokens: list[str], *, default_bos: bool) -> None:
    """Make `add_special=True` put BOS and EOS where the header asks for them."""
    parts, specials = ["$A"], []
    for name, default in (("bos", default_bos), ("eos", False)):
        token = meta.get(f"tokenizer.ggml.{name}_token_id")
        if token is None or not meta.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        parts.insert(0 if name == "bos" else len(parts), tokens[token])
        specials.append((tokens[token], token))
    if specials:
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=specials)
