"""A model shared out among ranks gives transformers' tokens, whatever a step holds."""

import asyncio
import gc
import os
import queue
import random
import signal
import subprocess
import time
import weakref
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from octavo.child_process import cause_of
from octavo.config import engine_config
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import EngineClient
from octavo.errors import ConfigError, OctavoError
from octavo.models.registry import ARCHITECTURES
from octavo.worker import ranks
from octavo.worker.executor import build_executor

POOL = 4 << 20
SHARED = [("llama_tied", 3), ("gemma3_softcap", 2)]


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(199) for _ in range(length)] for length in lengths]


def check(tiny, batch, made) -> None:
    for prompt, each in zip(batch, made, strict=True):
        tiny.reference.check_greedy(prompt, each)


MIXED = prompts(1, 5, 15, 16, 17, 40, 100, 300)


@pytest.fixture
def engine(make_tiny, engine_of):
    """``engine("gemma3", 2)``: shared among so many ranks."""

    def build(name: str, ranks: int, **settings):
        usual = {"kv_cache_memory_bytes": POOL, "max_num_batched_tokens": 256, "swap_space": 0.01}
        return engine_of(make_tiny(name).path, **{**usual, **settings}, tensor_parallel_size=ranks)

    return build


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama", 4),  # more ranks than heads of keys and values; the vocabulary's 199 are not divisible
        ("llama_bias", 2),
        ("qwen3", 2),
        ("qwen3_tied", 2),
        *SHARED,  # the last, so that the next tests find them
    ],
)
def test_mixed_lengths_in_one_batch(name, ranks, make_tiny, engine, tokens) -> None:
    check(make_tiny(name), MIXED, tokens(engine(name, ranks).generate(MIXED, 20)))


@pytest.mark.parametrize("means", ["recompute", "swap"])
@pytest.mark.parametrize(("name", "ranks"), SHARED)
def test_preempted(name, ranks, means, make_tiny, engine, tokens) -> None:
    """A pool of a dozen blocks or so for six sequences that grow to five each."""
    info = engine(name, ranks).executor.info
    pool = 12 * len(info.kv["groups"]) * info.block_bytes
    small = engine(name, ranks, kv_cache_memory_bytes=pool, max_model_len="auto")
    batch = prompts(30, 41, 17, 38, 25, 33, seed=2)
    made = tokens(small.generate(batch, 40, preemption_mode=means))
    stats = small.stats
    assert stats.preemptions > 0
    assert stats.preemptions_by_swap == (stats.preemptions if means == "swap" else 0)
    check(make_tiny(name), batch, made)


def test_rules_and_scores_of_a_row(make_tiny, engine_of, engine, tokens) -> None:
    """Penalties, and log probabilities of a prompt that takes several steps."""
    batch = prompts(290, 20, seed=3)
    penalised = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 2.0}}
    usual = {"max_tokens": 8, "ignore_eos": True, "seed": 0}
    params = [
        SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=2, **usual),
        SamplingParams(temperature=0.7, **penalised, **usual),
    ]
    shared = engine("llama_tied", 3).generate(batch, params)
    alone = engine_of(make_tiny("llama_tied").path, kv_cache_memory_bytes=POOL).generate(batch, params)
    assert tokens(shared) == tokens(alone)
    scores = [
        [one.logprob for output in each[0] for one in output.prompt_logprobs or []]
        for each in (alone, shared)
    ]
    assert len(scores[0]) == len(scores[1]) == 289
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)


def test_speculation(make_tiny, engine, tokens) -> None:
    """With n-grams, and with a draft model, which is whole on the first rank."""
    batch = prompts(40, 21, seed=4)
    batch[0] += batch[0]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    draft = {"model": str(make_tiny("llama").path), "num_speculative_tokens": 3}
    for shared, guesses in (
        (engine("llama_tied", 3), ngram),
        (engine("llama_tied", 3, speculative_config=draft), draft),
    ):
        made = tokens(shared.generate(batch, 24, speculative_config=guesses))
        assert shared.stats.draft_tokens > 0
        check(make_tiny("llama_tied"), batch, made)


def test_sleep_and_wake(make_tiny, engine, tokens) -> None:
    shared = engine("llama_tied", 3)
    batch = prompts(30, 41, seed=5)
    plain = tokens(shared.generate(batch, 8))
    for level in (1, 2):
        shared.core.admin("sleep", level=level)
        shared.core.admin("wake_up")
        assert tokens(shared.again(batch, 8)) == plain


