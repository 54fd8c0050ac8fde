"""The reference kernels agree with torch's own attention and with the formulas they stand for."""

import torch
import torch.nn.functional as F

from octavo_kernels import AttentionBatch, DrawSettings, load


def paged(ops, k, v, block_size, blocks):
    """A cache that holds k and v [T, Hkv, D] in the given blocks, in order."""
    cache = torch.zeros(ops.kv_cache_shape(max(blocks) + 1, block_size, k.shape[1], k.shape[2]))
    position = torch.arange(k.shape[0])
    slots = torch.tensor(blocks)[position // block_size] * block_size + position % block_size
    ops.write_kv(k, v, cache, slots)
    return cache


def test_attention_over_blocks_equals_torch_attention_over_the_whole_sequence():
    torch.manual_seed(0)
    ops = load("reference")
    q, k, v = torch.randn(9, 6, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    cache = paged(ops, k, v, 4, [7, 2, 5])
    batch = AttentionBatch(
        query_start=torch.tensor([0, 9], dtype=torch.int32),
        seq_lens=torch.tensor([9], dtype=torch.int32),
        block_tables=torch.tensor([[7, 2, 5]], dtype=torch.int32),
        block_size=4,
        max_query_len=9,
    )
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(ops.paged_attention(q, cache, batch, 0.25), expected)


def test_a_window_of_one_returns_each_token_its_own_value():
    ops = load("reference")
    k, v = torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    cache = paged(ops, k, v, 2, [0, 1, 2])
    batch = AttentionBatch(
        query_start=torch.tensor([0, 5], dtype=torch.int32),
        seq_lens=torch.tensor([5], dtype=torch.int32),
        block_tables=torch.tensor([[0, 1, 2]], dtype=torch.int32),
        block_size=2,
        max_query_len=5,
    )
    torch.testing.assert_close(ops.paged_attention(torch.randn(5, 1, 8), cache, batch, 1.0, window=1), v)


def test_copied_blocks_read_like_their_sources():
    ops = load("reference")
    cache = torch.randn(ops.kv_cache_shape(4, 2, 1, 8))
    ops.copy_blocks(cache, torch.tensor([0, 3]), torch.tensor([2, 1]))
    assert torch.equal(cache[0], cache[2]) and torch.equal(cache[3], cache[1])


def test_rotary_turns_a_pair_by_the_angle_of_its_position():
    ops = load("reference")
    angle = torch.tensor([[0.0], [0.5], [1.0]])
    q = torch.tensor([[[1.0, 0.0]]])
    k = q.clone()
    ops.rotary(q, k, angle.cos(), angle.sin(), torch.tensor([2]))
    torch.testing.assert_close(q[0, 0], torch.stack([angle[2, 0].cos(), angle[2, 0].sin()]))
    torch.testing.assert_close(q, k)


def test_draws_of_a_gpus_logits_wait_for_nothing(monkeypatch):
    """What tells how to draw goes there from page-locked memory, in copies that nobody waits for."""
    locked, sent, to = set(), [], torch.Tensor.to

    def pin_memory(tensor):
        locked.add(tensor.data_ptr())
        return tensor

    def send(tensor, *args, **options):
        if tensor.is_cpu and args and args[0] == torch.device("meta"):
            sent.append(options.get("non_blocking") and tensor.data_ptr() in locked)
        return to(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", send)
    draws = torch.tensor([DrawSettings(0.8, 3, 0.9, 0, 0.3)] * 100, dtype=torch.float64)
    load("reference").sample(torch.empty(100, 50, device="meta"), draws)
    assert len(sent) == 4 and all(sent)
