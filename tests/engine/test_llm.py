"""The offline API over a tiny random model: order, samples, stop strings, chats, early refusals."""

from __future__ import annotations

import json
import re
import shutil

import msgspec
import pytest

safetensors = pytest.importorskip("safetensors.torch")
torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

from octavo import LLM, SamplingParams, StructuredOutputs  # noqa: E402  # after what it needs is known to be there
from octavo.core.outputs import EngineRequest  # noqa: E402
from octavo.core.speculation import SpeculationControl  # noqa: E402
from octavo.errors import (  # noqa: E402
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelLoadError,
    Unavailable,
)

HIDDEN, HEADS, KV_HEADS, MIDDLE, LAYERS = 32, 4, 2, 48, 2
TEMPLATE = (
    "{% for t in tools or [] %}<t>{{ t.function.name }}{{ aloud }}</t>{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A random Llama over bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": size,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": size - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    named = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    generation = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": None,
        "max_new_tokens": 6,
        "repetition_penalty": 1.1,
    }
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": size - 1}))
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"embed_tokens": (size, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        for name in ("self_attn.q_proj", "self_attn.o_proj"):
            shapes[f"layers.{layer}.{name}"] = (HIDDEN, HIDDEN)
        for name in ("self_attn.k_proj", "self_attn.v_proj"):
            shapes[f"layers.{layer}.{name}"] = (kv, HIDDEN)
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            shapes[f"layers.{layer}.{name}"] = (MIDDLE, HIDDEN)
        shapes[f"layers.{layer}.mlp.down_proj"] = (HIDDEN, MIDDLE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{layer}.{name}"] = (HIDDEN,)
    random = torch.Generator().manual_seed(0)
    weights = {
        f"model.{name}.weight": torch.randn(shape, generator=random) * (0.3 if len(shape) > 1 else 1)
        for name, shape in shapes.items()
    }
    safetensors.save_file(weights, str(folder / "model.safetensors"))
    return LLM(
        str(folder),
        dtype="float32",
        max_model_len=128,
        kv_cache_memory_bytes="1Mi",
        max_num_seqs=4,
        max_queue=2,
    )


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_answers_come_in_the_order_of_the_prompts_whatever_their_length(llm, capsys):
    prompts = ["one", {"prompt_token_ids": [5, 6, 7]}, {"prompt": "three"}, *(f"more {i}" for i in range(12))]
    params = [
        SamplingParams(temperature=0, max_tokens=3 + 5 * (i % 3), ignore_eos=True)
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs[:4]] == ["one", None, "three", "more 0"]
    assert outputs[1].prompt_token_ids == [5, 6, 7] and outputs[0].prompt_token_ids == llm.renderer.encode(
        "one"
    )
    for output, wanted in zip(outputs, params, strict=True):
        (sample,) = output.outputs
        assert len(sample.token_ids) == wanted.max_tokens and sample.finish_reason == "length"
        assert sample.text == llm.renderer.decode(sample.token_ids)
    assert "15/15" in capsys.readouterr().err
    alone = llm.generate(prompts[6], params[6], use_tqdm=False)
    assert alone[0].outputs[0].token_ids == outputs[6].outputs[0].token_ids
    assert capsys.readouterr().err == ""
    assert llm.stats().kv_usage == 0


def test_without_params_the_models_own_defaults_hold(llm):
    defaults = SamplingParams(temperature=0.5, top_k=3, repetition_penalty=1.1, max_tokens=6)
    assert llm.get_default_sampling_params() == defaults
    chat = [{"role": "user", "content": "hi"}]
    for (output,) in (llm.generate("p", use_tqdm=False), llm.chat(chat, use_tqdm=False)):
        (sample,) = output.outputs
        assert sample.finish_reason == "stop" or len(sample.token_ids) == 6


def test_samples_differ_repeat_by_seed_and_share_their_prompt(llm):
    params = SamplingParams(n=3, seed=7, temperature=1, max_tokens=16, ignore_eos=True)
    (first,) = llm.generate("the same prompt for all three samples", params, use_tqdm=False)
    texts = [sample.token_ids for sample in first.outputs]
    assert len({tuple(text) for text in texts}) == 3 and [s.index for s in first.outputs] == [0, 1, 2]
    (again,) = llm.generate("the same prompt for all three samples", params, use_tqdm=False)
    assert [sample.token_ids for sample in again.outputs] == texts
    assert again.num_cached_tokens == 32
    llm.reset_prefix_cache()
    (cold,) = llm.generate("the same prompt for all three samples", params, use_tqdm=False)
    assert cold.num_cached_tokens == 0 and [sample.token_ids for sample in cold.outputs] == texts


def test_greedy_samples_are_equal_and_computed_once(llm):
    before = llm.stats().generation_tokens
    (output,) = llm.generate(
        "x", SamplingParams(n=3, temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False
    )
    assert len(output.outputs) == 3 and len({tuple(s.token_ids) for s in output.outputs}) == 1
    assert [s.index for s in output.outputs] == [0, 1, 2]
    assert llm.stats().generation_tokens - before == 5


def test_a_stop_string_ends_the_text_and_later_greedy_text_is_as_before(llm):
    """A batch that ended on a stop string leaves a cache that changes nothing."""
    prompt = "a prompt that is longer than two whole blocks"
    greedy = msgspec.structs.replace(GREEDY, logprobs=1)
    (cold,) = llm.generate(prompt, greedy, use_tqdm=False)
    text = cold.outputs[0].text
    stop = text[4:6]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop])
    (cut,) = llm.generate(prompt, params, use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    (warm,) = llm.generate(prompt, greedy, use_tqdm=False)
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens == 32
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids and warm.outputs[0].text == text
    for one, two in zip(warm.outputs[0].logprobs, cold.outputs[0].logprobs, strict=True):
        assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
    assert llm.stats().running == 0 == llm.stats().kv_usage


def test_logprobs_come_one_a_token(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    (output,) = llm.generate("p", params, use_tqdm=False)
    sample = output.outputs[0]
    assert len(sample.logprobs) == 4
    for token, logprobs in zip(sample.token_ids, sample.logprobs, strict=True):
        assert logprobs.rank == 1 and logprobs.top[0] == (token, pytest.approx(logprobs.logprob))


def test_samples_keep_to_their_own_rules_beside_others(llm):
    """Case 5: what one prompt asks changes no other."""
    several = [
        GREEDY,
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=1.05),
        SamplingParams(
            temperature=0, max_tokens=12, structured_outputs=StructuredOutputs(choice=["a", "b c"])
        ),
        SamplingParams(temperature=1, seed=3, max_tokens=12, bad_words=["e"], logit_bias={101: 4.0}),
        SamplingParams(n=2, temperature=1, seed=3, structured_outputs=StructuredOutputs(regex="[xy]{5}")),
    ]
    prompts = ["one", "a longer prompt than that", "two", "three", "four"]
    together = llm.generate(prompts, several, use_tqdm=False)
    for prompt, params, output in zip(prompts, several, together, strict=True):
        (alone,) = llm.generate([prompt], params, use_tqdm=False)
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in alone.outputs]
    assert together[2].outputs[0].text in ("a", "b c")
    assert "e" not in together[3].outputs[0].text
    assert all(re.fullmatch("[xy]{5}", one.text) for one in together[4].outputs)


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_rules_and_forms_hold_through_preemption_and_drafts(llm, drafts, monkeypatch):
    # However fast this machine is with them.
    monkeypatch.setattr(SpeculationControl, "worthwhile", lambda self, rows: True)
    form = StructuredOutputs(regex="(ab|ba){10,20}!")
    several = [
        SamplingParams(n=2, temperature=1, seed=seed, max_tokens=60, structured_outputs=form)
        if seed % 2
        else SamplingParams(
            temperature=0.7,
            seed=seed,
            max_tokens=60,
            ignore_eos=True,
            repetition_penalty=1.2,
            bad_words=["a"],
        )
        for seed in range(6)
    ]
    prompts = [f"prompt {i} ab ba ab ba" for i in range(6)]
    alone = [
        llm.generate(one, params, use_tqdm=False)[0] for one, params in zip(prompts, several, strict=True)
    ]
    tight = small(llm, drafts)
    together = tight.generate(prompts, several, use_tqdm=False)
    assert tight.stats().preemptions
    if drafts is not None:
        assert tight.stats().accepted_draft_tokens
    for one, other in zip(alone, together, strict=True):
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in other.outputs]
        assert all(sample.error is None for sample in other.outputs)
    assert all(re.fullmatch("(ab|ba){10,20}!", s.text) for o in together[1::2] for s in o.outputs)


