"""Tensor parallel ranks speak through NCCL, in captured graphs too; on several GPUs they share a model."""

import pytest
import torch
from tiny_models import PROMPTS, save_model

from octavo import LLM, SamplingParams
from octavo_kernels.communicator import TorchCommunicator


def test_collectives_are_captured(ops, tmp_path):
    """A group of one: its sums are what was there."""
    group = TorchCommunicator(0, 1, "nccl", tmp_path / "meeting")
    x, total = torch.ones(4, 64, device="cuda"), torch.zeros(4, 64, device="cuda")

    def forward():
        group.all_reduce(x)
        total.add_(x)

    replay = ops.record(forward)
    total.zero_()
    for _ in range(3):
        replay(4, 4)
    assert torch.equal(total.cpu(), torch.full((4, 64), 3.0))
    assert torch.equal(group.gather(x, 60), x[:, :60])
    group.close()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_two_gpus_give_the_tokens_of_one(name, ops, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    save_model(name, tmp_path)
    pool = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    made = []
    for ranks in (1, 2):
        llm = LLM(
            model=tmp_path, device="cuda", kv_cache_memory_bytes="4Mi", tensor_parallel_size=ranks, **pool
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], greedy, use_tqdm=False)
        made.append([output.outputs[0].token_ids for output in outputs])
    assert made[0] == made[1]
