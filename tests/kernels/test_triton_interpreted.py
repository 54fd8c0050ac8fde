"""The Triton kernels, run by Triton's interpreter on CPU tensors, do what the reference does."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")

FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.fixture(scope="module")
def results():
    """What pytest says of each file, in a process of its own; two at a time, since each uses one core."""

    def run(file):
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        yield dict(zip(FILES, pool.map(run, FILES), strict=True))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(results, file):
    done = results[file]
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
