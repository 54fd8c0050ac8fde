"""SmolLM2 135M and Gemma 3 270M from GGUF equal transformers on the same dequantised weights, in float32."""

import random

import pytest
import torch

TEXT = [  # the start of a licence, in SmolLM2's tokens
    504, 16571, 4791, 282, 260, 3279, 30, 4882, 28, 5119, 6252, 216, 34, 84, 3073, 338, 750, 3279, 29, 9562,
    13963, 1517, 355, 3252, 804, 411, 451, 1517, 1251, 325, 11457, 42, 585, 260, 3279, 1072, 441, 3577, 357,
]  # fmt: skip


def scattered(length: int, vocabulary: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(length)]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf, engine_of, gguf_reference):
    engine = engine_of(
        smollm2_gguf, max_model_len=512, kv_cache_memory_bytes="64Mi", max_num_batched_tokens=512
    )
    return engine, gguf_reference(smollm2_gguf)


def test_smollm2_logits(smollm2) -> None:
    engine, reference = smollm2
    ids = TEXT + scattered(60, 49152, seed=1)
    torch.testing.assert_close(engine.logits(ids), reference.logits(ids), rtol=0, atol=1e-3)


def test_smollm2_tokens_batched_chunked_preempted_and_warm(smollm2, tokens) -> None:
    engine, reference = smollm2
    batch = [TEXT, TEXT[:16], TEXT[:1], TEXT * 3]
    made = tokens(engine.generate(batch, 12))
    for prompt, each in zip(batch, made, strict=True):
        reference.check_greedy(prompt, each)
    assert tokens(engine.again(batch, 12)) == made
    for chunk in (5, 16, 61):
        assert tokens(engine.generate(batch, 12, max_num_batched_tokens=chunk)) == made


def test_smollm2_tokens_with_and_without_asynchronous_scheduling(smollm2, tokens) -> None:
    engine, _ = smollm2
    batch = [TEXT, TEXT[:16], TEXT[:1], TEXT * 3]
    made = [tokens(engine.generate(batch, 12, async_scheduling=on, max_num_seqs=3)) for on in (True, False)]
    assert made[0] == made[1]


def test_smollm2_tokens_when_preempted(smollm2_gguf, smollm2, engine_of, tokens) -> None:
    _, reference = smollm2
    block = 2 * 30 * 16 * 3 * 64 * 4
    small = engine_of(smollm2_gguf, max_model_len="auto", kv_cache_memory_bytes=8 * block)
    batch = [TEXT, TEXT[5:], TEXT[9:]]
    made = tokens(small.generate(batch, 14))
    assert small.stats.preemptions > 0
    for prompt, each in zip(batch, made, strict=True):
        reference.check_greedy(prompt, each)


def test_gemma3_far_past_the_sliding_window(gemma3_gguf, engine_of, gguf_reference, tokens) -> None:
    """Case 11: 712 tokens, window 512; the file has neither the local rotary base nor the layer pattern."""
    engine = engine_of(
        gemma3_gguf, max_model_len=1024, kv_cache_memory_bytes="64Mi", max_num_batched_tokens=1024
    )
    config = engine.executor.runner.model.config
    assert config.local_rope is not None and config.local_rope.theta == 10_000.0
    assert config.rope.theta == 1_000_000.0
    assert [i for i, window in enumerate(config.windows) if window is None] == [5, 11, 17]
    assert set(config.windows) == {None, 512}
    reference = gguf_reference(gemma3_gguf)
    ids = [2, *scattered(711, 262_144, seed=2)]
    torch.testing.assert_close(engine.logits(ids, last=8), reference.logits(ids, last=8), rtol=0, atol=2e-3)
    long, short = tokens(engine.generate([ids, ids[:40]], 4, max_num_batched_tokens=300))
    reference.check_greedy(ids, long)
    reference.check_greedy(ids[:40], short)
    info = engine.executor.info
    assert [group.get("window") for group in info.kv["groups"]] == [None] + [512] * 5
    assert info.block_bytes == 3 * 2 * 16 * 256 * 4
    engine.generate([ids], 4, max_num_batched_tokens=64)
    everything, kept = 6 * 45, 45 + 5 * ((512 + 64) // 16 + 1)
    assert engine.peak_usage * info.num_blocks <= kept < everything
