"""The names of blocks: equal everywhere, different whenever anything before or in the block differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import HASH_ALGOS
from octavo.core.block_hash import BlockHasher
from octavo.errors import ConfigError, InvalidRequest

# Made by a CBOR library (cbor2, canonical=True) and hashlib / xxhash, not by the code under test.
VECTORS = json.loads(Path(__file__).with_name("block_hash_vectors.json").read_text())
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
algos = st.sampled_from(HASH_ALGOS)


@pytest.mark.parametrize("case", VECTORS["cases"])
def test_names_equal_the_golden_vectors(case):
    hasher = BlockHasher(case["algo"], case["block_size"])
    assert hasher.root.hex() == VECTORS["roots"][case["algo"]]
    names = hasher.hash_blocks(case["token_ids"], case["cache_salt"], adapter=case["adapter"])
    assert [name.hex() for name in names] == case["names"]


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_another_process_with_another_hash_seed_agrees(seed):
    code = (
        "from octavo.core.block_hash import *; print(BlockHasher('sha256', 4).hash_blocks(range(8))[1].hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": seed}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert out.stdout.strip() == VECTORS["cases"][0]["names"][-1]


@given(
    algos,
    tokens,
    st.integers(1, 9),
    st.integers(0, 10),
    st.none() | st.text(max_size=4),
    st.none() | st.text(max_size=4),
)
def test_hashing_in_parts_equals_hashing_at_once(algo, ids, block_size, cut, salt, adapter):
    hasher = BlockHasher(algo, block_size)
    whole = hasher.hash_blocks(ids, salt, adapter=adapter)
    assert len(whole) == len(ids) // block_size
    head = whole[:cut]
    rest = ids[len(head) * block_size :]
    parent = head[-1] if head else None
    assert head + hasher.hash_blocks(rest, salt, parent, adapter=adapter) == whole


@given(algos, tokens, tokens, st.integers(1, 9))
def test_names_are_equal_up_to_the_first_differing_block_and_never_after(algo, one, two, block_size):
    hasher = BlockHasher(algo, block_size)
    names_one, names_two = hasher.hash_blocks(one), hasher.hash_blocks(two)
    for index, (a, b) in enumerate(zip(names_one, names_two, strict=False)):
        end = (index + 1) * block_size
        assert (a == b) == (one[:end] == two[:end])


@given(algos, st.text(max_size=6), st.text(max_size=6))
def test_a_salt_never_equals_an_adapter(algo, salt, adapter):
    hasher = BlockHasher(algo, 2)
    ids = [1, 2, 3, 4]
    plain, salted = hasher.hash_blocks(ids), hasher.hash_blocks(ids, salt)
    adapted, both = hasher.hash_blocks(ids, adapter=adapter), hasher.hash_blocks(ids, salt, adapter=adapter)
    seen = [*plain, *salted, *adapted, *both]
    assert len(set(seen)) == len(seen)


def test_shared_tokens_give_whole_blocks_only():
    hasher = BlockHasher("sha256", 16)
    assert [len(hasher.hash_blocks(range(n))) for n in (0, 15, 16, 31, 32, 47)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5])
def test_a_token_that_is_no_id_is_refused_by_value(wrong):
    with pytest.raises(InvalidRequest, match=r"token id .* out of range"):
        BlockHasher("sha256", 2).hash_blocks([7, wrong])


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"md5.*sha256, sha256_cbor, xxhash, xxhash_cbor"):
        BlockHasher("md5", 16)


def test_a_salt_that_is_no_unicode_is_refused():
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        BlockHasher("sha256", 2).hash_blocks([1, 2], "\ud800")
