"""Sizing the KV cache: the reference's figures, the start-up lines, and refusals that name what fits."""

import logging

import pytest
import torch

from octavo.core.kv_layout import KVSpec, blocks_needed
from octavo.errors import ConfigError
from octavo.layers.batch import ActivationShape
from octavo.worker.pages import page_bytes, zeroed
from octavo.worker.sizing import (
    CacheSize,
    capped,
    check_max_model_len,
    gpu_cache_bytes,
    host_bytes,
    log_size,
    wanted_cache_bytes,
)
from octavo.worker.sizing import size_cache as size_of
from octavo_kernels import load
from octavo_kernels.memory import CACHE_LINE

GIB = 1 << 30
FULL = (KVSpec(),)
HYBRID = (KVSpec(), *[KVSpec("sliding_window", 64)] * 5)  # Gemma 3's proportions


def size_cache(
    cache: int, per_block: int, block: int, wanted: int | str | None, limit: int, groups: tuple = FULL
) -> CacheSize:
    return size_of(
        cache, per_block, block, wanted, limit, lambda tokens: blocks_needed(groups, tokens, block, 32)
    )


def test_bytes_of_a_token_are_the_references() -> None:
    def layer(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return page_bytes(load("reference"), ActivationShape(1, 1, kv_heads, head_dim, 1), 1, dtype)

    assert 40 * layer(40, 128, torch.float16) == 819_200  # OPT-13B, fp16
    assert 28 * layer(2, 128, torch.bfloat16) == 28_672  # Qwen2.5-1.5B, bf16
    assert 28 * layer(2, 128, torch.int8) == 14_784  # the same in int8, with scales


@pytest.mark.parametrize("tokens", [1, 1000, 1_000_000])
def test_pages_on_a_cpu_begin_with_a_cache_line(tokens: int) -> None:
    pages = zeroed((tokens, 2, 4), torch.bfloat16, torch.device("cpu"))
    assert pages.data_ptr() % CACHE_LINE == 0
    assert pages.shape == (tokens, 2, 4)
    assert pages.is_contiguous()
    assert not pages.any()


def test_gpu_pool_is_its_share_less_weights_activations_and_graphs() -> None:
    assert gpu_cache_bytes(24 * GIB, 0.5, 4 * GIB, 2 * GIB, GIB) == 5 * GIB
    with pytest.raises(ConfigError, match="gpu-memory-utilization"):
        gpu_cache_bytes(24 * GIB, 0.2, 4 * GIB, 2 * GIB)


def test_the_two_lines_at_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    size = size_cache(1000 * 64, 64, 16, 2048, 8192)
    log_size("cpu", size)
    log_size("cuda", size)
    assert caplog.messages[:2] == [
        "CPU KV cache size: 16000 tokens",
        "Maximum concurrency for 2048 tokens per request: 7.8x",
    ]
    assert caplog.messages[2] == "GPU KV cache size: 16000 tokens"


@pytest.mark.parametrize(("wanted", "limit"), [(1025, 4096), (None, 4096)])
def test_a_length_that_cannot_fit_is_refused_with_the_longest_that_does(
    wanted: int | None, limit: int
) -> None:
    with pytest.raises(ConfigError, match="longest that fits is 1024") as error:
        size_cache(64 * 100, 100, 16, wanted, limit)
    needed = int(error.value.message.rsplit(" ", 1)[1])
    assert size_cache(needed, 100, 16, wanted, limit).max_model_len == (wanted or limit)
    with pytest.raises(ConfigError):
        size_cache(needed - 1, 100, 16, wanted, limit)


def test_auto_takes_the_longest_that_fits_up_to_the_models_own() -> None:
    assert size_cache(64 * 100, 100, 16, "auto", 4096).max_model_len == 1024
    assert size_cache(64 * 100, 100, 16, "auto", 512).max_model_len == 512
    assert size_cache(64 * 100, 100, 16, 1024, 4096).max_model_len == 1024


def test_lengths_beyond_the_models_own_are_refused() -> None:
    check_max_model_len(512, 512)
    check_max_model_len("auto", 512)
    with pytest.raises(ConfigError, match=r"513.*512"):
        check_max_model_len(513, 512)


def test_a_cache_too_small_for_a_block_or_beyond_the_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="one token takes 1"):
        size_cache(99, 100, 16, "auto", 512)
    with pytest.raises(ConfigError, match=r"2\.00 GiB.*1\.00 GiB"):
        wanted_cache_bytes(2 * GIB, GIB)


def test_a_default_size_is_no_more_than_all_sequences_could_use() -> None:
    size = size_cache(10**9, 100, 16, 100, 4096)
    assert capped(size, 4).num_blocks == 4 * 7
    assert capped(size_cache(300, 100, 16, 20, 4096), 4).num_blocks == 3


def test_a_window_is_paid_for_once_and_not_by_the_token() -> None:
    """One full group and five that keep 64 tokens and a chunk of 32: 6 blocks a group each at most, and 7
    where they lie askew.
    """
    size = size_cache(1000, 1, 16, 4096, 8192, HYBRID)
    assert size.request_blocks == 4096 // 16 + 5 * 7
    assert size.concurrency == 1000 / 291
    assert size.tokens == 1000 * 4096 // 291
    assert size_cache(1000, 1, 16, 64, 8192, HYBRID).tokens == 1000 * 16 // 6
    assert size_cache(100, 1, 16, "auto", 8192, HYBRID).max_model_len == (100 - 35) * 16
    with pytest.raises(ConfigError, match="longest that fits is 1040") as error:
        size_cache(100, 1, 16, 1041, 8192, HYBRID)
    assert error.value.message.endswith("raise --kv-cache-memory-bytes to 101")


def test_host_memory_has_a_default_that_fits_and_a_wish_that_is_kept_or_refused() -> None:
    assert host_bytes(None, 0.0, 8 * GIB, False, 100 * GIB) == 2 * GIB
    assert host_bytes(None, 0.0, 8 * GIB, True, 100 * GIB) == 4 * GIB
    assert host_bytes(None, 1.0, 8 * GIB, True, 3 * GIB) == 2 * GIB
    assert host_bytes(None, 0.0, 8 * GIB, True, -GIB) == 0
    assert host_bytes(0.0, 0.5, 8 * GIB, False, GIB) == GIB // 2
    with pytest.raises(ConfigError, match=r"swap-space.*2\.00 GiB and 0\.00 GiB.*1\.00 GiB are free"):
        host_bytes(2.0, 0.0, 8 * GIB, False, GIB)
    with pytest.raises(ConfigError, match="kv-offloading-gib"):
        host_bytes(None, 2.0, 8 * GIB, False, GIB)
