"""How many KV blocks to have, and how long a request may be. Pure: bytes in, blocks out."""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Callable

from octavo.errors import ConfigError

log = logging.getLogger(__name__)

GIB = 2**30
# Of the memory still free once the weights are loaded; the rest is for activations and neighbours.
CPU_SHARE = 0.4
GPU_SWAP_GIB = 4.0  # host memory for swapped sequences when nobody said, as vLLM has it
CPU_SWAP_SHARE = 0.25  # of the KV cache: on a CPU both are the same memory
HOST_SHARE = 0.5  # at most, of the memory still free, unless somebody asked for more

BlocksNeeded = Callable[[int], int]  # blocks, over all KV groups, that a request of so many tokens takes


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """The pool, and the longest prompt plus output, both settled. ``request_blocks`` are those of one request
    of that length.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    request_blocks: int

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds, in requests of the full length."""
        whole = -(-self.max_model_len // self.block_size) * self.block_size
        return self.num_blocks * whole // self.request_blocks

    @property
    def concurrency(self) -> float:
        """Requests of the full length that fit at once."""
        return self.num_blocks / self.request_blocks


def check_gpu_share(total: int, utilisation: float, free: int) -> None:
    """Refuse a share of a GPU's memory that is not free, before anything is loaded."""
    if (share := int(total * utilisation)) > free:
        most = int(free / total * 100) / 100
        raise ConfigError(
            f"gpu-memory-utilization is {utilisation:.2f}, {_gib(share)} of the GPU's {_gib(total)}, but "
            f"only {_gib(free)} are free: end what holds the rest, or give at most {most}"
        )


def gpu_cache_bytes(
    total: int, utilisation: float, weights: int, peak_activations: int, graphs: int = 0
) -> int:
    """Bytes for the pool on a GPU: its share of the memory, less the weights, the peak of a run with the
    largest batch, and captured graphs. Raises ``ConfigError`` when nothing is left.
    """
    left = int(total * utilisation) - weights - peak_activations - graphs
    if left <= 0:
        raise ConfigError(
            f"no GPU memory is left for the KV cache: {utilisation:.2f} of {_gib(total)} less weights "
            f"{_gib(weights)}, activations {_gib(peak_activations)} and graphs {_gib(graphs)}. "
            "Raise --gpu-memory-utilization, or lower --max-num-batched-tokens"
        )
    return left


def cpu_cache_bytes(free: int, engines: int = 1) -> int:
    """Bytes for the pool on a CPU when nobody said: a share of the free memory, which ``engines`` divide."""
    return int(free * CPU_SHARE / engines)


def wanted_cache_bytes(wanted: int, free: int) -> int:
    """Bytes for the pool that the user asked for. Raises ``ConfigError`` when they are not free."""
    if wanted > free:
        raise ConfigError(
            f"kv-cache-memory-bytes is {wanted} ({_gib(wanted)}), but {_gib(free)} of memory are free: "
            "lower it, or give the process more memory"
        )
    return wanted


def check_max_model_len(wanted: int | str | None, model_limit: int) -> None:
    """Refuse a length beyond the model's own, before anything is loaded."""
    if isinstance(wanted, int) and wanted > model_limit:
        raise ConfigError(
            f"max-model-len is {wanted}, above the model's own limit of {model_limit} tokens: give at most "
            f"{model_limit}, or auto"
        )


def size_cache(
    cache_bytes: int,
    bytes_per_block: int,
    block_size: int,
    wanted: int | str | None,
    model_limit: int,
    blocks_needed: BlocksNeeded,
) -> CacheSize:
    """Blocks that fit ``cache_bytes``, and the longest request.

    ``wanted`` is the ``max_model_len`` setting: tokens, "auto" (the longest that fits, at most the model's
    own), or None (the model's own). Raises ``ConfigError`` naming the longest that fits when one request
    cannot.
    """
    num_blocks = cache_bytes // bytes_per_block
    lengths = range(1, model_limit + 1)
    fits = bisect.bisect_right(lengths, num_blocks, key=blocks_needed)
    if fits == 0:
        needed = blocks_needed(1)
        raise ConfigError(
            f"a KV cache of {cache_bytes} bytes holds {num_blocks} blocks of {bytes_per_block} bytes, and "
            f"one token takes {needed}: raise --kv-cache-memory-bytes to {needed * bytes_per_block}"
        )
    length = fits if wanted == "auto" else wanted if isinstance(wanted, int) else model_limit
    if length > fits:
        needed = blocks_needed(length) * bytes_per_block
        raise ConfigError(
            f"max-model-len is {length}, but the KV cache ({_gib(cache_bytes)}, {num_blocks} blocks of "
            f"{block_size} tokens) cannot hold one such request: the longest that fits is {fits}. "
            f"Set --max-model-len to {fits} or auto, or raise --kv-cache-memory-bytes to {needed}"
        )
    return CacheSize(num_blocks, block_size, length, blocks_needed(length))


def capped(size: CacheSize, max_num_seqs: int) -> CacheSize:
    """No more blocks than ``max_num_seqs`` requests of the full length use: for a size nobody asked for."""
    return dataclasses.replace(size, num_blocks=min(size.num_blocks, max_num_seqs * size.request_blocks))


def host_bytes(swap_gib: float | None, offload_gib: float, cache_bytes: int, on_gpu: bool, free: int) -> int:
    """Host memory for swapped sequences and for evicted cached blocks together: the settings, in bytes.

    ``free`` is what is left beside the KV cache. Without ``swap_gib`` it is a default, cut to what is free.
    Raises ``ConfigError`` for more than that.
    """
    offload = int(offload_gib * GIB)
    if swap_gib is None:
        usual = int(GPU_SWAP_GIB * GIB if on_gpu else cache_bytes * CPU_SWAP_SHARE)
        swap = max(0, min(usual, int((free - offload) * HOST_SHARE)))
    else:
        swap = int(swap_gib * GIB)
    if swap + offload > max(0, free):
        raise ConfigError(
            f"swap-space and kv-offloading-gib ask for {_gib(swap)} and {_gib(offload)} of host memory, but "
            f"{_gib(max(0, free))} are free beside the KV cache: lower them, or give the process more memory"
        )
    return swap + offload


def log_size(device: str, size: CacheSize) -> None:
    """The two lines that people look for at start."""
    log.info("%s KV cache size: %d tokens", "GPU" if device == "cuda" else "CPU", size.tokens)
    log.info("Maximum concurrency for %d tokens per request: %.1fx", size.max_model_len, size.concurrency)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
