"""The scheduler with real arithmetic: beams as transformers, drafts, forks and swaps that change nothing."""

from __future__ import annotations

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams

SIZE = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 5, "pad_token_id": 0,
}  # fmt: skip
PROMPT = [7 + 13 * i % 80 for i in range(37)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random Llama, and transformers' view of it."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZE, tie_word_embeddings=False)
    network = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        network.lm_head.weight.mul_(40)  # far from uniform: scores do not tie
    network.save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[: SIZE["vocab_size"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(alphabet)}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, network


@pytest.fixture(scope="module")
def llm(model):
    made = {}

    def build(**settings):
        key = tuple(sorted((name, str(value)) for name, value in settings.items()))
        if key not in made:
            made[key] = LLM(
                model=model[0],
                **{"dtype": "float32", "kv_cache_memory_bytes": "4Mi", "max_model_len": 256, **settings},
            )
        return made[key]

    return build


def run(llm, prompts, **sampling):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, "seed": 5, **sampling})
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 5])
def test_beams_are_transformers_in_order(model, llm, length_penalty, early_stopping, prompt):
    with torch.no_grad():
        wanted = model[1].generate(
            torch.tensor([prompt]),
            num_beams=4,
            num_return_sequences=4,
            do_sample=False,
            max_new_tokens=20,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            output_scores=True,
            return_dict_in_generate=True,
        )
    rows = [row[len(prompt) :].tolist() for row in wanted.sequences]
    ends = [row[: row.index(5) + 1] if 5 in row else row for row in rows]
    (made,) = run(
        llm(),
        [prompt],
        n=4,
        use_beam_search=True,
        max_tokens=20,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    assert made == ends


def test_drafts_change_no_token(llm):
    prompts = [PROMPT * 2, PROMPT[:9] * 5, [11] * 30]
    drafting = llm(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    for sampling in ({}, {"temperature": 0.8}, {"temperature": 0.8, "n": 3}):
        assert run(drafting, prompts, **sampling) == run(llm(), prompts, **sampling)
    assert drafting.stats().draft_tokens > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sequences_that_give_way_and_come_back_give_the_same_tokens(llm, mode):
    prompts = [[i + j % 60 for j in range(30)] for i in range(6)]
    tight = llm(kv_cache_memory_bytes="416Ki", preemption_mode=mode, swap_space=0.01, max_model_len=100)
    wanted = run(llm(), prompts, max_tokens=60, ignore_eos=True, temperature=0.9, n=2)
    assert run(tight, prompts, max_tokens=60, ignore_eos=True, temperature=0.9, n=2) == wanted
    stats = tight.stats()
    assert stats.preemptions > 0 and (stats.preemptions_by_swap > 0) == (mode == "swap")
