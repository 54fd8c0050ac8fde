"""Answers that the real openai client reads: whole and streamed, of chats and of completions."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

CHAT = [{"role": "user", "content": "hello"}]


def streamed_chat(running: Any, **fields: Any) -> dict[str, Any]:
    """A streamed chat put together again: the choices by index, and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    options = {"include_usage": True}
    for chunk in running.client().chat.completions.create(
        model="tiny", stream=True, stream_options=options, **fields
    ):
        if not chunk.choices:
            usage = chunk.usage
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"text": "", "logprobs": [], "ends": []})
            choice["text"] += part.delta.content or ""
            if part.logprobs is not None:
                choice["logprobs"] += part.logprobs.content
            if part.finish_reason is not None:
                choice["ends"].append((part.finish_reason, part.stop_reason))
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def random_fields(seed: int) -> dict[str, Any]:
    chooser = random.Random(seed)
    fields: dict[str, Any] = {
        "n": chooser.choice([1, 1, 2, 3]),
        "temperature": chooser.choice([0, 0.7, 1]),
        "seed": chooser.randrange(1000),
        "max_tokens": chooser.choice([1, 5, 40, 90]),
    }
    if chooser.random() < 0.5:
        fields["stop"] = chooser.choice([["e"], ["the", "o"], "a b", ["\ufffd"]])
    extra = {"ignore_eos": chooser.random() < 0.5, "include_stop_str_in_output": chooser.random() < 0.5}
    extra["skip_special_tokens"] = chooser.random() < 0.5
    if chooser.random() < 0.5:
        fields.update(logprobs=True, top_logprobs=chooser.choice([0, 3]))
    return {**fields, "extra_body": extra}


@pytest.mark.parametrize("seed", range(25))
def test_a_stream_equals_the_whole_answer(fast: Any, seed: int) -> None:
    fields = {"messages": CHAT, **random_fields(seed)}
    whole = fast.client().chat.completions.create(model="tiny", **fields)
    streamed = streamed_chat(fast, **fields)
    assert len(streamed["choices"]) == len(whole.choices) == fields["n"]
    for part, choice in zip(streamed["choices"], whole.choices, strict=True):
        assert part["text"] == choice.message.content
        assert part["ends"] == [(choice.finish_reason, choice.stop_reason)]
        assert part["logprobs"] == (choice.logprobs.content if choice.logprobs else [])
    assert streamed["usage"].completion_tokens == whole.usage.completion_tokens
    assert streamed["usage"].prompt_tokens == whole.usage.prompt_tokens


def test_the_text_is_that_of_the_tokens(fast: Any, renderer: Any) -> None:
    answer = fast.post(
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": "hello",
            "max_tokens": 60,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    ).json()
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == renderer.encode("hello")
    assert len(choice["token_ids"]) == 60 == answer["usage"]["completion_tokens"]
    assert choice["text"] == renderer.decode(choice["token_ids"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_the_end_of_sequence_is_counted_but_is_no_text(fast: Any, renderer: Any) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1000, "seed": 5, "return_token_ids": True}
    answer = fast.post("/v1/completions", {**body, "skip_special_tokens": False}).json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["token_ids"][-1] == 1
    assert choice["text"] == renderer.decode(choice["token_ids"][:-1], skip_special_tokens=False)


def test_a_stop_token_is_named(fast: Any) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 30, "temperature": 0, "return_token_ids": True}
    tokens = fast.post("/v1/completions", {**body, "ignore_eos": True}).json()["choices"][0]["token_ids"]
    stopped = fast.post("/v1/completions", {**body, "ignore_eos": True, "stop_token_ids": [tokens[7]]}).json()
    choice = stopped["choices"][0]
    first = tokens.index(tokens[7])
    assert choice["token_ids"] == tokens[: first + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[7])


def test_text_held_back_for_a_stop_string_is_sent_once(fast: Any) -> None:
    fields = {"messages": CHAT, "temperature": 0, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    text = streamed_chat(fast, **fields)["choices"][0]["text"]
    word = text[:3]
    assert streamed_chat(fast, **fields, stop=[word + "::"])["choices"][0]["text"] == text
    cut = streamed_chat(fast, **fields, stop=[text[5:9]])["choices"][0]
    assert cut["text"] == text[: text.index(text[5:9])]
    assert cut["ends"] == [("stop", text[5:9])]


def test_choices_of_a_seeded_request_differ_repeat_and_each_end(fast: Any) -> None:
    fields = {"messages": CHAT, "n": 3, "seed": 7, "temperature": 1, "max_tokens": 120}
    first, again = streamed_chat(fast, **fields), streamed_chat(fast, **fields)
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in again["choices"]]
    assert all(len(choice["ends"]) == 1 for choice in first["choices"])


