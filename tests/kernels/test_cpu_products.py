"""The C++ matrix products equal the reference on any shape, on every instruction set this machine has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.bfloat16]
# Both sum up to 416 terms of size about K^-1/2 in float32, in another order. bfloat16 rounds the result to
# 8 bits; a gated product of two results may be one step of 2^-8 off.
EXACT = {"rtol": 1e-5, "atol": 2e-5}
ROUNDED = {"rtol": 2**-7, "atol": 2**-9}

rows = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 255, 256, 300]))
shapes = st.tuples(
    rows, st.integers(1, 130), st.one_of(st.integers(1, 300), st.sampled_from([32, 64, 288, 416]))
)
few = settings(max_examples=40, deadline=None)


def tensor(seed, *shape, dtype, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@few
@given(shape=shapes, dtype=st.sampled_from(DTYPES), bias=st.booleans(), seed=st.integers(0, 999))
def test_matmul_equals_the_reference(cpu, reference, shape, dtype, bias, seed):
    m, n, k = shape
    x, w = tensor(seed, m, k, dtype=dtype), tensor(seed + 1, n, k, dtype=dtype, scale=k**-0.5)
    b = tensor(seed + 2, n, dtype=dtype) if bias else None
    exact = x.double() @ w.double().T + (0 if b is None else b.double())
    packed = cpu.pack(w, dtype)
    torch.testing.assert_close(cpu.matmul(x, packed, bias=b, out_dtype=torch.float32), exact.float(), **EXACT)
    expected = reference.matmul(x, reference.pack(w, dtype), bias=b)
    torch.testing.assert_close(
        cpu.matmul(x, packed, bias=b), expected, **(EXACT if dtype == torch.float32 else ROUNDED)
    )


@few
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    seed=st.integers(0, 999),
)
def test_gate_up_equals_the_reference(cpu, reference, shape, dtype, activation, seed):
    m, n, k = shape
    x = tensor(seed, m, k, dtype=dtype)
    gate, up = (tensor(seed + i, n, k, dtype=dtype, scale=k**-0.5) for i in (1, 2))
    result = cpu.gate_up(x, cpu.pack_gate_up(gate, up, dtype), activation)
    pair = reference.pack_gate_up(gate.float(), up.float(), torch.float32)
    expected = reference.gate_up(x.float(), pair, activation).to(dtype)
    torch.testing.assert_close(result, expected, **(EXACT if dtype == torch.float32 else ROUNDED))


def test_a_product_reads_strided_rows_and_writes_only_its_own_columns(cpu):
    x = torch.randn(5, 100)[:, 10:50]
    w = torch.randn(33, 40)
    out = torch.full((5, 50), 7.0)
    cpu.matmul(x, cpu.pack(w, torch.float32), out=out[:, 8:41])
    torch.testing.assert_close(out[:, 8:41], x @ w.T, rtol=1e-5, atol=1e-4)
    assert (out[:, :8] == 7).all() and (out[:, 41:] == 7).all()


@few
@given(
    rows=st.integers(2, 40),
    row=st.integers(0, 39),
    n=st.integers(1, 70),
    k=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
)
def test_a_row_does_not_depend_on_the_batch_it_is_in(cpu, rows, row, n, k, dtype):
    row %= rows
    x = tensor(0, rows, k, dtype=dtype)
    packed = cpu.pack(tensor(1, n, k, dtype=dtype), dtype)
    together = cpu.matmul(x, packed, out_dtype=torch.float32)[row]
    assert torch.equal(together, cpu.matmul(x[row : row + 1], packed, out_dtype=torch.float32)[0])


@pytest.mark.parametrize("rows", [64, 100, 610])
@pytest.mark.parametrize("k", [200, 576, 1536])
def test_rows_of_a_long_prompt_equal_those_of_a_short_one(cpu, rows, k):
    x = tensor(0, rows, k, dtype=torch.bfloat16)
    gate, up = (tensor(i, 200, k, dtype=torch.bfloat16, scale=k**-0.5) for i in (1, 2))
    packed, pair = cpu.pack(gate, torch.bfloat16), cpu.pack_gate_up(gate, up, torch.bfloat16)
    product, gated = cpu.matmul(x, packed, out_dtype=torch.float32), cpu.gate_up(x, pair)
    for first in range(0, rows, 17):
        few = x[first : first + 17]
        assert torch.equal(product[first : first + 17], cpu.matmul(few, packed, out_dtype=torch.float32))
        assert torch.equal(gated[first : first + 17], cpu.gate_up(few, pair))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates_do_not_overflow(cpu, dtype):
    gates = torch.tensor([-1e30, -200.0, 200.0, -20.0, 0.0, 1e30])
    expected = torch.tensor([0.0, 0.0, 200.0, 0.0, 0.0, 1e30]).to(dtype)
    pair = cpu.pack_gate_up(torch.diag(gates), torch.ones(6, 6), dtype)
    for activation in ("silu", "gelu_tanh"):
        result = cpu.gate_up(torch.eye(6, dtype=dtype), pair, activation).diagonal()
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_reaches_the_result(cpu, dtype):
    x = torch.tensor([[float("nan"), 1.0], [1.0, 1.0]], dtype=dtype)
    pair = cpu.pack_gate_up(torch.ones(3, 2), torch.ones(3, 2), dtype)
    result = cpu.gate_up(x, pair)
    assert result[0].isnan().all() and not result[1].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_float16_weights_are_converted_when_packed(cpu, dtype):
    w = torch.randn(20, 24, dtype=torch.float16)
    x = torch.randn(2, 24).to(dtype)
    result = cpu.matmul(x, cpu.pack(w, dtype), out_dtype=torch.float32)
    torch.testing.assert_close(result, x.float() @ w.to(dtype).float().T, rtol=1e-5, atol=1e-5)


def test_activations_of_another_dtype_than_the_weight_are_refused(cpu):
    with pytest.raises(TypeError, match="bfloat16"):
        cpu.matmul(torch.randn(1, 8), cpu.pack(torch.randn(4, 8), torch.bfloat16))


@few
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 999))
def test_rows_of_a_packed_weight_are_what_was_packed(cpu, shape, dtype, seed):
    count, n, k = shape
    w = tensor(seed, n, k, dtype=dtype)
    ids = torch.randint(n, (count,), generator=torch.Generator().manual_seed(seed))
    out = torch.zeros(count, k + 3, dtype=dtype)
    cpu.lookup(cpu.pack(w, dtype), ids, out[:, :k])
    assert torch.equal(out[:, :k], w[ids])
    assert not out[:, k:].any()
