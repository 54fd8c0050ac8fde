"""The benchmark of the GPU's kernels: no part takes the others with it."""

import importlib.util
import sys
from pathlib import Path

import failing_parts
import pytest

from octavo_kernels import load

FILE = Path(__file__).parents[2] / "benchmarks/gpu.py"


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FILE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_parts_that_break_or_hang_say_so_and_the_others_are_measured(gpu):
    assert list(gpu.each(failing_parts.measure, failing_parts.COUNT, patience_s=10)) == [
        (0, 1.0, 0.0),
        "its process ended with status -6",
        (2, 1.0, 0.0),
        "RuntimeError: broken",
        "took longer than 10 s",
        (5, 1.0, 0.0),
        "its process ended with status 0",
    ]


def test_lines_show_the_share_of_their_own_limit(gpu):
    assert gpu.line("a", (1e-3, 2e9, 0), 4e12, 0).split() == ["a", "1000.0", "2000", "50%"]
    assert gpu.line("b", (1e-3, 0, 3e11), 4e12, 4e14).split() == ["b", "1000.0", "300", "75%"]
    assert gpu.line("c", (1e-3, 0, 3e11), 4e12, 0).split()[-1] == "?"
    assert gpu.line("d", "took too long", 1, 1).split() == ["d", "took", "too", "long"]


def test_every_part_makes_what_it_runs(gpu, monkeypatch):
    """On the CPU, by the reference kernels, with small tensors."""
    small = {"HIDDEN": 64, "INNER": 96, "HEADS": 2, "KV_HEADS": 1, "DIM": 16, "COPIED": 64, "SQUARE": 8}
    shapes = tuple(
        (min(queries, 4), 32, 2, window, dtype, room and 128)
        for queries, _, _, window, dtype, room in gpu.ATTENTION
    )
    for name, value in (small | {"ATTENTION": shapes, "TOKENS": (32,), "DEVICE": "cpu"}).items():
        monkeypatch.setattr(gpu, name, value)
    for make in gpu.parts().values():
        work = make(load("reference"))
        work.run()
        assert bool(work.bytes) != bool(work.operations)
