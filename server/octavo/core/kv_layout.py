"""How the layers of a model share one pool of equal pages.

Layers that keep K/V by the same rule (all tokens; a window of so many) are cut into groups of
``layers_per_group`` layers each, the last of a rule padded. A group has a block table of its own, and a page
holds one block of every layer of one group: so a page has the same size whichever group takes it, and one
pool serves all. Cache tensor ``slot`` holds layer number ``slot`` of every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

MAX_GROUPS = 8  # each costs every sequence a block table, and the scheduler a look at it in every step


class KVSpec(msgspec.Struct, frozen=True):
    """One group of layers whose K/V is kept by one rule and found through one block table.

    ``full`` keeps every token of a sequence. ``sliding_window`` keeps what the next token may look at: itself
    and the ``window - 1`` before it. ``state`` (linear attention) keeps one block, the state after the last
    token computed; its block table has that one entry, and the forward pass overwrites it.
    """

    kind: Literal["full", "sliding_window", "state"] = "full"
    window: int | None = None

    def __post_init__(self) -> None:
        if (self.kind == "sliding_window") != (self.window is not None and self.window > 0):
            raise ValueError(f"a KV group of kind {self.kind!r} with the window {self.window!r}")

    def first_kept(self, position: int) -> int:
        """The first position whose K/V is needed to compute the token at ``position``."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return max(0, position - 1) if self.kind == "state" else 0


class KVLayout(msgspec.Struct, frozen=True):
    """``layers[i]`` is (group, slot) of layer i; a page holds ``layers_per_group`` layers."""

    groups: tuple[KVSpec, ...]
    layers_per_group: int
    layers: tuple[tuple[int, int], ...]


def kv_layout(windows: Sequence[int | None]) -> KVLayout:
    """The groups of a model from the window of each of its layers, None where a layer sees everything.

    Groups of full layers come first. They are what a long context fills, so the size of a group is chosen to
    pad them least, then the others, then to have few groups, at most ``MAX_GROUPS``.
    """
    if not windows:
        raise ValueError("a model without attention layers has no KV layout")
    kinds: dict[int | None, list[int]] = {None: []} if None in windows else {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]

    def cost(size: int) -> tuple[int, int, int, int]:
        groups = [-(-count // size) for count in counts]
        padding = [group * size - count for group, count in zip(groups, counts, strict=True)]
        full = padding[0] if None in kinds else 0
        return max(0, sum(groups) - max(MAX_GROUPS, len(counts))), full, sum(padding), sum(groups)

    size = min(range(1, max(counts) + 1), key=cost)
    specs: list[KVSpec] = []
    places: dict[int, tuple[int, int]] = {}
    for window, layers in kinds.items():
        for index, layer in enumerate(layers):
            places[layer] = (len(specs) + index // size, index % size)
        spec = KVSpec() if window is None else KVSpec("sliding_window", window)
        specs += [spec] * -(-len(layers) // size)
    return KVLayout(tuple(specs), size, tuple(places[layer] for layer in range(len(windows))))


def blocks_needed(groups: Sequence[KVSpec], num_tokens: int, block_size: int, max_chunk: int) -> int:
    """Blocks that one sequence holds at most, over all groups, while it computes so many tokens in steps of
    up to ``max_chunk``.
    """
    whole = -(-num_tokens // block_size)
    needed = 0
    for spec in groups:
        if spec.kind == "state":
            needed += 2  # a state that is kept as a snapshot, and the copy that goes on
        elif spec.window is not None:  # a window and a chunk, which may begin and end amid a block
            needed += min(whole, -(-(spec.window + max_chunk - 2) // block_size) + 1)
        else:
            needed += whole
    return needed
