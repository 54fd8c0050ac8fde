"""GGUF weights that stay quantised: near the dequantised float32 model, and the same tokens in every mix."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from octavo.layers.linear import COLUMNS, Linear
from octavo.layers.weights import Checkpoint, Outputs, PlainFormat, QuantisedFormat, Weights
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import load_model_config
from octavo.prompt.assets import load_assets
from octavo.worker.loading import pick_place
from octavo_kernels import KernelsUnavailable, QuantisedWeight, load

TEXT = [  # the start of a licence, in SmolLM2's tokens
    504, 16571, 4791, 282, 260, 3279, 30, 4882, 28, 5119, 6252, 216, 34, 84, 3073, 338, 750, 3279, 29, 9562,
    13963, 1517, 355, 3252, 804, 411, 451, 1517, 1251, 325, 11457, 42, 585, 260, 3279, 1072, 441, 3577, 357,
]  # fmt: skip
PASSAGE = """The committee met twice in March to consider whether the old bridge should be repaired or
replaced. Engineers had found cracks in two of the piers, and the cost of repair, which had been put at
four million, was now thought to be nearer nine. "We can't go on patching it," said the mayor, who has
crossed it every day for thirty years. A new bridge would take three years to build, and for most of that
time the town would be cut in half. Shopkeepers on the east side fear that they would lose their
customers to the next town; those who live on the west side worry about ambulances."""
SETTINGS: dict[str, Any] = {
    "max_model_len": 512, "kv_cache_memory_bytes": "64Mi", "max_num_batched_tokens": 512,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cpp() -> None:
    try:
        load("cpu")
    except KernelsUnavailable as why:
        pytest.skip(str(why))


@pytest.fixture(params=["smollm2_gguf", "gemma3_gguf"])
def gguf(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def encode(path: Path, text: str) -> list[int]:
    return list(Tokenizer.from_str(load_assets(path).tokenizer_json).encode(text).ids)


def test_logits_are_near_those_of_the_dequantised_model(gguf, engine_of) -> None:
    """Each row's mean is taken off: no probability depends on it."""
    ids = encode(gguf, PASSAGE)
    exact, kept = (
        logits - logits.mean(dim=-1, keepdim=True)
        for logits in (engine_of(gguf, **SETTINGS, **dtype).logits(ids) for dtype in ({}, {"dtype": "auto"}))
    )
    assert (kept - exact).square().mean() < 0.05**2 * exact.square().mean()
    assert (kept.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9


def test_tokens_are_the_same_whatever_the_batch_and_the_chunks(gguf, engine_of, tokens) -> None:
    engine = engine_of(gguf, **SETTINGS, dtype="auto")
    batch = [TEXT, TEXT[:16], TEXT[:1], TEXT * 3]
    alone = [tokens(engine.generate([prompt], 12))[0] for prompt in batch]
    assert tokens(engine.generate(batch, 12)) == alone
    assert tokens(engine.again(batch, 12)) == alone
    for chunk in (5, 61):
        assert tokens(engine.generate(batch, 12, max_num_batched_tokens=chunk)) == alone


def test_only_auto_keeps_weights_quantised() -> None:
    assert isinstance(pick_place("cpu", "auto", "bfloat16").format, QuantisedFormat)
    for wanted in ("bfloat16", "float32", "float16"):
        assert isinstance(pick_place("cpu", wanted, "bfloat16").format, PlainFormat)
    assert isinstance(pick_place("cpu", "auto", "float32").format, PlainFormat)


def test_kept_tensors_hold_the_dequantised_numbers(gguf) -> None:
    with open_checkpoint(gguf, load_model_config(gguf)) as checkpoint:
        kept = 0
        for name in sorted(checkpoint.names()):
            if not name.startswith("model.layers.1."):
                continue
            weight, plain = checkpoint.read_quantised(name), checkpoint.read(name, torch.float32)
            if weight is None:
                assert plain.dim() == 1
                continue
            kept += 1
            torch.testing.assert_close(weight.dequantised(), plain, rtol=2**-10, atol=2e-4)
    assert kept == 7


def quantised(bits: int, rows: int, columns: int, seed: int) -> QuantisedWeight:
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(2**bits, (rows, columns), generator=random, dtype=torch.uint8)
    return QuantisedWeight(
        bits, 2 ** (bits - 1), values, torch.rand(rows, columns // 32, generator=random).half()
    )


class Stored(Checkpoint):
    where, norms_hold_offset = "memory", False

    def __init__(self, tensors: dict[str, QuantisedWeight | Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        stored = self.tensors[name]
        return (stored.dequantised() if isinstance(stored, QuantisedWeight) else stored).to(dtype)

    def read_quantised(self, name: str) -> QuantisedWeight | None:
        stored = self.tensors[name]
        return stored if isinstance(stored, QuantisedWeight) else None


def test_parts_of_different_types_stand_side_by_side_in_a_result() -> None:
    ops, x = load("cpu"), torch.randn(5, 64).bfloat16()
    stored: dict[str, QuantisedWeight | Tensor] = {
        "a.weight": quantised(4, 40, 64, 0),
        "b.weight": quantised(4, 24, 64, 1),
        "c.weight": quantised(8, 33, 64, 2),
        "d.weight": torch.randn(7, 64),
        **{f"{name}.bias": torch.randn(rows) for name, rows in (("a", 40), ("b", 24), ("c", 33), ("d", 7))},
    }
    weights = Weights(Stored(stored), torch.bfloat16, torch.device("cpu"), format=QuantisedFormat())
    parts = {"a": Outputs(40), "b": Outputs(24), "c": Outputs(33), "d": Outputs(7)}
    result = torch.empty(5, 104, dtype=torch.bfloat16)
    Linear(ops, weights, parts, 64, COLUMNS, bias=True)(x, result)
    expected = []
    for name in "abcd":
        weight, bias = stored[f"{name}.weight"], stored[f"{name}.bias"]
        assert isinstance(bias, Tensor)
        packed = ops.pack(weight, torch.bfloat16)
        expected.append(ops.matmul(x, packed, bias=bias.bfloat16()))
    assert torch.equal(result, torch.cat(expected, dim=1))
    weights.finish()


def test_gate_and_up_of_different_types_are_dequantised() -> None:
    ops, x = load("cpu"), torch.randn(3, 64).bfloat16()
    stored = Stored({"gate.weight": quantised(4, 40, 64, 0), "up.weight": quantised(8, 40, 64, 1)})
    weights = Weights(stored, torch.bfloat16, torch.device("cpu"), format=QuantisedFormat())
    pair = weights.format.pack_gate_up(ops, weights, "gate", "up", (40, 64))
    gate, up = (stored.read(f"{name}.weight", torch.bfloat16) for name in ("gate", "up"))
    plain = ops.pack_gate_up(gate, up, torch.bfloat16)
    assert torch.equal(ops.gate_up(x, pair), ops.gate_up(x, plain))


def share_of(stored: Stored, rank: int) -> Weights:
    """What one of two ranks reads."""
    communicator: Any = SimpleNamespace(rank=rank, world=2)
    return Weights(stored, torch.bfloat16, torch.device("cpu"), communicator=communicator)


@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_hold_equal_shares_of_a_quantised_weight(dim) -> None:
    whole = quantised(5, 64, 128, 0)
    shares = [share_of(Stored({"w": whole}), rank).quantised("w", (64, 128), dim) for rank in range(2)]
    assert torch.equal(
        torch.cat([s.dequantised() for s in shares if s is not None], dim), whole.dequantised()
    )


def test_a_cut_through_a_group_is_not_kept() -> None:
    stored = Stored({"w": quantised(5, 64, 96, 0)})
    assert share_of(stored, 0).quantised("w", (64, 96), 1) is None
