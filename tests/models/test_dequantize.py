"""Dequantisation equals the gguf package's, to the last bit, for every supported type."""

import gguf
import numpy as np
import pytest
import torch

from octavo.models.dequantize import BLOCKS, SUPPORTED, dequantize, keep


@pytest.mark.parametrize("kind", SUPPORTED)
def test_equals_the_gguf_package(kind: str) -> None:
    raw = random_blocks(kind)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    got = dequantize(torch.from_numpy(raw), kind).numpy()
    assert got.shape == (7, 1536)
    assert np.array_equal(got, expected, equal_nan=True)


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_is_kept_is_the_same_but_for_the_rounding_of_scales(kind: str) -> None:
    raw = torch.from_numpy(random_blocks(kind))
    expected, kept = dequantize(raw, kind), keep(raw, kind)
    assert kept is not None
    assert kept.shape == (7, 1536)
    rounding = 2**-11 if kind.endswith("_K") else 0.0
    if kept.minima is None:
        largest = expected.abs()
    else:
        minima = kept.minima.float().repeat_interleave(32, dim=1)
        largest = minima.abs() + (expected - minima).abs()
    assert ((kept.dequantised() - expected).abs() <= largest * rounding * 1.01).all()


def test_a_scale_beyond_float16_is_not_kept() -> None:
    raw = torch.from_numpy(random_blocks("Q4_K"))
    raw[0, :2] = torch.tensor([60000.0], dtype=torch.float16).view(torch.uint8)
    assert keep(raw, "Q4_K") is None


def random_blocks(kind: str) -> np.ndarray:
    """Rows of 1536 numbers: any bytes, but for finite scales."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (7, 1536 // numbers * nbytes), dtype=np.uint8)
    if kind not in ("F32", "F16", "BF16"):  # scales: any finite float16 (the quanta may be any bytes)
        scales = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
        blocks = raw.reshape(-1, nbytes)
        for at in scales:
            blocks[:, at : at + 2] = rng.normal(0, 1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return raw
