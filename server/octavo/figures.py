"""Figures of a run, for people: spreads, a table of two columns, a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    return _at(sorted(values), share)


def spread(values: Sequence[float], shares: Sequence[float] = (0.5, 0.9, 0.99)) -> dict[str, float]:
    """Mean and percentiles (``p50`` and so on); empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    named = {f"p{100 * share:g}": _at(ordered, share) for share in shares}
    return {"mean": sum(ordered) / len(ordered), **named}


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def text(values: dict[str, Any]) -> str:
    """The figures as a table of two columns."""
    return "\n".join(f"{name:<32} {_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_shown(one)}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def picture(rows: int, columns: int) -> tuple[Any, Any]:
    """A matplotlib figure and its axes. Raises ``ConfigError`` without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'octavo[simulate]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(5.5 * columns, 3.5 * rows), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a picture. Raises ``ConfigError``."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}") from error
