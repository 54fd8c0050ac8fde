"""The table that a user prints of their own machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from octavo_kernels.cpu.library import INSTRUCTION_SETS, LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the C++ kernels are not built")
COMMAND = [sys.executable, "-m", "octavo_kernels.bench", "--layers=1", "--rounds=1"]


@pytest.mark.parametrize("part", ["products", "attention", "step"])
def test_it_names_the_limit_that_binds(part: str) -> None:
    done = subprocess.run([*COMMAND, f"--only={part}"], capture_output=True, text=True, check=True)
    head, *rows = done.stdout.splitlines()
    assert head.partition(",")[0] in INSTRUCTION_SETS
    assert len(rows) > 3
    assert all(" of the read limit" in row or " of the peak" in row for row in rows[1:])


def test_without_the_kernels_it_says_so_in_one_line() -> None:
    wrong = {**os.environ, "OCTAVO_KERNELS_ISA": "sse"}
    done = subprocess.run(COMMAND, env=wrong, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "one of amx, avx512, avx2" in done.stderr


@pytest.mark.parametrize("option", ["--rounds=0", "--layers=-1", "--threads=two"])
def test_a_number_of_nothing_is_refused(option: str) -> None:
    done = subprocess.run([*COMMAND, option], capture_output=True, text=True)
    assert done.returncode == 2
    assert option.partition("=")[2] in done.stderr and "from 1 on" in done.stderr
