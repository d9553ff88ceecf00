"""The tokenizer of the embedded model: equal to transformers', and exact in bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from runtime.errors import ModelLoadError
from runtime.text.gguf_vocab import backend_from_gguf
from runtime.text.stretches import Stretches
from runtime.text.tokenizer import Tokenizer

MODEL = Path("~/.cache/ramet/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf").expanduser()

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnew\r\nlines\n\n\n",
    "don't can't we'll I'm",
    "x=1;y=22;z=333.4444e-5",
    "naïve café — “quotes” … 東京 Привет 🙂👩‍👩‍👧",
    "<|im_start|>system\nYou are.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><repo_name>a/b<file_sep>c.py\ndef f(x):\n    return x ** 2\n",
    "\x00\x01\x7f\u200b\ufeff",
    "a" * 300,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_model(MODEL)


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(MODEL.parent), gguf_file=MODEL.name)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_transformers(tokenizer, reference, text):
    assert tokenizer.encode(text, add_special=False) == reference.encode(text, add_special_tokens=False)


def test_digits_are_single_tokens_even_after_spaces(tokenizer):
    assert [tokenizer.token_bytes[i] for i in tokenizer.encode("a  12")] == [b"a", b"  ", b"1", b"2"]


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_decode_inverts_encode_where_the_vocabulary_has_the_bytes(tokenizer, text):
    single = {data for data in tokenizer.token_bytes if len(data) == 1}
    assume(all(bytes([byte]) in single for byte in text.encode()))  # SmolLM2 lacks 0xF1 and a few others
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_join_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special=False)
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode()


def test_special_and_stop_ids_are_known(tokenizer):
    im_start, im_end, endoftext = (tokenizer.id_of(t) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    assert {im_start, im_end, endoftext} <= tokenizer.special_ids
    assert tokenizer.eos_ids == (endoftext, im_end)
    assert tokenizer.decode([im_start, *tokenizer.encode("hi"), im_end]) == "hi"


def test_a_frontend_process_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from runtime.text.chat import ChatRenderer; from runtime.text.tokenizer import Tokenizer;"
        f"ChatRenderer(Tokenizer.from_model({str(MODEL)!r})).render([{{'role': 'user', 'content': 'hi'}}]);"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


SPM_VOCAB = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "i", "hi", "▁hi"]


def spm_metadata() -> dict:
    n = len(SPM_VOCAB)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SPM_VOCAB,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(n - i) for i in range(259, n)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (n - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_sentencepiece_vocabularies_fall_back_to_bytes_and_add_bos():
    tokenizer = Tokenizer(backend_from_gguf(spm_metadata()), eos_ids=[2])
    ids = tokenizer.encode("hi é")
    assert [SPM_VOCAB[i] for i in ids] == ["<s>", "▁hi", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == " hi é"
    assert tokenizer.token_bytes[3 + 0xC3] == b"\xc3"
    assert tokenizer.eos_ids == (2,)


def test_a_hugging_face_folder_gives_template_and_stop_ids(tmp_path):
    backend = Backend(models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3, "<stop>": 4}, [("a", "b")]))
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<stop>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4]}')
    tokenizer = Tokenizer.from_model(tmp_path)
    assert tokenizer.encode("abb") == [2, 1]
    assert tokenizer.eos_ids == (3, 4)
    assert tokenizer.chat_template == "new"


@pytest.mark.parametrize(
    ("content", "word"), [(b"", "cannot be read"), (b"GGUF\x03\0\0\0", "cannot be read"), (b"PK\x03\x04", "not a GGUF")]
)
def test_a_broken_file_is_one_clear_sentence(tmp_path, content, word):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=word):
        Tokenizer.from_model(path)


def test_an_unknown_pre_tokenizer_is_named():
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.pre": "zork",
    }
    with pytest.raises(ModelLoadError, match="zork"):
        backend_from_gguf(meta)


class TestStretches:
    """Chats are encoded stretch by stretch between special tokens, each remembered; the ids are the same."""

    @settings(max_examples=200, deadline=None)
    @given(
        parts=st.lists(
            st.sampled_from(
                ["<|im_start|>", "<|im_end|>", "<|im_", "\n", " ", "You are a helpful assistant, always.", "a" * 40]
            )
            | st.text(max_size=30),
            max_size=8,
        )
    )
    def test_ids_are_those_of_the_whole_text(self, tokenizer, parts):
        text = "".join(parts)
        assume(_has_utf8(text))
        whole = tokenizer._backend.encode(text, add_special_tokens=False).ids
        for _ in range(2):
            assert tokenizer.encode(text, add_special=False) == whole

    def test_what_is_remembered_is_bounded(self, tokenizer):
        stretches = Stretches.of(tokenizer._backend, max_bytes=1_000)
        assert stretches is not None
        asked: list[str] = []

        def encode(text: str) -> list[int]:
            asked.append(text)
            return tokenizer._encode_plain(text)

        for name in ("a" * 40, "b" * 40, "a" * 40, "c" * 40, "a" * 40, "b" * 40):
            stretches.encode(name, encode)
        assert [text[0] for text in asked] == ["a", "b", "c", "b"]
        assert stretches.encode("d" * 500, encode) == tokenizer._encode_plain("d" * 500)

    @pytest.mark.parametrize(
        "change",
        [
            lambda backend: setattr(backend, "normalizer", normalizers.NFKC()),
            lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Metaspace()),
            lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
            lambda backend: backend.add_special_tokens([AddedToken("<x>", lstrip=True, normalized=False)]),
        ],
    )
    def test_tokenizers_that_look_beyond_a_stretch_are_left_alone(self, tokenizer, change):
        backend = Backend.from_str(tokenizer.to_json())
        assert Stretches.of(backend) is not None
        change(backend)
        assert Stretches.of(backend) is None


def _has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
