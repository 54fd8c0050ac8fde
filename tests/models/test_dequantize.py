"""Dequantisation equals the gguf package's, to the last bit, for every supported type."""

import gguf
import numpy as np
import pytest
import torch

from octavo.models.dequantize import DEQUANTIZERS, dequantize


@pytest.mark.parametrize("kind", sorted(DEQUANTIZERS))
def test_equals_the_gguf_package(kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    numbers, nbytes = gguf.GGML_QUANT_SIZES[quantisation]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (7, 1536 // numbers * nbytes), dtype=np.uint8)
    if kind not in ("F32", "F16", "BF16"):  # scales: any finite float16 (the quanta may be any bytes)
        scales = {"Q4_K": (0, 2), "Q4_1": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
        blocks = raw.reshape(-1, nbytes)
        for at in scales:
            blocks[:, at : at + 2] = rng.normal(0, 1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    expected = gguf.quants.dequantize(raw, quantisation).astype(np.float32)
    got = dequantize(torch.from_numpy(raw), kind).numpy()
    assert got.shape == (7, 1536)
    assert np.array_equal(got, expected, equal_nan=True)
