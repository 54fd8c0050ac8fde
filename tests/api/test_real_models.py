"""Real models behind the real server: a tiny random Llama, and SmolLM2 from its package."""

from __future__ import annotations

import json
import re
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


def complete(llama: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "return_token_ids": True, "seed": 3}
    answer = llama.post("/v1/completions", {**body, **fields})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_rules_hold_in_the_answer(llama: Any, renderer: Any) -> None:
    plain = complete(llama, temperature=0, ignore_eos=True)
    assert set(complete(llama, allowed_token_ids=[40, 50])["token_ids"]) == {40, 50}
    assert set(complete(llama, logit_bias={"77": 100}, temperature=0, max_tokens=9)["token_ids"]) == {77}
    word = renderer.decode(plain["token_ids"][3:5])
    assert word in plain["text"]
    assert word not in complete(llama, temperature=0, ignore_eos=True, bad_words=[word])["text"]
    penalised = complete(llama, temperature=0, ignore_eos=True, frequency_penalty=2, presence_penalty=2)
    most = {name: max(map(one["token_ids"].count, one["token_ids"])) for name, one in
            (("plain", plain), ("penalised", penalised))}  # fmt: skip
    assert most["penalised"] < most["plain"]
    assert complete(llama, repetition_penalty=1.5, temperature=0)["token_ids"] != plain["token_ids"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"logit_bias": {"55": 3, "90": -50}}, {"sequence_bias": [[[55], 3.0], [[90], -50.0]]}),
        ({"min_tokens": 9, "logit_bias": {"1": 30}}, {"min_new_tokens": 9, "sequence_bias": [[[1], 30.0]]}),
    ],
)
def test_rules_give_the_tokens_of_transformers(
    tiny_llama: Any, llama: Any, renderer: Any, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    import torch

    _, model = tiny_llama
    prompt = renderer.encode("the quick brown fox")
    made = complete(llama, prompt=prompt, temperature=0, max_tokens=24, **ours)["token_ids"]
    output = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, **theirs)
    assert made == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_log_probabilities_are_those_of_transformers(tiny_llama: Any, llama: Any, chat: bool) -> None:
    import torch

    _, model = tiny_llama
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = {"messages": CHAT} if chat else {"prompt": ["the quick brown fox", list(range(90, 130))]}
    body = {"model": "tiny", "max_tokens": 2, "prompt_logprobs": 2, "return_token_ids": True, **asked}
    answer = llama.post(path, {**body, "n": 2}).json()
    assert llama.post(path, {**body, "n": 2}).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for whole in [answer] if chat else answer["choices"]:
        prompt, shown = whole["prompt_token_ids"], whole["prompt_logprobs"]
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert len(shown) == len(prompt) and shown[0] is None
        for row, token, entries in zip(expected, prompt[1:], shown[1:], strict=False):
            assert next(iter(entries)) == str(token)
            assert entries[str(token)]["rank"] == 1 + int((row > row[token]).sum())
            assert {str(i) for i in row.topk(2).indices.tolist()} <= set(entries)
            for other, entry in entries.items():
                assert entry["logprob"] == pytest.approx(row[int(other)].item(), abs=1e-4)
                assert isinstance(entry["decoded_token"], str)


@pytest.mark.parametrize(("penalty", "early"), [(1.0, False), (0.5, False), (2.0, True)])
def test_beams_come_in_the_order_of_transformers(
    tiny_llama: Any, llama: Any, renderer: Any, penalty: float, early: bool
) -> None:
    """Case 10: the length that a score is divided by is that of the output alone."""
    import torch

    _, model = tiny_llama
    prompt = renderer.encode("the quick brown fox jumps " * 8)
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 12,
        "n": 4,
        "use_beam_search": True,
        "logprobs": 1,
    }
    answer = llama.post(
        "/v1/completions",
        {**body, "length_penalty": penalty, "early_stopping": early, "return_token_ids": True},
    ).json()
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, num_beams=4, num_return_sequences=4,
        length_penalty=penalty, early_stopping=early,
    )  # fmt: skip
    expected = [[token for token in one if token] for one in output[:, len(prompt) :].tolist()]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    assert all(len(one["logprobs"]["tokens"]) == len(one["token_ids"]) for one in answer["choices"])


