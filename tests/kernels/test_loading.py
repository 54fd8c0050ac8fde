"""Which backend serves, and how a missing or unfit one is reported."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from octavo_kernels import KernelsUnavailable, load
from octavo_kernels.cpu import library


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("OCTAVO_KERNELS", raising=False)
    library.open_library.cache_clear()
    yield
    library.open_library.cache_clear()


@pytest.mark.skipif(
    not os.environ.get("CI"), reason="a machine without a compiler may test the reference alone"
)
def test_ci_serves_with_the_compiled_kernels():
    assert load().name == "cpu", f"{library.LIBRARY} did not load"


def test_without_the_library_the_reference_serves_and_says_so_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libkernels.so")
    assert load().name == "reference"
    assert len(caplog.records) == 1 and "install a C++ compiler" in caplog.text
    with pytest.raises(KernelsUnavailable, match="not built"):
        load("cpu")


def test_a_library_that_cannot_be_loaded_is_reported(monkeypatch, tmp_path):
    broken = tmp_path / "libkernels.so"
    broken.write_text("no library")
    monkeypatch.setattr(library, "LIBRARY", broken)
    with pytest.raises(KernelsUnavailable, match="cannot be loaded"):
        load("cpu")


@pytest.mark.skipif(not library.LIBRARY.exists(), reason="the library is not built")
def test_a_library_built_from_other_sources_is_not_called(monkeypatch):
    monkeypatch.setattr(library, "INTERFACE", library.INTERFACE + 1)
    with pytest.raises(KernelsUnavailable, match="reinstall"):
        load("cpu")


def test_kernels_for_a_cpu_are_not_given_a_gpus_memory(monkeypatch):
    with pytest.raises(KernelsUnavailable, match="run on cpu, not on cuda"):
        load("cpu", "cuda")
    monkeypatch.setenv("OCTAVO_KERNELS", "cpu")
    with pytest.raises(KernelsUnavailable, match="run on cpu, not on cuda"):
        load(device="cuda")


def test_without_a_gpu_the_triton_kernels_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelsUnavailable, match=r"^the triton kernels run on cuda, not on cpu$"):
        load("triton")
    pytest.importorskip("triton")
    with pytest.raises(
        KernelsUnavailable, match=r"^the triton kernels need a GPU, and torch finds no usable .*$"
    ):
        load("triton", "cuda")


def test_triton_without_a_c_compiler_is_refused_before_its_first_launch(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelsUnavailable, match="need a C compiler"):
        load("triton", "cuda")


def test_triton_without_pythons_headers_is_refused_before_its_first_launch(monkeypatch, tmp_path):
    backend = pytest.importorskip("octavo_kernels.triton.backend")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(KernelsUnavailable, match="need Python's headers"):
        load("triton", "cuda")


def test_a_gpu_that_triton_compiles_nothing_for_is_served_by_the_reference(monkeypatch, caplog):
    backend = pytest.importorskip("octavo_kernels.triton.backend")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(backend.Path, "exists", lambda path: True)
    assert load("auto", "cuda").name == "reference"
    assert "need compute capability 8.0 or newer, and Tesla T4 has 7.5" in caplog.text


def test_a_gpu_is_served_by_the_triton_kernels_and_without_triton_by_the_reference(monkeypatch, caplog):
    backend = pytest.importorskip("octavo_kernels.triton.backend")
    monkeypatch.setattr(backend, "_architecture", lambda: "sm_90")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ops = load("auto", "cuda", dtype)
        assert (ops.name, ops.isa) == ("triton", "sm_90")
    assert not caplog.records
    monkeypatch.setitem(sys.modules, "octavo_kernels.triton.backend", None)
    assert load("auto", "cuda").name == "reference"
    assert "need octavo[gpu] installed" in caplog.text


def test_an_architecture_without_a_table_shares_one_and_says_so(monkeypatch, caplog):
    backend = pytest.importorskip("octavo_kernels.triton.backend")
    monkeypatch.setattr(backend, "_architecture", lambda: "sm_89")
    assert load("triton", "cuda").isa == "sm_89"
    assert [record.getMessage() for record in caplog.records] == [
        "no table of tiles for sm_89: its kernels use those for any GPU"
    ]


def test_the_environment_forces_a_backend(monkeypatch):
    monkeypatch.setenv("OCTAVO_KERNELS", "reference")
    assert load().name == "reference"
    monkeypatch.setenv("OCTAVO_KERNELS", "fastest")
    with pytest.raises(ValueError, match="not one of auto, cpu, reference"):
        load()


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("OCTAVO_KERNELS_ISA", "sse2")
    with pytest.raises(ValueError, match="not one of amx, avx512, avx2"):
        load("cpu")


def test_float16_is_served_by_the_reference():
    assert load(dtype=torch.float16).name == "reference"


def test_threads_that_come_and_go_and_callers_that_collide_get_right_results():
    try:
        ops = load("cpu")
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    x, w = torch.randn(64, 256), torch.randn(512, 256)
    packed = ops.pack(w, torch.float32)
    expected = ops.matmul(x, packed)
    wrong = []

    def work():
        for _ in range(50):
            if not torch.equal(ops.matmul(x, packed), expected):
                wrong.append(1)

    for threads in (4, 1, 3):
        ops.set_num_threads(threads)
        callers = [threading.Thread(target=work) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not wrong


def test_threads_that_are_not_wanted_sleep_through_the_work():
    code = """
