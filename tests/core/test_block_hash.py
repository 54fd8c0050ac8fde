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
from octavo.core.block_hash import BlockHasher, block_extras
from octavo.core.outputs import Feature
from octavo.errors import ConfigError, InvalidRequest

# Made by a CBOR library (cbor2, canonical=True) and hashlib / xxhash, not by the code under test.
VECTORS = json.loads(Path(__file__).with_name("block_hash_vectors.json").read_text())
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
algos = st.sampled_from(HASH_ALGOS)
images = st.lists(st.builds(Feature, st.text(max_size=3), st.integers(0, 40), st.integers(1, 20)), max_size=3)


@pytest.mark.parametrize("case", VECTORS["cases"])
def test_names_equal_the_golden_vectors(case):
    hasher = BlockHasher(case["algo"], case["block_size"])
    assert hasher.root.hex() == VECTORS["roots"][case["algo"]]
    features = [Feature(*feature) for feature in case.get("features", ())]
    names = hasher.hash_blocks(
        case["token_ids"], case["cache_salt"], adapter=case["adapter"], features=features
    )
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
    images,
)
def test_hashing_in_parts_equals_hashing_at_once(algo, ids, block_size, cut, salt, adapter, features):
    hasher = BlockHasher(algo, block_size)
    keys = {"adapter": adapter, "features": features}
    whole = hasher.hash_blocks(ids, salt, **keys)
    assert len(whole) == len(ids) // block_size
    head = whole[:cut]
    start = len(head) * block_size
    parent = head[-1] if head else None
    assert head + hasher.hash_blocks(ids[start:], salt, parent, start=start, **keys) == whole


@given(algos, tokens, tokens, st.integers(1, 9))
def test_names_are_equal_up_to_the_first_differing_block_and_never_after(algo, one, two, block_size):
    hasher = BlockHasher(algo, block_size)
    names_one, names_two = hasher.hash_blocks(one), hasher.hash_blocks(two)
    for index, (a, b) in enumerate(zip(names_one, names_two, strict=False)):
        end = (index + 1) * block_size
        assert (a == b) == (one[:end] == two[:end])


@given(algos, st.text(max_size=6), st.text(max_size=6))
def test_a_salt_never_equals_an_adapter_and_neither_a_feature(algo, text, other):
    hasher = BlockHasher(algo, 2)
    ids, image = [1, 2, 3, 4], [Feature(text, 0, 4)]
    keys = [{}, {"adapter": text}, {"features": image}, {"adapter": text, "features": image}]
    salts = [None, text] if text == other else [None, text, other]
    seen = [name for each in keys for salt in salts for name in hasher.hash_blocks(ids, salt, **each)]
    assert len(set(seen)) == len(seen)


def test_a_feature_counts_on_the_blocks_that_it_covers_and_by_where_it_begins():
    hasher, ids = BlockHasher("sha256", 4), list(range(16))

    def names(*features):
        return hasher.hash_blocks(ids, features=[Feature(*feature) for feature in features])

    plain, image = hasher.hash_blocks(ids), names(("a", 5, 3))
    assert image[0] == plain[0] and not set(image[1:]) & set(plain)
    assert not set(image[1:]) & set(names(("b", 5, 3))) and not set(image[1:]) & set(names(("a", 6, 2)))
    assert names(("a", 5, 3), ("b", 12, 1))[:3] == image[:3] and names(("a", 5, 3), ("b", 16, 9)) == image
    assert names(("b", 2, 1), ("a", 1, 1)) == names(("a", 1, 1), ("b", 2, 1))
    extras = [block_extras(start, start + 4, "s", "x", [Feature("a", 3, 6)]) for start in (0, 4, 8, 12)]
    every = ((1, "x"), (2, (("a", 3),)))
    assert extras == [(*every, (3, "s")), every, every, every[:1]]


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
