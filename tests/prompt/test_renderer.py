"""Chats and prompts become the tokens that transformers makes of them; what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

from octavo.config import EngineConfig
from octavo.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError
from octavo.prompt.assets import PromptAssets, load_assets
from octavo.prompt.renderer import PromptRenderer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi, 你好 😀"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
]


def with_template(renderer: PromptRenderer, template: str | None, **changes: Any) -> PromptRenderer:
    old = renderer.assets
    fields = {name: getattr(old, name) for name in old.__struct_fields__}
    return PromptRenderer(PromptAssets(**{**fields, "chat_template": template, **changes}))


def refused(renderer: PromptRenderer, body: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        renderer.chat(body)
    return caught.value


@pytest.mark.parametrize("messages", [CHAT, CHAT[1:2], CHAT[:2], CHAT[1:]])
def test_a_chat_becomes_the_tokens_that_transformers_makes(
    smollm2: Any, smollm2_transformers: Any, messages: list[dict[str, str]]
) -> None:
    expected = smollm2_transformers.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert smollm2.chat({"messages": messages}) == expected


def test_continuing_the_last_message_ends_where_it_ends(smollm2: Any, smollm2_transformers: Any) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Good"}]
    body = {"messages": messages, "continue_final_message": True}
    assert smollm2.render(body).endswith("<|im_start|>assistant\nGood")
    expected = smollm2_transformers.apply_chat_template(
        messages, continue_final_message=True, return_dict=False
    )
    assert smollm2.chat(body) == expected
    assert refused(smollm2, {**body, "add_generation_prompt": True}).param == "continue_final_message"
    empty = {**body, "messages": [*CHAT, {"role": "assistant", "content": " "}]}
    assert "no text to continue" in refused(smollm2, empty).message


def test_text_parts_are_joined_and_other_parts_refused(smollm2: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = smollm2.chat({"messages": [{"role": "user", "content": "one\ntwo"}]})
    assert smollm2.chat({"messages": [{"role": "user", "content": parts}]}) == joined
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    error = refused(smollm2, {"messages": [{"role": "user", "content": image}]})
    assert error.param == "messages[0].content[0].type"
    assert "'image_url'" in error.message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([3], "messages[0]"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_a_wrong_message_is_named(smollm2: Any, messages: Any, param: str) -> None:
    assert refused(smollm2, {"messages": messages}).param == param


def test_a_template_error_is_the_requests_error_with_the_templates_own_message(smollm2: Any) -> None:
    strict = with_template(smollm2, "{{ raise_exception('roles must alternate') }}")
    assert refused(strict, {"messages": CHAT}).message == "roles must alternate"
    broken = with_template(smollm2, "{{ messages[0].content.missing.deeper }}")
    assert "chat template failed" in refused(broken, {"messages": CHAT}).message
    escaping = with_template(smollm2, "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}")
    assert "chat template failed" in refused(escaping, {"messages": CHAT}).message
    with pytest.raises(ModelLoadError, match="does not compile"):
        with_template(smollm2, "{% for %}")


def test_a_model_without_a_chat_template_says_so(gemma: Any) -> None:
    error = refused(gemma, {"messages": CHAT})
    assert "no chat template" in error.message
    assert "/v1/completions" in error.message


def test_template_kwargs_of_the_request_win_over_the_servers(smollm2: Any) -> None:
    template = (
        "{{ mood }} {{ tone | default('none') }} {{ messages[0] | tojson }} {{ strftime_now('%Y') | length }}"
    )
    renderer = with_template(smollm2, template, default_chat_template_kwargs={"mood": "calm", "tone": "low"})
    messages = [{"role": "user", "content": "<é>"}]
    assert renderer.render({"messages": messages}).startswith('calm low {"role": "user", "content": "<é>"} 4')
    asked = renderer.render({"messages": messages, "chat_template_kwargs": {"mood": "glad"}})
    assert asked.startswith("glad low")
    assert refused(renderer, {"messages": messages, "chat_template_kwargs": {"messages": []}}).param
    assert (
        refused(renderer, {"messages": messages, "chat_template_kwargs": 3}).param == "chat_template_kwargs"
    )


def test_hugging_face_template_extensions_work(smollm2: Any) -> None:
    template = (
        "{% for m in messages %}\n  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}{{ bos_token }}"
    )
    assert with_template(smollm2, template).render({"messages": CHAT[:2]}) == "[Hi, 你好 😀]<|im_start|>"


def test_the_developer_role_reads_as_system_where_the_template_knows_no_developer(smollm2: Any) -> None:
    developer = [{"role": "developer", "content": "Be brief."}, *CHAT[1:]]
    assert smollm2.chat({"messages": developer}) == smollm2.chat({"messages": CHAT})


def test_prompts_come_as_strings_or_ids_one_or_many(smollm2: Any) -> None:
    one, two = smollm2.encode("one"), smollm2.encode("two")
    assert smollm2.completion("one") == [one]
    assert smollm2.completion(["one", "two"]) == [one, two]
    assert smollm2.completion(one) == [one]
    assert smollm2.completion([one, two]) == [one, two]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", "prompt is empty"),
        ([""], r"prompt\[0\] is empty"),
        ([], "empty list"),
        ([[]], r"prompt\[0\] is empty"),
        ([[1], []], r"prompt\[1\] is empty"),
        ([[-1]], r"prompt\[0\]\[0\] is -1"),
        ([1, 49152], r"prompt\[1\] is 49152: token ids of this model are 0 to 49151"),
        ([10**30], "token ids of this model"),
        ([1, True], r"prompt\[0\] is 1"),
        ([1, "a"], r"prompt\[0\] is 1"),
        ([1.5], r"prompt\[0\] is 1.5"),
        ([[1, "a"]], r"prompt\[0\]\[1\] is 'a'"),
        ({"a": 1}, "must be a string"),
        (None, "must be a string"),
        ("a\ud800b", "not valid Unicode"),
        (["ok", "\udfff"], r"prompt\[1\]: the text is not valid Unicode"),
    ],
)
def test_a_wrong_prompt_is_named(smollm2: Any, prompt: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        smollm2.completion(prompt)
    assert caught.value.param == "prompt"


def test_a_lone_surrogate_in_a_message_is_the_requests_error(smollm2: Any) -> None:
    assert (
        "not valid Unicode" in refused(smollm2, {"messages": [{"role": "user", "content": "\ud83d"}]}).message
    )


def test_assets_survive_the_way_to_another_process(smollm2: Any) -> None:
    copy = PromptAssets.from_bytes(smollm2.assets.to_bytes())
    assert copy == smollm2.assets
    assert copy.tokenizer_digest == smollm2.assets.tokenizer_digest
    assert copy.template_digest.startswith("sha256:")
    assert PromptRenderer(copy).chat({"messages": CHAT}) == smollm2.chat({"messages": CHAT})
    with pytest.raises(ModelLoadError, match="not prompt assets"):
        PromptAssets.from_bytes(b"\x93\x01")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Hugging Face lays it out, with a small tokenizer trained here."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["hello hello hello world"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "old"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512, "eos_token_id": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [1, 7]}))
    return folder


def test_a_hugging_face_folder_gives_tokenizer_template_and_defaults(model_folder: Path) -> None:
    config = EngineConfig(model="m", default_chat_template_kwargs={"a": 1})
    assets = load_assets(model_folder, config)
    assert assets.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert assets.vocab_size == 512
    assert assets.generation_config["temperature"] == 0.6
    assert assets.default_chat_template_kwargs == {"a": 1}
    renderer = PromptRenderer(assets)
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_folder)
    for text in ("hello world", "<s>hello</s> héllo"):
        assert renderer.encode(text) == theirs.encode(text)
    assert renderer.completion("hello")[0][0] == 0
    assert renderer.render({"messages": [{"role": "user", "content": "x"}]}) == "<s>x"


def test_special_tokens_may_be_written_as_objects(model_folder: Path, tmp_path: Path) -> None:
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = {"eos_token": {"content": "</s>", "lstrip": False, "__type": "AddedToken"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_assets(tmp_path).special_tokens == {"eos_token": "</s>"}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        load_assets(tmp_path)
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_assets(tmp_path / "nothing.gguf")


def test_a_decoder_that_cannot_be_joined_token_by_token_is_refused_by_name() -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        PromptRenderer(PromptAssets(tokenizer_json=tokenizer.to_str(), vocab_size=1))


def test_a_long_text_is_tokenised_whole_when_it_may_fit_and_not_at_all_when_it_cannot(smollm2: Any) -> None:
    text = "a b " * 700
    ids = smollm2.encode(text)
    assert smollm2.encode(text, longest=len(ids)) == ids
    assert smollm2.encode(text, longest=-(-len(ids) // 2)) == ids  # the engine says by how much
    spaces = " " * 10_000  # many characters a token: it fits, however long it looks
    assert smollm2.completion(spaces, longest=len(smollm2.encode(spaces))) == [smollm2.encode(spaces)]
    with pytest.raises(ContextLengthExceeded, match=r"the first 1600 of 2800 characters make \d+ tokens"):
        smollm2.completion(text, longest=200)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}]


def test_tools_and_earlier_calls_reach_the_template_as_objects(smollm2: Any) -> None:
    template = (
        "{{ tools[0].function.name }} {% for m in messages %}{{ m.role }} "
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a[0] }} {% endfor %}"
        "{{ m.content or '' }} {{ m.reasoning_content or '' }};{% endfor %}{{ documents[0].title }}"
    )
    messages = [
        {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning": "why"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]},
        {"role": "function", "name": "f", "content": "43"},
    ]
    body = {"messages": messages, "tools": TOOLS, "documents": [{"title": "T"}]}
    rendered = with_template(smollm2, template).render(body)
    assert rendered == "f assistant 1  why;tool 42 ;tool 43 ;T"
    objects = [{**CALLS[0], "function": {"name": "f", "arguments": {"a": [1]}}}]
    same = {**body, "messages": [{**messages[0], "tool_calls": objects}, *messages[1:]]}
    assert with_template(smollm2, template).render(same) == rendered
    older = {"role": "assistant", "content": None, "function_call": CALLS[0]["function"], "reasoning": "why"}
    same = {**body, "messages": [older, *messages[1:]]}
    assert with_template(smollm2, template).render(same) == rendered
    functions = {**{name: body[name] for name in ("messages", "documents")}, "functions": [{"name": "f"}]}
    assert with_template(smollm2, template).render(functions) == rendered


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"documents": ["text"]}, "documents"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template": 1}, "chat_template"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "5"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "reasoning": 1}]}, "messages[0].reasoning"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(smollm2: Any, changes: dict[str, Any], param: str) -> None:
    assert refused(smollm2, {"messages": CHAT, **changes}).param == param


def test_arguments_are_objects_that_join_to_strings_as_json(smollm2: Any) -> None:
    """Templates of DeepSeek write ``'...' + arguments``."""
    template = (
        "{{ 'a' + messages[0].tool_calls[0].function.arguments + 'b' }}{{ messages[1].name }}"
        "{{ tools[0].function.parameters.properties | length }}"
    )
    messages = [
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    tools = [{"type": "function", "function": {"name": "ping"}}]
    rendered = with_template(smollm2, template).render({"messages": messages, "tools": tools})
    assert rendered == 'a{"a": [1]}bf0'


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("{{ m.role + m['content'] }}", "assistant"),
        ("{{ m.content }}", ""),
        ("{% if m.content is none %}calls{% endif %}", "calls"),
        ("{% if m['content'] is not none %}said{% else %}calls{% endif %}", "calls"),
        ("{% if m.content == none %}calls{% endif %}", "calls"),
    ],
)
def test_a_message_of_calls_alone_has_an_empty_content_where_the_template_does_not_ask_for_none(
    smollm2: Any, content: str, shown: str
) -> None:
    template = "{% for m in messages %}" + content + "{% endfor %}"
    for message in (
        {"role": "assistant", "tool_calls": CALLS},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
    ):
        assert with_template(smollm2, template).render({"messages": [message]}) == shown


def test_contents_come_as_parts_where_the_template_reads_parts(smollm2: Any) -> None:
    loops = "{% for m in messages %}{% for part in m['content'] %}<{{ part.text }}>{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert with_template(smollm2, loops).render({"messages": messages}) == "<a><b>"
    assert with_template(smollm2, loops).render({"messages": [{"role": "user", "content": "a"}]}) == "<a>"
    texts = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert with_template(smollm2, texts).render({"messages": messages}) == "a\nb"
    body = loops.removeprefix("{% for m in messages %}").removesuffix("{% endfor %}")
    either = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{body}{{% endif %}}"
    told = with_template(smollm2, "{% for m in messages %}" + either + "{% endfor %}")
    assert told.render({"messages": messages}) == "<a><b>"
    assert told.render({"messages": [{"role": "user", "content": "a"}]}) == "a"
    forced = with_template(smollm2, texts, content_format="openai")
    assert forced.render({"messages": messages}).startswith("[{")
    continued = {
        "messages": [*messages, {"role": "assistant", "content": "so"}],
        "continue_final_message": True,
    }
    assert with_template(smollm2, loops).render(continued) == "<a><b><so"


def test_the_effort_to_reason_reaches_the_template(smollm2: Any) -> None:
    renderer = with_template(smollm2, "{{ reasoning_effort }} {{ enable_thinking | default('unsaid') }}")
    assert renderer.render({"messages": CHAT, "reasoning_effort": "low"}) == "low unsaid"
    assert renderer.render({"messages": CHAT, "reasoning_effort": "none"}) == "none False"
    asked = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
    assert renderer.render(asked) == "none True"


def test_requests_bring_templates_only_where_they_are_trusted(smollm2: Any) -> None:
    trusting = with_template(smollm2, "own", request_templates=True)
    assert trusting.render({"messages": CHAT, "chat_template": "{{ messages | length }}"}) == "4"
    assert "does not compile" in refused(trusting, {"messages": CHAT, "chat_template": "{% for %}"}).message
    refusing = refused(trusting, {"messages": CHAT, "chat_template": "{{ raise_exception('not so') }}"})
    assert refusing.message == "not so"


def test_a_template_of_the_settings_replaces_the_models_own(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("from a file")
    for given, expected in ((str(file), "from a file"), ("{{ 'given' }}", "{{ 'given' }}")):
        assets = load_assets(model_folder, EngineConfig(model="m", chat_template=given))
        assert assets.chat_template == expected
    with pytest.raises(ModelLoadError, match="neither a template nor a file"):
        load_assets(model_folder, EngineConfig(model="m", chat_template="no-such-file"))
