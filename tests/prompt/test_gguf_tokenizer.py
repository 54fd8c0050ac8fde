"""The tokenizer converted from a GGUF file equals transformers' on both real models."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.errors import ModelLoadError
from octavo.prompt.gguf_tokenizer import adds_bos, tokenizer_json

CORPUS = [
    "Hello, world!",
    "  two leading spaces, and trailing  ",
    "tabs\tand\t\tmore\n\n\nnewlines\r\nand returns\r\r",
    "Numbers 1 12 123 1234567890, 3.14159, 1e-9, 0x1F; a list:\n\n1. one\n2. two\n\n   10. ten",
    "def f(x):\n    if x  >  1:\n        return [i**2 for i in range(10)]\n\n\n# done\n",
    "naïve café, Ünïcödé, ﬁligree, e\u0301 combining",
    "日本語のテキストと中文文本和한국어 텍스트",
    "Привет, мир! שלום עולם مرحبا بالعالم नमस्ते",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 emoji with joiners",
    "\U0001d518\U0001d52b\U0001d526\U0001d520 beyond the basic plane \U0002070e\U00020731\U00020779",
    "<|im_start|>user\nspecial <|im_end|> inside<|endoftext|>",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<eos><unused5>[multimodal]",
    "it's we'll I'd they've don't IT'S WE'LL",
    "http://example.com/a?b=c&d=%20e#f user@example.org C:\\path\\file",
    '{"json": [1, 2.5, true, null], "nested": {"k": "v"}}',
    "$$$ €€ £ %% ^^ ~~ `` '' \"\" -- — … ·",
    "\u00a0non-breaking\u2003em space\u200bzero width\ufeff",
    "a" * 200 + " " * 50 + "b" * 30 + "\n" * 20,
    "\x00\x01\x07 control \x7f characters",
    "word" * 40 + " ." * 10,
    "▁already spelled ▁▁ like sentencepiece",
    "",
    " ",
    "\n",
]


def random_text(seed: int) -> str:
    chooser = random.Random(seed)
    alphabets = [
        (32, 126),
        (9, 13),
        (0xA0, 0x24F),
        (0x370, 0x5FF),
        (0x4E00, 0x9FFF),
        (0x1F300, 0x1F6FF),
        (48, 57),
        (32, 32),
    ]
    parts = []
    for _ in range(60):
        low, high = chooser.choice(alphabets)
        parts.append("".join(chr(chooser.randint(low, high)) for _ in range(chooser.randint(1, 12))))
    return "".join(parts)


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_ids_and_text_equal_those_of_transformers(model: str, request: pytest.FixtureRequest) -> None:
    ours: Any = request.getfixturevalue(model)
    theirs: Any = request.getfixturevalue(f"{model}_transformers")
    for text in [*CORPUS, *(random_text(seed) for seed in range(150))]:
        expected = theirs.encode(text)
        assert ours.encode(text) == expected, text
        plain = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == plain
        for skip in (True, False):
            assert ours.decode(expected, skip) == theirs.decode(
                expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_smollm2_splits_digits_as_its_vocabulary_was_learned(smollm2: Any) -> None:
    # Without the digits apart, the second newline would go to the piece after it, as it does before a letter.
    assert smollm2.encode("a\n\n1")[1:2] == smollm2.encode("\n\n")
    assert len(smollm2.encode("12345")) == 5


def test_gemma_starts_with_bos_and_smollm2_does_not(gemma: Any, smollm2: Any) -> None:
    assert gemma.completion("hi")[0][0] == 2
    assert gemma.completion("") == [[2]]
    assert smollm2.completion("hi")[0] == smollm2.encode("hi", add_special_tokens=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.pre": "viking"}, "'viking'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
    ],
)
def test_an_unknown_tokenizer_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"],
    }  # fmt: skip
    with pytest.raises(ModelLoadError, match=named):
        tokenizer_json({**metadata, **change})


def test_llama_bpe_adds_bos_unless_the_file_says_otherwise() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.bos_token_id": 0,
    }
    assert adds_bos(metadata)
    assert not adds_bos({**metadata, "tokenizer.ggml.add_bos_token": False})
