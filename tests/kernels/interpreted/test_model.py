"""A model's own definition, served by the Triton kernels as a GPU's worker runs them: chunked prompts, and
decode steps captured and padded, of a whole engine.
"""

import pytest
from fake_gpu import FakeGpu
from tiny_models import MODELS, PROMPTS, save_model

import octavo_kernels
from octavo import LLM, SamplingParams
from octavo.worker import loading


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_the_references(ops, reference, name, tmp_path, monkeypatch):
    save_model(name, tmp_path)
    record, replayed = ops.record, []

    def counted(forward):
        replay = record(forward)
        return lambda *rows: replayed.append(rows) or replay(*rows)

    monkeypatch.setattr(ops, "record", counted)
    monkeypatch.setattr(loading, "find_gpu", lambda rank, world: FakeGpu())
    results = []
    for backend, device in ((ops, "cuda"), (reference, "cpu")):
        monkeypatch.setattr(octavo_kernels, "load", lambda *place, backend=backend: backend)
        llm = LLM(
            model=tmp_path,
            device=device,
            dtype="float32",
            kv_cache_memory_bytes="1Mi",
            max_model_len=128,
            max_num_batched_tokens=32,
            max_num_seqs=4,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False
        )
        results.append([output.outputs[0].token_ids for output in outputs])
    assert results[0] == results[1]
    assert (4, 4) in replayed  # three rows and one of padding