import pathlib, torch
from octavo_kernels import load
ops = load()
def switches():
    statuses = [task / "status" for task in pathlib.Path("/proc/self/task").iterdir()]
    return {s.parent.name: int(s.read_text().split("nonvoluntary")[0].split()[-1].strip()) for s in statuses}
x, w = torch.ones(1, 512), ops.pack(torch.ones(512, 512), torch.float32)
torch.set_num_threads(1)
ops.set_num_threads(8)
ops.set_num_threads(2)
for _ in range(200):
    ops.matmul(x, w)
before = switches()
for _ in range(2000):
    ops.matmul(x, w)
woken = [task for task, count in switches().items() if count - before[task] > 200]
assert len(woken) <= 2, woken  # the caller and one worker, at most
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_long_context_split_over_many_threads_takes_bounded_memory():
    code = """
import torch
from octavo_kernels import AttentionBatch, load
ops = load()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
length, queries, block = 32768, 144, 256
cache = torch.zeros(ops.kv_cache_shape(length // block, block, 1, 256), dtype=torch.bfloat16)
cache.fill_(0.5)
q = torch.ones(queries, 4, 256, dtype=torch.bfloat16)
tables = torch.arange(length // block, dtype=torch.int32)[None]
starts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([0, queries], [length]))
if ops.name == "cpu":
    ops.set_num_threads(32)
    before = resident()
    out = ops.paged_attention(q, cache, AttentionBatch(starts, lengths, tables, block, queries), 0.1)
    assert torch.all(out == 0.5)
    assert resident() - before < 110 << 20, resident() - before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_weights_give_their_memory_back():
    code = """
import torch
from octavo_kernels import load
ops = load()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
w = torch.ones(4096, 4096)
ops.pack(w, torch.float32)
before = resident()
for _ in range(8):
    ops.pack(w, torch.float32)
assert resident() - before < 300 << 20, resident() - before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_weights_lie_in_memory_that_may_have_huge_pages():
    """Private memory with the advice: shared memory has none unless the administrator allows it."""
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this system has no transparent huge pages")
    address, _mapping = library.Arena().take(1)
    ranges = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    for described in ranges[1:]:
        start, end = (int(bound, 16) for bound in described.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            (flags,) = re.findall(r"^VmFlags: (.*)$", described, flags=re.MULTILINE)
            assert "hg" in flags.split() and "sh" not in flags.split()
            return
    raise AssertionError(f"nothing is mapped at {address:#x}")