@pytest.mark.parametrize(("name", "ranks"), SHARED)
def test_tokens_do_not_depend_on_the_step(name, ranks, engine, tokens) -> None:
    """In bfloat16: chunks, neighbours, the prefix cache, samples of one prompt, each operation by itself."""
    shared = engine(name, ranks, dtype="bfloat16")
    batch = prompts(70, 9, 33, seed=1)
    plain = tokens(shared.generate(batch, 12))
    assert [tokens(shared.generate([one], 12))[0] for one in batch] == plain
    assert tokens(shared.generate(batch, 12, max_num_batched_tokens=19)) == plain
    assert tokens(shared.again(batch, 12)) == plain
    assert shared.stats.prefix_cache_hits > 0
    eager = engine(name, ranks, dtype="bfloat16", enforce_eager=True)
    assert tokens(eager.generate(batch, 12)) == plain
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=12, ignore_eos=True)
    together = tokens(shared.samples(batch[0], params))
    assert together == [tokens([shared.sample(batch[0], params, index)])[0] for index in range(3)]


@pytest.mark.parametrize(("name", "ranks"), [("llama", 4), ("qwen3", 2), ("gemma3", 2)])
def test_reference_kernels_through_gloo(name, ranks, make_tiny, engine, tokens, monkeypatch) -> None:
    monkeypatch.setenv("OCTAVO_KERNELS", "reference")
    built = engine(name, ranks, served_model_name=("reference",))  # another engine than the C++ kernels'
    check(make_tiny(name), MIXED, tokens(built.generate(MIXED, 20)))


def test_a_real_model_and_its_quantised_weights(smollm2_gguf, engine_of) -> None:
    """In float32 its scores are those of one rank; quantised shares are as near to them as the whole is."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, seed=0)

    def scores(**settings) -> torch.Tensor:
        engine = engine_of(smollm2_gguf, kv_cache_memory_bytes="32Mi", max_model_len=256, **settings)
        (outputs,) = engine.generate([list(range(300, 400))], [params])
        return torch.tensor([one.logprob for each in outputs for one in each.prompt_logprobs or []])

    exact = scores()
    assert len(exact) == 99
    torch.testing.assert_close(scores(tensor_parallel_size=3), exact, rtol=0, atol=1e-3)
    whole, shared = scores(dtype="auto"), scores(dtype="auto", tensor_parallel_size=3)
    error = (whole - exact).abs().mean()
    assert error > 0.01
    assert (shared - exact).abs().mean() < 1.5 * error


def test_a_rank_that_dies_ends_the_engine_with_its_name(make_tiny, engine_of, tokens) -> None:
    path = make_tiny("llama").path
    shared = engine_of(path, kv_cache_memory_bytes=POOL, tensor_parallel_size=2)
    tokens(shared.generate(prompts(30), 4))
    (rank,) = shared.executor.ranks.pids
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(OctavoError, match="tensor parallel rank 1: it ended: killed by SIGKILL"):
        shared.generate(prompts(30), 200)
    with pytest.raises(OctavoError, match="rank 1"):
        shared.executor.check()


def test_of_many_ranks_the_one_that_died_is_named(make_tiny, engine_of, tokens, monkeypatch) -> None:
    """Not those whose collectives failed for that, though they may be heard of first."""
    monkeypatch.setenv("OCTAVO_KERNELS", "reference")
    shared = engine_of(make_tiny("llama").path, kv_cache_memory_bytes=POOL, tensor_parallel_size=4)
    tokens(shared.generate(prompts(30), 4))

    def cause_late(status) -> str:
        time.sleep(0.4)
        return cause_of(status)

    monkeypatch.setattr(ranks, "cause_of", cause_late)
    os.kill(shared.executor.ranks.pids[1], signal.SIGKILL)
    with pytest.raises(OctavoError, match="tensor parallel rank 2: it ended: killed by SIGKILL"):
        shared.generate(prompts(30), 200)


@pytest.mark.parametrize("victim", ["rank", "engine"])
def test_an_idle_engine_and_its_ranks_end_together(victim, make_tiny, tmp_path, monkeypatch) -> None:
    """And leave no file behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    settings = {"device": "cpu", "kv_cache_memory_bytes": POOL, "tensor_parallel_size": 2}
    path = make_tiny("llama").path

    async def scenario() -> None:
        client = EngineClient()
        await client.start(engine_config(str(path), settings), model_path=path)
        try:
            await client.wait_ready()
            (rank,) = [
                int(pid)
                for task in Path(f"/proc/{client.pid}/task").iterdir()
                for pid in (task / "children").read_text().split()
            ]
            os.kill(rank if victim == "rank" else client.pid, signal.SIGKILL)
            while client.state != "dead":
                await client.changed()
            if victim == "rank":
                assert "tensor parallel rank 1: it ended: killed by SIGKILL" in client.error
            while Path(f"/proc/{rank}").exists():
                await asyncio.sleep(0.05)
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert not list(tmp_path.iterdir())


