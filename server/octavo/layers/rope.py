"""What a rotary embedding is, without torch: a base and how it is scaled."""

from __future__ import annotations

import dataclasses

ROPE_KINDS = ("default", "linear", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """One rotary base and how it is scaled. The last three fields matter to ``llama3`` only."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
