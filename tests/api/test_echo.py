"""Echoed prompts, as evaluation harnesses ask for them: text and log probabilities before the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

PROMPT = list(range(10, 24))
SCORES = [None, *(-float(place) for place in range(1, len(PROMPT)))]


def answers(running: Any, **fields: Any) -> list[dict[str, Any]]:
    answer = running.post("/v1/completions", {"model": "tiny", "prompt": PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def streamed(running: Any, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream, put together."""
    answer = running.post("/v1/completions", {"model": "tiny", "prompt": PROMPT, **fields, "stream": True})
    choices: dict[int, dict[str, Any]] = {}
    for part in answer.text.split("\n\n")[:-2]:
        for choice in json.loads(part[6:])["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"] = whole["logprobs"] or {}
                whole["logprobs"][name] = whole["logprobs"].get(name, []) + values
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize(
    ("messages", "fields", "echoed"),
    [
        ([("user", "hi"), ("assistant", "I say ")], {"continue_final_message": True}, "I say "),
        ([("user", "hi"), ("assistant", "I say ")], {}, "I say "),
        ([("user", "hi")], {}, ""),
        ([("user", "hi")], {"add_generation_prompt": False}, "hi"),
    ],
)
def test_a_chat_echoes_the_message_that_its_answer_goes_on_with(
    fast: Any, messages: list[tuple[str, str]], fields: dict[str, Any], echoed: str
) -> None:
    said = [{"role": role, "content": content} for role, content in messages]
    body = {
        "model": "tiny",
        "messages": said,
        "max_tokens": 12,
        "n": 2,
        "seed": 4,
        "temperature": 1,
        **fields,
    }
    client = fast.client().chat.completions
    extra = {name: body.pop(name) for name in fields}
    plain = [one.message.content for one in client.create(**body, extra_body=extra).choices]
    extra["echo"] = True
    assert [one.message.content for one in client.create(**body, extra_body=extra).choices] == [
        echoed + text for text in plain
    ]
    streamed = ["", ""]
    for chunk in client.create(**body, extra_body=extra, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == [echoed + text for text in plain]


def test_a_prompt_is_scored_before_the_answer(fast: Any, renderer: Any) -> None:
    """What lm-eval's local-completions sends and reads."""
    fields = {"echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234}
    plain = answers(fast, max_tokens=1, temperature=0, logprobs=1)[0]
    [choice] = answers(fast, **fields)
    assert choice["text"] == renderer.decode(PROMPT) + plain["text"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:-1] == [renderer.token_text(token) for token in PROMPT]
    assert logprobs["token_logprobs"] == [*SCORES, -0.5]
    assert logprobs["top_logprobs"][0] is None
    for name, score, top in zip(
        logprobs["tokens"][1:-1], SCORES[1:], logprobs["top_logprobs"][1:-1], strict=True
    ):
        assert len(top) == 2 and top[name] == score
        assert max(top.values()) == -0.25
    offsets = [sum(map(len, logprobs["tokens"][:place])) for place in range(len(PROMPT) + 1)]
    assert logprobs["text_offset"] == offsets
    assert "prompt_logprobs" not in choice


def test_no_token_is_made_where_the_prompt_alone_is_asked_for(fast: Any) -> None:
    body = {"model": "tiny", "prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 0}
    answer = fast.post("/v1/completions", {**body, "return_token_ids": True}).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["token_ids"]) == ("hello", [])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    for fields, param in (({"echo": False}, "max_tokens"), ({"min_tokens": 1}, "min_tokens")):
        refused = fast.post("/v1/completions", {**body, **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_both_numbers_of_log_probabilities_are_kept(fast: Any) -> None:
    [choice] = answers(fast, echo=True, max_tokens=2, logprobs=1, prompt_logprobs=3, ignore_eos=True)
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1 : len(PROMPT)]] == [2] * 13
    assert choice["prompt_logprobs"][0] is None
    assert all(len(entry) in (3, 4) for entry in choice["prompt_logprobs"][1:])
    [choice] = answers(fast, echo=True, max_tokens=2, logprobs=3, prompt_logprobs=0)
    assert all(len(entry) == 1 for entry in choice["prompt_logprobs"][1:])


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("max_tokens", [0, 1, 30])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_streamed_echo_equals_the_whole_one(
    fast: Any, logprobs: int | None, max_tokens: int, n: int, temperature: int
) -> None:
    fields = {
        "prompt": ["hello", "the quick brown fox", "naïve 日本"], "echo": True, "logprobs": logprobs,
        "max_tokens": max_tokens, "n": n, "temperature": temperature, "seed": 5,
    }  # fmt: skip
    whole = answers(fast, **fields)
    assert [choice["text"][:4] for choice in whole] == [
        text[:4] for text in fields["prompt"] for _ in range(n)
    ]
    for part, choice in zip(streamed(fast, **fields), whole, strict=True):
        assert part == {name: choice[name] for name in part}


def test_a_prompt_is_truncated_at_the_side_that_is_asked_for(fast: Any) -> None:
    ids = {"truncate_prompt_tokens": 3, "return_token_ids": True}
    for side, kept in ((None, [12, 13, 14]), ("left", [12, 13, 14]), ("right", [10, 11, 12])):
        [choice] = answers(fast, prompt=[10, 11, 12, 13, 14], truncation_side=side, max_tokens=1, **ids)
        assert choice["prompt_token_ids"] == kept


def test_the_token_itself_is_first_among_the_likeliest(fast: Any) -> None:
    prompt = [40, 41, 42, 43, 44, 45]
    names = {"return_tokens_as_token_ids": True}
    [choice] = answers(fast, prompt=prompt, echo=True, logprobs=3, max_tokens=4, **names)
    shown = choice["logprobs"]
    for token, top in zip(shown["tokens"][1:], shown["top_logprobs"][1:], strict=True):
        assert next(iter(top)) == token and 3 <= len(top) <= 4


def test_a_truncated_prompt_is_echoed_as_it_was_read(fast: Any, renderer: Any) -> None:
    [choice] = answers(fast, prompt="one two three", truncate_prompt_tokens=2, echo=True, max_tokens=0)
    assert choice["text"] == renderer.decode(renderer.encode("one two three")[-2:])


def test_usage_comes_with_every_chunk_where_it_is_asked_for(fast: Any) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "stream": True, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = fast.post("/v1/completions", {**body, "stream_options": options}).text
    chunks = [json.loads(part[6:]) for part in text.split("\n\n")[:-2]]
    made = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert made == sorted(made) and made[-1] == 5 and len(set(made)) > 2
    alone = fast.post("/v1/completions", {**body, "stream_options": {"continuous_usage_stats": True}}).text
    assert '"usage"' not in alone


def test_the_first_chunk_of_a_chat_has_its_usage_too(fast: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    text = fast.post("/v1/chat/completions", {**body, "stream": True, "stream_options": options}).text
    usages = [json.loads(line[6:])["usage"] for line in text.splitlines() if line.startswith("data: {")]
    first, *_, last = usages
    assert first["completion_tokens"] == 0 and first["prompt_tokens"] == last["prompt_tokens"] > 0
    assert all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in usages)