def test_greedy_choices_are_equal(fast: Any) -> None:
    answer = fast.client().chat.completions.create(
        model="tiny", messages=CHAT, n=4, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert len({choice.message.content for choice in answer.choices}) == 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 32


def test_many_prompts_are_answered_in_their_order(fast: Any, renderer: Any) -> None:
    prompts = ["hello", "the quick", renderer.encode("one two")]
    client = fast.client()
    fields = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    alone = [client.completions.create(prompt=prompt, **fields).choices[0].text for prompt in prompts]
    together = client.completions.create(prompt=["hello", "the quick", "one two"], n=2, **fields)
    assert [choice.text for choice in together.choices] == [text for text in alone for _ in range(2)]
    assert [choice.index for choice in together.choices] == list(range(6))


def test_a_chat_and_its_rendered_tokens_get_the_same_answer(fast: Any) -> None:
    tokens = fast.post("/tokenize", {"messages": CHAT}).json()["tokens"]
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    chat = fast.client().chat.completions.create(messages=CHAT, **fields)
    assert (
        chat.choices[0].message.content
        == fast.client().completions.create(prompt=tokens, **fields).choices[0].text
    )
    assert chat.usage.prompt_tokens == len(tokens)


def test_a_chat_may_fill_the_context_and_a_completion_has_sixteen_tokens(fast: Any) -> None:
    extra = {"ignore_eos": True}
    chat = fast.client().chat.completions.create(model="tiny", messages=CHAT, extra_body=extra)
    assert chat.usage.total_tokens == 2048
    assert chat.choices[0].finish_reason == "length"
    assert (
        fast.client().completions.create(model="tiny", prompt="x", extra_body=extra).usage.completion_tokens
        == 16
    )


def test_cached_tokens_are_told(fast: Any) -> None:
    body = {"model": "tiny", "prompt": "again and again " * 20, "max_tokens": 1, "cache_salt": "told"}
    fast.post("/v1/completions", body)
    usage = fast.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 16 * 16
    other = fast.post("/v1/completions", {**body, "cache_salt": "other"}).json()["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_log_probabilities_of_a_completion_are_parallel_lists(fast: Any, renderer: Any) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "temperature": 0, "logprobs": 2}
    answer = fast.post("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True}).json()
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [renderer.token_text(token) for token in choice["token_ids"]]
    assert logprobs["token_logprobs"] == [-0.5] * 12
    offsets = [0]
    for token in logprobs["tokens"][:-1]:
        offsets.append(offsets[-1] + len(token))
    assert logprobs["text_offset"] == offsets
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top[token] == -0.5
        assert len(top) <= 2
    named = fast.post("/v1/completions", {**body, "return_tokens_as_token_ids": True}).json()
    assert all(token.startswith("token_id:") for token in named["choices"][0]["logprobs"]["tokens"])


def test_log_probabilities_of_a_chat_carry_bytes(fast: Any, renderer: Any) -> None:
    fields = {"model": "tiny", "messages": CHAT, "max_tokens": 12, "temperature": 0}
    answer = fast.client().chat.completions.create(
        logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True}, **fields
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert len(entries) == 12
    whole = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert whole.decode("utf-8", "replace") == choice.message.content
    assert all([one.logprob for one in entry.top_logprobs] == [-0.5, -1.5, -2.5] for entry in entries)
    assert fast.client().chat.completions.create(**fields).choices[0].logprobs is None


def test_models_are_listed_by_each_name(fast: Any) -> None:
    listed = list(fast.client().models.list())
    assert [model.id for model in listed] == ["tiny", "alias"]
    assert listed[0].max_model_len == 2048
    assert fast.client().models.retrieve("alias").object == "model"
    assert fast.client().completions.create(model="alias", prompt="x", max_tokens=1).model == "alias"


@pytest.mark.parametrize("fields", [{}, {"model": None}])
def test_who_names_no_model_gets_the_one_that_is_served(fast: Any, fields: dict[str, Any]) -> None:
    said = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", said),
        ("/v1/messages", said),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
    ):
        answer = fast.post(path, {**body, **fields})
        assert answer.status_code == 200 and answer.json()["model"] == "tiny", answer.text
    assert fast.post("/v1/messages/count_tokens", said).status_code == 200


def test_tokenize_and_detokenize_are_each_others_inverse(fast: Any) -> None:
    text = "naïve café 日本 😀 <|end|>"
    tokenized = fast.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    assert tokenized["max_model_len"] == 2048
    assert fast.post("/detokenize", {"tokens": tokenized["tokens"]}).json() == {"prompt": text}
    assert fast.post("/tokenize", {"prompt": "hello"}).json()["token_strs"] is None


def test_tokens_are_named_as_the_vocabulary_spells_them(fast: Any, renderer: Any) -> None:
    told = fast.post("/tokenize", {"prompt": "one two é", "return_token_strs": True}).json()
    assert told["token_strs"] == [renderer.tokenizer.id_to_token(token) for token in told["tokens"]]
    assert "\ufffd" not in "".join(told["token_strs"]), "a token that is part of a character has a name too"


def test_a_clients_request_id_comes_back(fast: Any) -> None:
    answer = fast.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1" and answer.json()["id"] == "cmpl-abc-1"
    assert answer.json()["id"] == "cmpl-abc-1"
    assert len(fast.get("/version").headers["x-request-id"]) == 32
    strange = fast.get("/version", headers={"X-Request-Id": "a" * 500})
    assert len(strange.headers["x-request-id"]) == 32
    odd = fast.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers={"X-Request-Id": "a" * 500})
    assert odd.json()["id"] == "cmpl-" + odd.headers["x-request-id"]


def test_every_answer_tells_the_load(fast: Any) -> None:
    for answer in (fast.get("/health"), fast.post("/v1/completions", {}), fast.get("/nowhere")):
        load = json.loads(answer.headers["x-octavo-load"])
        assert set(load) == {"running", "waiting", "waiting_tokens", "kv_usage", "prefill_tokens_per_s"}
    told = fast.get("/load").json()
    assert told.keys() == load.keys() | {"server_load"} and told["server_load"] == told["running"]


def test_names_that_nobody_knows_are_ignored_and_counted(fast: Any) -> None:
    before = fast.metric("octavo:ignored_request_fields_total")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "colour": "blue", "store": False}
    assert fast.post("/v1/completions", body).status_code == 200
    assert fast.metric("octavo:ignored_request_fields_total") == before + 2