def small(llm, drafts=None, **more):
    """The same model with a cache for hardly more than one of its longest requests."""
    settings = {"dtype": "float32", "max_model_len": 112, "kv_cache_memory_bytes": "160Ki", "max_num_seqs": 6}
    return LLM(llm.config.model, **settings, **({"speculative_config": drafts} if drafts else {}), **more)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_ends_what_runs_amid_swaps_and_copies_and_the_same_tokens_come_after(
    llm, level, async_scheduling
):
    prompts = [f"prompt {i} ab ba ab ba" for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, seed=0)
    before = llm.generate(prompts, params, use_tqdm=False)
    tight = small(llm, kv_offloading_gib=0.01, preemption_mode="swap", async_scheduling=async_scheduling)
    core = tight.engine
    requests = [
        EngineRequest(request_id=f"r{i}", prompt_token_ids=one.prompt_token_ids, sampling=params)
        for i, one in enumerate(before)
    ]
    core.add(requests)
    outputs = []
    while not core.stats().preemptions_by_swap:
        outputs += core.step()
    tight.sleep(level)
    while core.has_work:
        outputs += core.step()
    ended = {one.request_id: one.finish_reason for one in outputs if one.finish_reason}
    assert ended.keys() == {one.request_id for one in requests} and "abort" in ended.values()
    stats = core.stats()
    assert (stats.kv_usage, stats.cached_blocks, stats.host_usage, stats.running) == (0, 0, 0, 0)
    with pytest.raises(Unavailable, match="woken up"):
        tight.generate("one", use_tqdm=False)
    tight.wake_up(["weights"])
    with pytest.raises(Unavailable, match="woken up"):
        tight.generate("one", use_tqdm=False)
    tight.wake_up()
    after = tight.generate(prompts, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in after] == [one.outputs[0].token_ids for one in before]


