"""How many KV blocks to have, and how long a request may be. Pure: bytes in, blocks out."""

from __future__ import annotations

import dataclasses
import logging

from octavo.errors import ConfigError

log = logging.getLogger(__name__)

# Of the memory still free once the weights are loaded; the rest is for activations and neighbours.
CPU_SHARE = 0.4


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """The pool, and the longest prompt plus output, both settled."""

    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """Requests of the full length that fit at once."""
        return self.tokens / self.max_model_len


def block_bytes(layers: int, block_size: int, kv_heads: int, head_dim: int, number_bytes: int) -> int:
    """Bytes of one block in all layers: K and V of ``block_size`` tokens."""
    return 2 * layers * block_size * kv_heads * head_dim * number_bytes


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
    cache_bytes: int, bytes_per_block: int, block_size: int, wanted: int | str | None, model_limit: int
) -> CacheSize:
    """Blocks that fit ``cache_bytes``, and the longest request.

    ``wanted`` is the ``max_model_len`` setting: tokens, "auto" (the longest that fits, at most the model's
    own), or None (the model's own). Raises ``ConfigError`` naming the longest that fits when one request
    cannot.
    """
    num_blocks = cache_bytes // bytes_per_block
    fits = min(num_blocks * block_size, model_limit)
    if fits == 0:
        raise ConfigError(
            f"a KV cache of {cache_bytes} bytes cannot hold one block of {bytes_per_block} bytes: raise "
            "--kv-cache-memory-bytes"
        )
    if wanted == "auto":
        return CacheSize(num_blocks, block_size, fits)
    length = wanted if isinstance(wanted, int) else model_limit
    if length > fits:
        needed = -(-length // block_size) * bytes_per_block
        raise ConfigError(
            f"max-model-len is {length}, but the KV cache ({_gib(cache_bytes)}) holds "
            f"{num_blocks * block_size} tokens: the longest that fits is {fits}. "
            f"Set --max-model-len to {fits} or auto, or raise --kv-cache-memory-bytes to {needed}"
        )
    return CacheSize(num_blocks, block_size, length)


def capped(size: CacheSize, max_num_seqs: int) -> CacheSize:
    """No more blocks than ``max_num_seqs`` requests of the full length use: for a size nobody asked for."""
    useful = max_num_seqs * -(-size.max_model_len // size.block_size)
    return dataclasses.replace(size, num_blocks=min(size.num_blocks, useful))


def log_size(device: str, size: CacheSize) -> None:
    """The two lines that people look for at start."""
    log.info("%s KV cache size: %d tokens", "GPU" if device == "cuda" else "CPU", size.tokens)
    log.info("Maximum concurrency for %d tokens per request: %.1fx", size.max_model_len, size.concurrency)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