def test_the_models_own_generation_config_gives_the_defaults(
    serve: Any, model_folder: Any, tmp_path: Any
) -> None:
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    own = {"temperature": 0.0, "max_new_tokens": 7, "eos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    with serve("fast", tmp_path) as running:
        client = running.client()
        extra = {"ignore_eos": True}
        answers = [
            client.chat.completions.create(model="tiny", messages=CHAT, extra_body=extra) for _ in range(2)
        ]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
        assert answers[0].usage.completion_tokens == 7
        warm = client.chat.completions.create(
            model="tiny", messages=CHAT, temperature=1, seed=3, max_tokens=9, extra_body=extra
        )
        assert warm.usage.completion_tokens == 9
        assert warm.choices[0].message.content != answers[0].choices[0].message.content


def test_what_is_only_read_answers_head_too(fast: Any) -> None:
    paths = ("/health", "/ping", "/live", "/ready", "/startup", "/version", "/load", "/metrics", "/v1/models")
    for path in (*paths, "/v1/models/tiny", "/tokenizer_info"):
        answer = fast.http.head(fast.url + path)
        assert (answer.status_code, answer.content) == (200, b""), path


def test_a_client_can_learn_to_render_chats_itself(fast: Any, renderer: Any) -> None:
    told = fast.get("/tokenizer_info").json()
    assert told["chat_template"] == renderer.assets.chat_template
    assert (told["eos_token"], told["bos_token"], told["vocab_size"]) == ("<|end|>", None, 384)
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (told["model_max_length"], told["tokenizer_digest"]) == (2048, renderer.assets.tokenizer_digest)