def test_weights_that_are_gone_leave_the_engine_asleep_until_they_are_back(llm, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(llm.config.model, folder)
    other = LLM(str(folder), dtype="float32", max_model_len=128, kv_cache_memory_bytes="1Mi")
    other.sleep(2)
    (folder / "model.safetensors").rename(tmp_path / "away")
    with pytest.raises(ModelLoadError):
        other.wake_up()
    with pytest.raises(Unavailable, match="woken up"):
        other.generate("one", use_tqdm=False)
    (tmp_path / "away").rename(folder / "model.safetensors")
    other.wake_up()
    (one,), (same,) = (each.generate("one", GREEDY, use_tqdm=False) for each in (other, llm))
    assert one.outputs[0].token_ids == same.outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="level is 3"):
        other.sleep(3)


def test_a_form_that_cannot_be_held_to_is_refused_before_anything_runs(llm):
    with pytest.raises(InvalidRequest, match="look-around"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs(regex="(?<=a)b")))
    assert llm.stats().running == 0


def test_a_chat_is_rendered_with_the_models_template(llm):
    one = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(one, GREEDY, use_tqdm=False)
    assert output.prompt == "<s>user:hi</s><s>"
    two = llm.chat([one, [*one, {"role": "assistant", "content": "a"}]], GREEDY, use_tqdm=False)
    assert two[0] == output or two[0].outputs == output.outputs
    (plain,) = llm.chat(one, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert plain.prompt == "<s>user:hi</s>"
    tools = [{"type": "function", "function": {"name": "ping"}}]
    (told,) = llm.chat(one, GREEDY, use_tqdm=False, tools=tools, chat_template_kwargs={"aloud": "!"})
    assert told.prompt == "<t>ping!</t><s>user:hi</s><s>"
    with pytest.raises(InvalidRequest, match=r"tools\[0\].function"):
        llm.chat(one, GREEDY, tools=[{"type": "function"}])
    with pytest.raises(InvalidRequest, match="'tool_choice'"):
        llm.chat(one, GREEDY, tool_choice="required")


def test_what_cannot_be_served_is_refused_by_place_before_anything_runs(llm):
    steps = llm.stats().steps
    with pytest.raises(
        ContextLengthExceeded, match=r"prompts\[1\]: the prompt is too long: .* needs 212 tokens"
    ):
        llm.generate(["fine", [1] * 200], GREEDY)
    with pytest.raises(InvalidRequest, match=r"prompts\[0\]: prompt is empty"):
        llm.generate("", GREEDY)
    with pytest.raises(InvalidRequest, match=r"prompts\[0\]: a prompt is a text"):
        llm.generate([{"text": "x"}], GREEDY)
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: 2 prompts in the place of one"):
        llm.generate(["a", ["b", "c"]], GREEDY)
    with pytest.raises(InvalidRequest, match="prompts is None: give a text"):
        llm.generate(None, GREEDY)
    with pytest.raises(InvalidRequest, match="1 sampling params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.stats().steps == steps and llm.generate([], GREEDY) == []


def test_without_max_tokens_a_sample_may_fill_the_context(llm):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([3] * 100, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 28


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(ConfigError, match="'max_len'"):
        LLM("x", max_len=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1.5), ("n", True), ("temperature", "hot"), ("temperature", None), ("top_p", None),
        ("top_k", 2.5), ("seed", "x"), ("max_tokens", "5"), ("logprobs", True),
        ("stop", 5), ("stop", [5]), ("stop", ""),
    ],
)  # fmt: skip
def test_sampling_params_of_the_wrong_type_are_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=f"^{name} is ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", [None]], ids=str)
def test_params_that_are_none_are_refused(llm, params):
    with pytest.raises(InvalidRequest, match="give SamplingParams"):
        llm.generate("hi", params)
