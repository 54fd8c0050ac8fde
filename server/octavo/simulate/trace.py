"""Arrival traces: read from a file, or drawn.

A file is JSON lines with ``timestamp`` (milliseconds), ``input_length``, ``output_length`` and, where
prompts share prefixes, ``hash_ids`` (one for each 512 tokens), the form of the Mooncake traces; or CSV with
the columns ``TIMESTAMP`` (date and time, or seconds), ``ContextTokens`` and ``GeneratedTokens``, as Azure's.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.simulate.lengths import Lengths

HASHED_TOKENS = 512  # of a prompt that one of ``hash_ids`` stands for
VOCABULARY = 2**31 - 1  # so large that two prompts of a trace never share a block by chance


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes (seconds from the start), its length, what its prompt shares with others."""

    time: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()

    def prompt(self, number: int) -> list[int]:
        """Token ids: equal where hash ids are equal, else this request's own (``number``)."""
        ids = self.hash_ids or (-1 - number,)
        parts = [
            self._part(ids[min(i, len(ids) - 1)], i) for i in range(-(-self.prompt_tokens // HASHED_TOKENS))
        ]
        return [token for part in parts for token in part][: self.prompt_tokens]

    @staticmethod
    def _part(hash_id: int, index: int) -> range:
        first = random.Random(f"{hash_id}/{index}").randrange(VOCABULARY - HASHED_TOKENS)
        return range(first, first + HASHED_TOKENS)


def draw(lengths: Lengths, requests: int, rate: float, seed: int) -> list[Arrival]:
    """Poisson arrivals, ``rate`` a second."""
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(requests):
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, *lengths.draw(rng)))
    return arrivals


def read(path: Path) -> list[Arrival]:
    """The requests of a file in order of arrival, the first at 0. Raises ``ConfigError`` naming the line."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    lines = text.splitlines()
    as_json = bool(lines) and lines[0].lstrip().startswith("{")
    arrivals: list[Arrival] = []
    rows = _json_rows(lines) if as_json else csv.DictReader(lines)
    for number, row in enumerate(rows, 1 if as_json else 2):
        try:
            arrivals.append(_mooncake(row) if as_json else _azure(row))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number} is no request: {error!r}") from error
    if not arrivals:
        raise ConfigError(f"the trace {path} holds no requests")
    arrivals.sort(key=lambda arrival: arrival.time)
    return [
        Arrival(one.time - arrivals[0].time, one.prompt_tokens, one.output_tokens, one.hash_ids)
        for one in arrivals
    ]


def _json_rows(lines: Iterable[str]) -> Iterator[Any]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            yield line  # it is no mapping: the caller names the line


def _mooncake(row: Mapping[str, Any]) -> Arrival:
    lengths = _positive(row["input_length"]), _positive(row["output_length"])
    return Arrival(
        float(row["timestamp"]) / 1000, *lengths, tuple(int(one) for one in row.get("hash_ids", ()))
    )


def _azure(row: Mapping[str, Any]) -> Arrival:
    stamp = str(row["TIMESTAMP"]).strip()
    try:
        seconds = float(stamp)
    except ValueError:
        whole, _, fraction = stamp.partition(".")  # Azure writes seven digits, more than Python reads
        seconds = datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
    return Arrival(seconds, _positive(row["ContextTokens"]), _positive(row["GeneratedTokens"]))


def _positive(value: Any) -> int:
    number = int(value)
    if number < 1:
        raise ValueError(f"{number} tokens: at least 1")
    return number
