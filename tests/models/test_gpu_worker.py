"""The worker on a GPU that is not there: the same tokens by graphs and copies beside the work; memory."""

import itertools
import logging
from pathlib import Path

import pytest
import torch
from fake_gpu import GIB, FakeGpu, GraphOps

import octavo_kernels
from octavo.core.plan import Row, SampleSpec, StepPlan
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError
from octavo.worker import loading, ranks
from octavo_kernels.reference import ReferenceOps

POOL = {"kv_cache_memory_bytes": 2 << 20, "max_num_batched_tokens": 32, "max_num_seqs": 12}
PROMPTS = [[7 + 13 * i % 180 for i in range(45)], [9, 8, 7], [11 * i % 190 for i in range(20)]]
MIB = 2**20
# Engines of equal settings are made once: each of these has a name of its own.
NAMES = (f"engine {number}" for number in itertools.count())


@pytest.fixture
def on_gpu(engine_of, monkeypatch):
    """``on_gpu(path, gpu, ...)``: an engine on it."""

    def build(path, gpu=None, **settings):
        gpu = gpu or FakeGpu(ops=GraphOps())
        monkeypatch.setattr(loading, "find_gpu", lambda rank, world: gpu)
        monkeypatch.setattr(octavo_kernels, "load", lambda *place: gpu.ops)
        return engine_of(path, device="cuda", served_model_name=(next(NAMES),), **settings), gpu

    return build


@pytest.fixture
def on_cpu(engine_of, monkeypatch):
    """The reference kernels, no GPU."""

    def build(path, **settings):
        monkeypatch.setattr(octavo_kernels, "load", lambda *place: ReferenceOps())
        return engine_of(path, **settings)

    return build


MIXED = [
    SamplingParams(temperature=0, seed=1, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=14, ignore_eos=True, logprobs=2),
    SamplingParams(
        temperature=0, seed=1, max_tokens=11, ignore_eos=True, presence_penalty=1.5, prompt_logprobs=1
    ),
]


class Score(float):
    """A log probability. Steps of other numbers of rows, padded ones too, round it otherwise."""

    def __eq__(self, other):
        return abs(self - other) < 1e-4

    __hash__ = None


def scores(logprobs):
    return [
        (Score(each.logprob), each.rank, [(token, Score(score)) for token, score in each.top])
        for each in logprobs or ()
    ]


