"""Tests of the Triton kernels in Triton's interpreter, on CPU tensors: test_triton_interpreted.py runs them.

The interpreter replaces Triton's own functions as they are imported, so these tests need a process of their
own with TRITON_INTERPRET=1, and are not collected in any other.
"""

import os

import pytest

from octavo_kernels import load

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def ops():
    from octavo_kernels.triton.backend import TritonOps

    return TritonOps()


@pytest.fixture(scope="session")
def reference():
    return load("reference")
