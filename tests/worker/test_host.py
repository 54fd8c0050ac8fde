"""What the process may use: memory under cgroup limits of both versions, and threads."""

from pathlib import Path

import pytest
import torch

import octavo_kernels
from octavo.errors import ConfigError
from octavo.worker.host import engines_here, free_memory, page_lock, set_threads
from octavo.worker.sizing import cpu_cache_bytes

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  8388608 kB\nMemAvailable:  4194304 kB\n"}


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert free_memory(write(tmp_path, MEMINFO)) == 4096 * MIB


def test_the_tightest_cgroup_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    pod = "sys/fs/cgroup/kubepods/pod1"
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/kubepods/pod1/engine\n",
            f"{pod}/engine/memory.max": "max\n",
            f"{pod}/memory.max": str(2048 * MIB),
            f"{pod}/memory.current": str(1000 * MIB),
            f"{pod}/memory.stat": f"anon 1\ninactive_file {300 * MIB}\nactive_file {100 * MIB}\n",
        },
    )
    assert free_memory(root) == (2048 - 600) * MIB


def test_version_1_limits_count_too(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/abc"
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n",
            f"{group}/memory.limit_in_bytes": str(1024 * MIB),
            f"{group}/memory.usage_in_bytes": str(500 * MIB),
            f"{group}/memory.stat": f"total_inactive_file {100 * MIB}\ntotal_active_file 0\n",
        },
    )
    assert free_memory(root) == (1024 - 400) * MIB


def test_a_limit_already_exceeded_leaves_nothing(tmp_path: Path) -> None:
    files = {"memory.max": "1000", "memory.current": "5000"}
    group = {f"sys/fs/cgroup/g/{name}": text for name, text in files.items()}
    root = write(tmp_path, {**MEMINFO, "proc/self/cgroup": "0::/g\n", **group})
    assert free_memory(root) == 0


def test_this_machine_has_some(tmp_path: Path) -> None:
    assert free_memory() > 0


def test_threads_follow_the_environment_and_ranks_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = octavo_kernels.load("auto", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert [set_threads(ops, ranks) for ranks in (1, 2, 3, 8)] == [7, 3, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert set_threads(ops) == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert set_threads(ops) >= 1


def test_engines_of_one_machine_divide_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_ENGINES_HERE", raising=False)
    assert engines_here() == 1
    monkeypatch.setenv("OCTAVO_ENGINES_HERE", "4")
    assert cpu_cache_bytes(1000 * MIB, engines_here()) == cpu_cache_bytes(1000 * MIB) // 4


class Runtime:
    """CUDA's, of a system that locks up to ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.locked = limit, dict[int, int]()

    def cudaHostRegister(self, start: int, size: int, flags: int) -> torch._C._cudart.cudaError:
        if size > self.limit:
            return torch._C._cudart.cudaError(2)
        self.locked[start] = size
        return torch._C._cudart.cudaError.success

    def cudaHostUnregister(self, start: int) -> None:
        del self.locked[start]


def test_locked_memory_is_what_was_asked_for_and_let_go_of_with_the_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime(5000)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = torch.zeros(1100, dtype=torch.float32)
    page_lock(memory)
    assert runtime.locked == {memory.data_ptr(): 4400}
    del memory
    assert not runtime.locked
    with pytest.raises(ConfigError, match=r"5200 bytes of host memory.*out of memory.*--swap-space"):
        page_lock(torch.zeros(1300, dtype=torch.float32))
