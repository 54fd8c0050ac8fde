"""The C++ norms and rotary embedding equal the reference, in place and on strided views."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

few = settings(max_examples=40, deadline=None)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
# float32: the same formula in another order of summation. bfloat16: one rounding step of 2^-8, relative.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6}}


def view(seed, tokens, heads, dim, dtype, gap=3):
    """Heads of a wider row, as q and k are of a qkv product."""
    wide = torch.randn(tokens, heads + gap, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return wide[:, 1 : heads + 1]


@few
@given(tokens=st.integers(1, 40), dim=st.integers(1, 300), dtype=dtypes, seed=st.integers(0, 999))
def test_norms_equal_the_reference(cpu, reference, tokens, dim, dtype, seed):
    x, residual = view(seed, tokens, 1, dim, dtype)[:, 0], view(seed + 1, tokens, 1, dim, dtype)[:, 0]
    weight = torch.randn(dim).to(dtype)
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5), expected, **TOLERANCE[dtype])
    sums = residual.clone()
    expected = reference.add_rms_norm(x, sums, weight, 1e-6)
    torch.testing.assert_close(cpu.add_rms_norm(x, residual, weight, 1e-6), expected, **TOLERANCE[dtype])
    assert torch.equal(residual, sums)


@few
@given(tokens=st.integers(1, 20), heads=st.integers(1, 5), dim=st.integers(1, 80), dtype=dtypes)
def test_a_norm_of_each_head_works_in_place(cpu, reference, tokens, heads, dim, dtype):
    x = view(0, tokens, heads, dim, dtype)
    weight = torch.randn(dim).to(dtype)
    expected = reference.rms_norm(x, weight, 1e-6)
    assert cpu.rms_norm(x, weight, 1e-6, out=x) is x
    torch.testing.assert_close(x, expected, **TOLERANCE[dtype])


@few
@given(
    tokens=st.integers(1, 20),
    heads=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 70),
    dtype=dtypes,
)
def test_rotary_equals_the_reference(cpu, reference, tokens, heads, kv_heads, half, dtype):
    q, k = view(0, tokens, heads, 2 * half, dtype), view(1, tokens, kv_heads, 2 * half, dtype)
    angles = torch.rand(50, half) * 6
    positions = torch.randint(0, 50, (tokens,))
    expected_q, expected_k = q.clone(), k.clone()
    reference.rotary(expected_q, expected_k, angles.cos(), angles.sin(), positions)
    cpu.rotary(q, k, angles.cos(), angles.sin(), positions)
    torch.testing.assert_close(q, expected_q, **TOLERANCE[dtype])
    torch.testing.assert_close(k, expected_k, **TOLERANCE[dtype])
