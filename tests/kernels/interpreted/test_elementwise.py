"""Triton's norms, rotary embedding and gated activations equal the reference, on views and in place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_kernels import QuantisedWeight

few = settings(max_examples=15, deadline=None)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
# float32: the same formula in another order. Half precision: one step of the dtype's last place, relative.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6},
    torch.float16: {"rtol": 2**-10, "atol": 1e-6},
}


def view(seed, tokens, heads, dim, dtype):
    """Heads of a wider row, as q and k are of a qkv product."""
    wide = torch.randn(tokens, heads + 3, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return wide[:, 1 : heads + 1]


@few
@given(tokens=st.integers(1, 20), dim=st.integers(1, 2100), dtype=dtypes, seed=st.integers(0, 999))
def test_norms_equal_the_reference(ops, reference, tokens, dim, dtype, seed):
    x, residual = view(seed, tokens, 1, dim, dtype)[:, 0], view(seed + 1, tokens, 1, dim, dtype)[:, 0]
    weight = view(seed + 2, 1, 1, dim, dtype)[0, 0]
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **TOLERANCE[dtype]
    )
    # The interpreter cuts bfloat16 off where torch rounds: the norm is compared on the kernel's own sums.
    sums = residual.clone()
    normed = ops.add_rms_norm(x, sums, weight, 1e-6)
    torch.testing.assert_close(sums, residual + x, **TOLERANCE[dtype])
    torch.testing.assert_close(normed, reference.rms_norm(sums, weight, 1e-6), **TOLERANCE[dtype])


@few
@given(tokens=st.integers(1, 20), heads=st.integers(1, 9), dim=st.integers(1, 260), dtype=dtypes)
def test_a_norm_of_each_head_works_in_place(ops, reference, tokens, heads, dim, dtype):
    x = view(0, tokens, heads, dim, dtype)
    weight = view(1, 1, 1, dim, dtype)[0, 0]
    expected = reference.rms_norm(x, weight, 1e-6)
    assert ops.rms_norm(x, weight, 1e-6, out=x) is x
    torch.testing.assert_close(x, expected, **TOLERANCE[dtype])


@few
@given(
    tokens=st.integers(1, 4),
    heads=st.sampled_from([1, 3, 9, 32, 40]),
    kv_heads=st.integers(1, 9),
    half=st.sampled_from([6, 32, 40, 64, 128]),
    dtype=dtypes,
)
def test_rotary_equals_the_reference(ops, reference, tokens, heads, kv_heads, half, dtype):
    q, k = view(0, tokens, heads, 2 * half, dtype), view(1, tokens, kv_heads, 2 * half, dtype)
    angles = torch.rand(50, half) * 6
    positions = torch.randint(0, 50, (tokens,))
    expected = [q.clone(), k.clone()]
    reference.rotary(*expected, angles.cos(), angles.sin(), positions)
    ops.rotary(q, k, angles.cos(), angles.sin(), positions)
    for result, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(result, wanted, **TOLERANCE[dtype])


@few
@given(
    tokens=st.integers(1, 9),
    dim=st.sampled_from([1, 70, 96, 1536, 2048, 2500]),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    dtype=dtypes,
)
def test_gated_activations_equal_the_reference(ops, reference, tokens, dim, activation, dtype):
    torch.manual_seed(dim)
    x, gate, up = (torch.randn(n, 16).to(dtype) for n in (tokens, dim, dim))
    packed = ops.pack_gate_up(gate, up, dtype)
    expected = reference.gate_up(x, reference.pack_gate_up(gate, up, dtype), activation)
    out = torch.full((tokens, dim + 5), 7.0, dtype=dtype)
    assert ops.gate_up(x, packed, activation, out[:, :dim]).data_ptr() == out.data_ptr()
    # Far below zero torch's GELU, by 1 + tanh, is exactly 0; by the sigmoid it is some 1e-7 of its argument.
    torch.testing.assert_close(out[:, :dim], expected, **{**TOLERANCE[dtype], "atol": 1e-5})
    assert (out[:, dim:] == 7).all()


def test_an_unknown_activation_is_refused(ops):
    packed = ops.pack_gate_up(torch.ones(4, 4), torch.ones(4, 4), torch.float32)
    with pytest.raises(ValueError, match="'relu' is not one of silu, gelu_tanh"):
        ops.gate_up(torch.ones(1, 4), packed, "relu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_products_equal_the_reference_in_a_given_place(ops, reference, dtype, bias, out_dtype):
    torch.manual_seed(0)
    x, w = torch.randn(5, 30).to(dtype), torch.randn(12, 30).to(dtype)
    b = torch.randn(12).to(dtype) if bias else None
    packed = ops.pack(w, dtype)
    expected = reference.matmul(
        x.float(), reference.pack(w, torch.float32), bias=None if b is None else b.float()
    )
    out = torch.empty(5, 12, dtype=out_dtype or dtype)
    assert ops.matmul(x, packed, out, b, out_dtype) is out
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(ops.matmul(x, packed, None, b, out_dtype), out)
    rows = torch.tensor([3, 11, 3])
    assert torch.equal(ops.lookup(packed, rows, torch.empty(3, 30, dtype=dtype)), w[rows])


def test_quantised_weights_are_refused(ops):
    values = torch.zeros(4, 32, dtype=torch.uint8)
    weight = QuantisedWeight(4, 8, values, torch.ones(4, 1).half())
    for pack in (ops.pack, lambda one, dtype: ops.pack_gate_up(one, one, dtype)):
        with pytest.raises(TypeError, match="no quantised weights"):
            pack(weight, torch.bfloat16)