def test_a_rank_that_ends_before_it_is_told_anything(make_tiny, engine_of, monkeypatch) -> None:
    def killed(*arguments, start=subprocess.Popen, **options) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        process.kill()
        process.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", killed)
    with pytest.raises(OctavoError, match="tensor parallel rank 1: it ended: killed by SIGKILL"):
        engine_of(make_tiny("llama").path, kv_cache_memory_bytes=POOL, max_num_seqs=5, tensor_parallel_size=2)


def test_a_fault_counts_before_its_process_has_ended(monkeypatch) -> None:
    faults: queue.SimpleQueue[OctavoError] = queue.SimpleQueue()
    ours, theirs = Pipe()
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) as process:
        monkeypatch.setattr(ranks, "start_module", lambda *module, **pipes: process)
        ranks._Process(ranks.Launch(3, 4, {}, "", 0, 0), ours, faults.put)
        theirs.send_bytes(ranks.encoder.encode(ranks.Failed("ConfigError", "no memory")))
        try:
            fault = faults.get(timeout=30)
        finally:
            process.kill()
            theirs.close()
    assert isinstance(fault, ConfigError) and fault.message == "tensor parallel rank 3: no memory"


def test_an_executor_whose_group_broke_can_be_let_go(make_tiny) -> None:
    path = make_tiny("llama").path
    settings = {"device": "cpu", "kv_cache_memory_bytes": POOL, "tensor_parallel_size": 2}
    executor = build_executor(engine_config(str(path), settings), path, lambda stage, detail: None)
    (rank,) = executor.ranks.pids
    kept = weakref.ref(executor)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(OctavoError, match="rank 1"):
        while True:
            executor.check()
            time.sleep(0.01)
    del executor
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("status", "cause"),
    [(3, "exit status 3"), (-9, "killed by SIGKILL (out of memory?)"), (-40, "killed by signal 40")],
)
def test_why_a_process_ended(status, cause) -> None:
    assert cause_of(status) == cause


def test_an_interrupt_while_the_ranks_are_told_breaks_the_group(make_tiny, engine_of, monkeypatch) -> None:
    """They have the step, rank 0 has not: the next one would mix the two up."""
    settings = {"kv_cache_memory_bytes": POOL, "max_num_seqs": 6, "async_scheduling": False}
    shared = engine_of(make_tiny("llama").path, **settings, tensor_parallel_size=2)
    tell = shared.executor.ranks.tell

    def interrupted(message) -> None:
        tell(message)
        raise KeyboardInterrupt

    monkeypatch.setattr(shared.executor.ranks, "tell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shared.generate(prompts(30), 4)
    monkeypatch.undo()
    with pytest.raises(OctavoError, match="failed: KeyboardInterrupt"):
        shared.generate(prompts(30), 4)


def test_what_a_rank_cannot_do_is_said_at_the_start(make_tiny, engine_of, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"tensor-parallel-size is 3, but 4 attention heads.* 1, 2, 4$"):
        engine_of(make_tiny("llama").path, tensor_parallel_size=3)
    path = make_tiny("qwen3").path
    monkeypatch.setitem(ARCHITECTURES, "Unknown", ARCHITECTURES["Qwen3ForCausalLM"])  # here, not in the rank
    config = path / "config.json"
    text = config.read_text()
    config.write_text(text.replace("Qwen3ForCausalLM", "Unknown"))
    try:
        with pytest.raises(OctavoError, match="tensor parallel rank 1: architecture 'Unknown' is not"):
            engine_of(path, tensor_parallel_size=2, kv_cache_memory_bytes=POOL)
    finally:
        config.write_text(text)