def test_an_answer_is_at_least_min_tokens_long(llama: Any) -> None:
    ends = {"logit_bias": {"1": 100}, "temperature": 0}
    assert complete(llama, **ends)["token_ids"] == [1]
    longer = complete(llama, **ends, min_tokens=7)
    assert len(longer["token_ids"]) == 8 and longer["finish_reason"] == "stop"
    stopped = {"logit_bias": {"60": 100}, "temperature": 0, "stop_token_ids": [60], "min_tokens": 5}
    choice = complete(llama, **stopped)
    assert (len(choice["token_ids"]), choice["stop_reason"]) == (6, 60)


def test_a_truncated_prompt_is_its_end(llama: Any) -> None:
    prompt = list(range(100, 160))
    whole = complete(llama, prompt=prompt[-7:], temperature=0)
    cut = complete(llama, prompt=prompt, temperature=0, truncate_prompt_tokens=7)
    assert (cut["prompt_token_ids"], cut["text"]) == (prompt[-7:], whole["text"])
    fits = complete(llama, prompt=prompt * 20, max_tokens=12, truncate_prompt_tokens=-1)
    assert len(fits["prompt_token_ids"]) == 500


def test_a_random_model_keeps_to_every_form(llama: Any) -> None:
    """Its text would be noise: what is left of it is what the form leaves open."""
    forms = [
        ({"choice": ["red", 'dark "blue"\n']}, lambda text: text in ("red", 'dark "blue"\n')),
        ({"regex": r"[ab]{3}-\d{2}"}, lambda text: re.fullmatch(r"[ab]{3}-[0-9]{2}", text)),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, lambda text: re.fullmatch(r"\(*x\)*", text)),
        ({"grammar": 'start: "a"~3 B\nB: /[0-9]/'}, lambda text: re.fullmatch(r"aaa[0-9]", text)),
        ({"json": {"type": "array", "items": {"enum": [1, "b"]}, "maxItems": 3}}, json.loads),
    ]
    for form, fits in forms:
        for seed in range(4):
            choice = complete(llama, structured_outputs=form, seed=seed, temperature=1.5, max_tokens=200)
            assert choice["finish_reason"] == "stop", choice
            assert fits(choice["text"]) not in (None, False), choice["text"]


def test_smollm2_answers_a_chat(serve: Any, smollm2_address: str) -> None:
    settings = {"max_model_len": 512, "kv_cache_memory_bytes": "64Mi", "device": "cpu", "dtype": "float32"}
    with serve(None, smollm2_address, **settings) as running:
        fields = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 8}
        whole = running.client().chat.completions.create(**fields)
        assert "Paris" in whole.choices[0].message.content
        streamed = running.client().chat.completions.create(stream=True, **fields)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        assert text == whole.choices[0].message.content
        keeps_to_a_schema(running)
        calls_the_tools_it_must(running)
        again = running.client().chat.completions.create(**fields)
        assert again.usage.prompt_tokens_details.cached_tokens == 32


def keeps_to_a_schema(running: Any) -> None:
    import jsonschema

    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
            "people": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city", "rivers", "people"],
        "additionalProperties": False,
    }
    for form in (
        {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": schema}},
        {"type": "json_object", "schema": schema},
    ):
        answer = running.client().chat.completions.create(
            model="tiny", messages=CHAT, n=3, seed=1, temperature=1.2, max_tokens=150, response_format=form
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), schema)


def calls_the_tools_it_must(running: Any) -> None:
    """Its template knows no tools, so it is held to calls in a format that is not its own."""
    import jsonschema

    weather = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    time = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [
        {"type": "function", "function": {"name": "get_weather", "parameters": weather, "strict": True}},
        {"type": "function", "function": {"name": "get_time", "parameters": time}},
    ]
    schemas = {"get_weather": weather, "get_time": time}
    named = {"type": "function", "function": {"name": "get_weather"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice, names in (("required", schemas), (named, ["get_weather"]), (some, ["get_weather"])):
        fields = {"model": "tiny", "messages": CHAT, "tools": tools, "tool_choice": choice, "max_tokens": 150}
        fields |= {"seed": 3, "temperature": 1.0, "parallel_tool_calls": False}
        whole = running.client().chat.completions.create(**fields).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == ""
        (call,) = whole.message.tool_calls
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
        streamed = list(running.client().chat.completions.create(stream=True, **fields))
        pieces = [one for chunk in streamed for one in chunk.choices[0].delta.tool_calls or []]
        assert "".join(one.function.name or "" for one in pieces) == call.function.name
        assert "".join(one.function.arguments or "" for one in pieces) == call.function.arguments
        assert streamed[-1].choices[0].finish_reason == "tool_calls"
