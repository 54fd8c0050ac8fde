"""Layers share pages of one size: each has its place, and none shares it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.kv_layout import MAX_GROUPS, KVSpec, kv_layout


def windows(full_every, layers, window=512):
    """A model in which each ``full_every``-th layer sees everything."""
    return [None if (layer + 1) % full_every == 0 else window for layer in range(layers)]


@pytest.mark.parametrize(
    ("layers", "groups", "layers_per_group"),
    [
        ([None] * 30, 1, 30),
        ([512] * 30, 1, 30),
        (windows(6, 18), 6, 3),  # Gemma 3 270M
        (windows(6, 26), 7, 4),  # 1B
        (windows(6, 34), 7, 5),  # 4B
        (windows(6, 48), 6, 8),  # 12B
        (windows(6, 62), 7, 10),  # 27B: 10 full, 52 with a window
        (windows(2, 24), 2, 12),  # gpt-oss
        ([None] * 13 + [64] * 12, 2, 13),
        ([None], 1, 1),
    ],
)
def test_known_models_get_few_groups_and_no_padding_of_full_layers(layers, groups, layers_per_group):
    layout = kv_layout(layers)
    assert (len(layout.groups), layout.layers_per_group) == (groups, layers_per_group)
    full = [spec for spec in layout.groups if spec.kind == "full"]
    assert layout.groups[: len(full)] == tuple(full)
    assert len(full) * layers_per_group == layers.count(None)


def test_gemma_3_270m_is_one_full_group_and_five_with_a_window():
    layout = kv_layout(windows(6, 18))
    assert layout.groups == (KVSpec(), *[KVSpec("sliding_window", 512)] * 5)
    assert [layout.layers[layer] for layer in (5, 11, 17)] == [(0, 0), (0, 1), (0, 2)]
    assert [layout.layers[layer] for layer in (0, 1, 2, 3, 4, 6)] == [
        (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)
    ]  # fmt: skip


@given(st.lists(st.sampled_from([None, None, 8, 512]), min_size=1, max_size=120))
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_rule(layers):
    layout = kv_layout(layers)
    assert len(set(layout.layers)) == len(layers)
    assert len(layout.groups) <= max(MAX_GROUPS, len(set(layers)))
    for window, (group, slot) in zip(layers, layout.layers, strict=True):
        assert layout.groups[group].window == window and slot < layout.layers_per_group


def test_a_model_without_attention_and_a_window_without_its_kind_are_refused():
    with pytest.raises(ValueError, match="without attention"):
        kv_layout([])
    for wrong in (("full", 4), ("sliding_window", None), ("sliding_window", 0), ("state", 3)):
        with pytest.raises(ValueError, match=repr(wrong[0])):
            KVSpec(*wrong)


def test_the_first_position_kept_is_the_first_that_the_next_token_sees():
    assert [KVSpec("sliding_window", 3).first_kept(p) for p in (0, 2, 3, 10)] == [0, 0, 1, 8]
    assert [KVSpec("sliding_window", 1).first_kept(p) for p in (0, 10)] == [0, 10]
    assert KVSpec().first_kept(10) == 0 and KVSpec("state").first_kept(10) == 9
