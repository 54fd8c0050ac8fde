"""Products with quantised weights equal the reference's, on any shape, layout and instruction set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_kernels import QuantisedWeight

LAYOUTS = [(4, 8, False), (4, 0, True), (5, 16, False), (5, 0, True), (6, 32, False), (8, 128, False)]
# The same integers and scales on both sides: only float32 sums of K / 32 groups differ in their rounding.
EXACT = {"rtol": 1e-5, "atol": 2e-5}
ROUNDED = {"rtol": 2**-7, "atol": 2**-9}

rows = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 255, 256, 300]))
# The last ones leave each task of a product several panels, which one row takes in twos.
columns = st.one_of(st.integers(1, 130), st.sampled_from([640, 1130]))
shapes = st.tuples(rows, columns, st.sampled_from([32, 64, 96, 256, 288, 416]))
few = settings(max_examples=40, deadline=None)


def activations(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weight(seed, n, k, layout):
    """Any values, and scales that make the weight about K^-1/2 in size."""
    bits, zero, minima = layout
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(2**bits, (n, k), generator=random, dtype=torch.uint8)
    size = 2.0 ** (1 - bits) * k**-0.5

    def floats(*shape, scale):
        return (torch.randn(*shape, generator=random) * scale).half()

    return QuantisedWeight(
        bits,
        zero,
        values,
        floats(n, k // (16 if bits == 6 else 32), scale=size),
        floats(n, k // 32, scale=k**-0.5) if minima else None,
    )


@few
@given(shape=shapes, layout=st.sampled_from(LAYOUTS), bias=st.booleans(), seed=st.integers(0, 999))
def test_matmul_equals_the_reference(cpu, reference, shape, layout, bias, seed):
    m, n, k = shape
    x, w = activations(seed, m, k), weight(seed, n, k, layout)
    b = activations(seed + 2, n) if bias else None
    packed, expected = cpu.pack(w, x.dtype), reference.pack(w, x.dtype)
    exact = {"bias": b, "out_dtype": torch.float32}
    torch.testing.assert_close(
        cpu.matmul(x, packed, **exact), reference.matmul(x, expected, **exact), **EXACT
    )
    torch.testing.assert_close(
        cpu.matmul(x, packed, bias=b), reference.matmul(x, expected, bias=b), **ROUNDED
    )


@few
@given(
    shape=shapes,
    layout=st.sampled_from(LAYOUTS),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    seed=st.integers(0, 999),
)
def test_gate_up_equals_the_reference(cpu, reference, shape, layout, activation, seed):
    m, n, k = shape
    x = activations(seed, m, k)
    gate, up = (weight(seed + i, n, k, layout) for i in (1, 2))
    result = cpu.gate_up(x, cpu.pack_gate_up(gate, up, x.dtype), activation)
    expected = reference.gate_up(x, reference.pack_gate_up(gate, up, x.dtype), activation)
    torch.testing.assert_close(result, expected, **ROUNDED)


@few
@given(
    rows=st.integers(2, 40),
    row=st.integers(0, 39),
    n=columns,
    k=st.sampled_from([32, 160, 288]),
    layout=st.sampled_from(LAYOUTS),
)
def test_a_row_does_not_depend_on_the_batch_it_is_in(cpu, rows, row, n, k, layout):
    row %= rows
    x = activations(0, rows, k)
    packed = cpu.pack(weight(1, n, k, layout), x.dtype)
    together = cpu.matmul(x, packed, out_dtype=torch.float32)[row]
    assert torch.equal(together, cpu.matmul(x[row : row + 1], packed, out_dtype=torch.float32)[0])


@few
@given(shape=shapes, layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 999))
def test_rows_of_a_packed_weight_come_dequantised(cpu, shape, layout, seed):
    count, n, k = shape
    w = weight(seed, n, k, layout)
    ids = torch.randint(n, (count,), generator=torch.Generator().manual_seed(seed))
    out = torch.zeros(count, k + 3, dtype=torch.bfloat16)
    cpu.lookup(cpu.pack(w, torch.bfloat16), ids, out[:, :k])
    assert torch.equal(out[:, :k], w.dequantised().bfloat16()[ids])
    assert not out[:, k:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_product_is_near_that_of_the_floats(cpu, layout):
    """Rounding activations to 8 bits costs about 0.7 % of the result, whatever the weight's type."""
    x, w = activations(0, 50, 576), weight(1, 200, 576, layout)
    exact = x.double() @ w.dequantised().double().T
    error = cpu.matmul(x, cpu.pack(w, x.dtype), out_dtype=torch.float32) - exact
    assert error.square().mean().sqrt() < 0.01 * exact.square().mean().sqrt()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_largest_values_do_not_overflow(cpu, reference, layout):
    n, k = 33, 64
    w = weight(0, n, k, layout)
    w.values[:] = 2 ** layout[0] - 1
    w.values[::2] = 0
    x = torch.ones(3, k, dtype=torch.bfloat16)
    x[1], x[2] = -1, 0
    result, expected = (
        ops.matmul(x, ops.pack(w, x.dtype), out_dtype=torch.float32) for ops in (cpu, reference)
    )
    torch.testing.assert_close(result, expected, **EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_reaches_its_own_row_alone(cpu, layout):
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[1, 40] = float("nan")
    result = cpu.matmul(x, cpu.pack(weight(0, 40, 64, layout), x.dtype))
    assert result[1].isnan().all() and not result[[0, 2]].isnan().any()


def test_a_product_reads_strided_rows_and_writes_only_its_own_columns(cpu, reference):
    x, w = activations(0, 5, 100), weight(1, 33, 64, (4, 0, True))
    out = torch.full((5, 50), 7.0, dtype=torch.bfloat16)
    cpu.matmul(x[:, 10:74], cpu.pack(w, x.dtype), out=out[:, 8:41])
    expected = reference.matmul(x[:, 10:74].contiguous(), reference.pack(w, x.dtype))
    torch.testing.assert_close(out[:, 8:41], expected, **ROUNDED)
    assert (out[:, :8] == 7).all() and (out[:, 41:] == 7).all()


def test_what_cannot_be_kept_is_refused(cpu):
    four, eight = weight(0, 4, 64, (4, 8, False)), weight(0, 4, 64, (8, 128, False))
    with pytest.raises(ValueError, match="multiply quantised weights with bfloat16"):
        cpu.pack(four, torch.float32)
    with pytest.raises(ValueError, match="differ in layout"):
        cpu.pack_gate_up(four, eight, torch.bfloat16)
    with pytest.raises(TypeError, match="both quantised, or neither"):
        cpu.pack_gate_up(four, torch.zeros(4, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="multiples of 32, not 48"):
        weight(0, 4, 48, (4, 8, False))
    with pytest.raises(ValueError, match="8 bits with minima"):
        weight(0, 4, 64, (8, 0, True))