def said(outputs):
    """All but the times."""
    return [
        [(each.token_ids, scores(each.logprobs), scores(each.prompt_logprobs)) for each in one]
        for one in outputs
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_outputs_are_those_without_a_gpu(name, asynchronous, make_tiny, on_gpu, on_cpu):
    path = make_tiny(name).path
    engine, gpu = on_gpu(path, async_scheduling=asynchronous, **POOL)
    outputs = said(engine.generate(PROMPTS, MIXED))
    assert outputs == said(on_cpu(path, async_scheduling=asynchronous, **POOL).generate(PROMPTS, MIXED))
    assert gpu.ops.replayed
    gpu.finish(gpu.started)  # nothing wrote to what the last copies read


def test_a_draft_model_proposes_the_same(make_tiny, on_gpu, on_cpu):
    speculation = {"model": str(make_tiny("qwen3").path), "num_speculative_tokens": 3}
    path = make_tiny("llama").path
    engine, gpu = on_gpu(path, speculative_config=speculation, **POOL)
    outputs = said(engine.generate(PROMPTS, 12))
    assert gpu.ops.replayed  # its proposals are decode steps
    assert outputs == said(on_cpu(path, speculative_config=speculation, **POOL).generate(PROMPTS, 12))


def test_ranks_measure_capture_and_run_together(make_tiny, on_gpu, on_cpu, monkeypatch):
    """Each on a GPU of its own: the cache fits the smallest."""
    folder = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{folder.parent}", prepend=":")
    monkeypatch.setattr(ranks, "RANK", "fake_gpu_rank")
    path, few = make_tiny("llama").path, {"max_num_batched_tokens": 32, "gpu_memory_utilization": 0.04}
    engine, gpu = on_gpu(path, tensor_parallel_size=2, **few)
    outputs = said(engine.generate(PROMPTS, MIXED))
    assert outputs == said(on_cpu(path, **POOL).generate(PROMPTS, MIXED))
    assert gpu.ops.replayed
    alone = on_gpu(path, **few)[0].executor.info
    shared = engine.executor.info
    assert shared.block_bytes * 2 == alone.block_bytes
    assert shared.num_blocks < alone.num_blocks  # of twice the memory


def decode(rows: int, block: int = 16) -> list[Row]:
    """Rows of one token each, at position 3 of blocks of their own."""
    return [Row(str(i), [5 + i], 3, [[i]], [SampleSpec(0.0, 0, 1.0, 0, 0, 4)]) for i in range(rows)]


def test_decode_steps_replay_the_next_larger_graph(make_tiny, on_gpu):
    engine, gpu = on_gpu(make_tiny("llama").path, **POOL)
    assert gpu.ops.captured == [12, 8, 4, 2, 1]  # the largest first: the others share its memory
    gpu.ops.replayed.clear()
    for rows in (1, 2, 3, 5, 8, 12):
        engine.executor.execute(StepPlan(0, decode(rows)))
    assert [rows for rows, _ in gpu.ops.replayed] == [1, 2, 4, 8, 8, 12]
    prompt = Row("p", [1, 2], 0, [[11]], [SampleSpec(0.0, 0, 1.0, 0, 0, 2)])
    drafted = Row("d", [1], 3, [[11]], [SampleSpec(0.0, 0, 1.0, 0, 0, 4)], drafts=[2])
    for longer in (prompt, drafted):
        engine.executor.execute(StepPlan(0, [*decode(2), longer]))
    assert len(gpu.ops.replayed) == 6


def test_rows_of_padding_write_nowhere(make_tiny, on_gpu):
    engine, gpu = on_gpu(make_tiny("llama").path, **POOL)
    (tensor,) = engine.executor.runner.pages.tensors[:1]
    engine.executor.execute(StepPlan(0, decode(8)))  # leaves slots and lengths behind
    before = tensor.clone()
    engine.executor.execute(StepPlan(1, [Row("a", [99], 20, [[30, 31]], [])] * 5))
    assert gpu.ops.last_slots == [31 * 16 + 4] * 5 + [-1] * 3
    changed = (tensor != before).flatten(1).any(dim=1).nonzero()[:, 0].tolist()
    assert changed == [31]


def test_copies_run_while_the_host_goes_on(make_tiny, on_gpu):
    engine, gpu = on_gpu(make_tiny("llama").path, **POOL)
    finish, waits = gpu.finish, []
    gpu.finish = lambda before: waits.append(before) or finish(before)
    for step in range(2):
        began = gpu.started
        engine.executor.execute(StepPlan(step, decode(3)))
        # One before inputs are written, for the copies of the step before; one for the tokens.
        assert len(waits) == 2
        assert waits.pop(0) <= began and waits.pop() == gpu.started
    silent = [Row("a", [5, 6], 0, [[0]])]
    for step in range(2):  # nothing is drawn: such a step ends while its inputs may still be on their way
        engine.executor.execute(StepPlan(step, silent))
        assert gpu.under_way


def test_eager_means_no_graph_and_the_same_tokens(make_tiny, on_gpu, on_cpu):
    path = make_tiny("llama").path
    engine, gpu = on_gpu(path, enforce_eager=True, **POOL)
    outputs = said(engine.generate(PROMPTS, 8))
    assert gpu.ops.captured == []
    assert outputs == said(on_cpu(path, **POOL).generate(PROMPTS, 8))


def test_what_slept_is_captured_again(make_tiny, on_gpu):
    engine, gpu = on_gpu(make_tiny("llama").path, **POOL)
    first = said(engine.generate(PROMPTS, 8))
    gpu.ops.captured.clear()
    engine.executor.sleep(1)
    engine.executor.load_weights()
    engine.executor.make_cache()
    assert gpu.ops.captured == [12, 8, 4, 2, 1]
    assert said(engine.generate(PROMPTS, 8)) == first


class Measured(FakeGpu):
    """Loading takes 3 GiB of its memory, besides a cache; a step's activations 1 GiB at their highest."""

    def __init__(self) -> None:
        super().__init__(ops=GraphOps())
        self.taken = 3 * GIB
        self.tensors = 2 * GIB

    def peak(self):
        return self.tensors + GIB


def test_the_cache_gets_what_the_formula_leaves(make_tiny, on_gpu, caplog):
    caplog.set_level(logging.INFO)
    settings = {key: value for key, value in POOL.items() if key != "kv_cache_memory_bytes"}
    engine, gpu = on_gpu(make_tiny("llama").path, Measured(), gpu_memory_utilization=0.9, **settings)
    # Profiled on 32 tokens, which take 2 blocks and the page of zeros. Graphs: 101 MiB and four times 1.
    weights = 3 * GIB - 3 * engine.executor.info.block_bytes
    left = int(0.9 * 8 * GIB) - weights - GIB - 105 * MIB
    assert engine.executor.info.num_blocks == min(left // engine.executor.info.block_bytes, 12 * 512 // 16)
    assert "GPU memory: weights and buffers 3072 MiB, activations 1024 MiB, graphs 105 MiB" in caplog.messages
    assert gpu.ops.captured == [12, 8, 12, 8, 4, 2, 1]  # two to measure, and all over the cache itself


@pytest.mark.parametrize("drafts", [0, 3])
def test_measuring_steps_are_no_longer_than_requests(drafts, make_tiny, on_gpu):
    """All tokens of a step are more than one request may have; a draft model also computes what is drawn."""
    short = {"max_num_seqs": 1, "max_num_batched_tokens": 100, "max_model_len": 50}
    if drafts:
        short["speculative_config"] = {
            "model": str(make_tiny("qwen3").path),
            "num_speculative_tokens": drafts,
        }
    engine, gpu = on_gpu(make_tiny("llama").path, Measured(), **short)
    assert engine.executor.info.max_model_len == 50
    assert set(gpu.ops.captured) == {1}


def test_memory_that_others_hold_is_refused_before_loading(make_tiny, on_gpu):
    with pytest.raises(ConfigError, match=r"0\.92, 7\.36 GiB of the GPU's 8\.00 GiB.*6\.00 GiB.*most 0\.75"):
        on_gpu(make_tiny("llama").path, FakeGpu(taken=2 * GIB, ops=GraphOps()))


def capture_ends_badly():
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore words")
    finally:
        raise torch.AcceleratorError("CUDA error: operation failed during capture")


def allocation_fails():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore words")


def context_has_no_room():
    raise torch.AcceleratorError("CUDA error: out of memory\nMore words")


@pytest.mark.parametrize("fail", [allocation_fails, context_has_no_room, capture_ends_badly])
def test_memory_that_runs_out_is_refused_with_what_to_do(fail, make_tiny, on_gpu):
    class Full(GraphOps):
        def record(self, forward):
            fail()

    with pytest.raises(
        ConfigError, match=r"capturing graphs: CUDA.* out of memory.*--enforce-eager"
    ) as error:
        on_gpu(make_tiny("llama").path, FakeGpu(ops=Full()), **POOL)
    assert "\n" not in error.value.message


def test_without_a_gpu_one_line_says_what_was_found_and_what_to_do(monkeypatch):
    def fail():
        raise RuntimeError("Found no driver. Install one.\nMore words")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(ConfigError) as error:
        loading.pick_device("cuda")
    assert "can use no GPU here: Found no driver. Install one. Give the process a GPU" in error.value.message
    assert "--device cpu" in error.value.message and "\n" not in error.value.message
    assert loading.pick_device("auto").torch_device.type == "cpu"


def test_bfloat16_needs_a_gpu_that_has_it():
    gpu = FakeGpu()
    assert loading.pick_dtype("auto", "bfloat16", gpu) is torch.bfloat16
    gpu.computes_bfloat16 = False
    assert loading.pick_dtype("auto", "bfloat16", gpu) is torch.float16
    assert loading.pick_dtype("float32", "bfloat16", gpu) is torch.float32
    with pytest.raises(ConfigError, match=r"Fake \(compute capability 9\.0\).*8\.0.*--dtype float16"):
        loading.pick_dtype("bfloat16", "float16", gpu)
