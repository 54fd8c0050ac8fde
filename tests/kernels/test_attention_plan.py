"""The plan of a step's attention: blocks with which several contexts begin are read once for all of them."""

import ctypes
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

SOURCES = Path(__file__).parents[2] / "kernels/octavo_kernels/cpu/src"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
DRIVER = """
#include "attention_plan.cpp"
using namespace octavo;

extern "C" long tokens_read(const int* query_start, const int* seq_lens, const int* block_tables,
                            long table_stride, long sequences, long block_size, long heads, long window) {
    Attention a{};
    a.query_start = query_start, a.seq_lens = seq_lens, a.sequences = sequences;
    a.block_tables = block_tables, a.table_stride = table_stride, a.cache.block_size = block_size;
    a.heads = heads, a.kv_heads = 1, a.window = window;
    long chunks = 0;
    for (const auto& stage : plan_attention(a).stages)
        for (const AttentionTask& task : stage) chunks += task.chunk_end - task.chunk_begin;
    return chunks * kChunk;
}
"""
BLOCK, HEADS = 16, 3


@pytest.fixture(scope="module")
def tokens_read(tmp_path_factory):
    """``tokens_read(tables, context, window)`` by all tasks of a KV head, for one query of each sequence."""
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"no C++ compiler ({COMPILER[0]})")
    folder = tmp_path_factory.mktemp("plan")
    (folder / "driver.cpp").write_text(DRIVER)
    command = [*COMPILER, "-std=c++17", "-shared", "-fPIC", f"-I{SOURCES}", "driver.cpp", "-o", "plan.so"]
    subprocess.run(command, cwd=folder, check=True)
    plan = ctypes.CDLL(str(folder / "plan.so")).tokens_read
    plan.restype, plan.argtypes = ctypes.c_long, [*[ctypes.c_void_p] * 3, *[ctypes.c_long] * 5]

    def read(tables, context, window=0):
        starts, lengths = torch.arange(len(tables) + 1).int(), torch.full((len(tables),), context).int()
        arrays = (starts.data_ptr(), lengths.data_ptr(), tables.data_ptr())
        return plan(*arrays, tables.stride(0), len(tables), BLOCK, HEADS, window)

    return read


def tables(sequences, context, *shared):
    """Block tables: (first, end, tokens) of ``shared`` are sequences that begin with the same tokens."""
    own = torch.randperm(sequences * context // BLOCK).int().view(sequences, -1)
    for first, end, tokens in shared:
        own[first:end, : tokens // BLOCK] = own[first, : tokens // BLOCK]
    return own[torch.randperm(sequences)]


def test_blocks_that_contexts_begin_with_are_read_once(tokens_read):
    assert tokens_read(tables(8, 640), 640) == 8 * 640
    assert tokens_read(tables(8, 640, (0, 8, 512)), 640) == 512 + 8 * 128
    assert tokens_read(tables(8, 640, (0, 4, 512), (4, 8, 256)), 640) == 512 + 4 * 128 + 256 + 4 * 384
    nested = tables(8, 640, (0, 8, 256), (0, 4, 512))
    assert tokens_read(nested, 640) == 256 + 256 + 4 * 128 + 4 * 384


def test_a_prefix_of_more_sequences_than_fill_a_tile_is_read_by_each_tile(tokens_read):
    assert tokens_read(tables(80, 640, (0, 80, 512)), 640) == 3 * 512 + 80 * 128


def test_behind_a_window_nothing_is_shared(tokens_read):
    assert tokens_read(tables(8, 640, (0, 8, 512)), 640, window=640) == 8 * 640
