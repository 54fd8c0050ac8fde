"""Tests that need a GPU; elsewhere they are skipped and say so."""

import pytest
import torch

from octavo_kernels import load


@pytest.fixture(scope="session")
def ops():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm GPU, and torch finds none here")
    return load("triton", "cuda")


@pytest.fixture(scope="session")
def reference():
    return load("reference")
