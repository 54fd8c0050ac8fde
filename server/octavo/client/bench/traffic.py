"""What is sent: conversations of one turn or several, drawn, or read from a file of token ids."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

# Each is one token, with the space before it, in most vocabularies; the endpoint's usage says the true count.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community"
)
WORDS = _COMMON.split()
SHAPES = ("random", "multi-turn", "shared-prefix")


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a user says, text or token ids, and how long the answer is to be."""

    prompt: str | Sequence[int]
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Turns that go out one after the other, each with all that was said before."""

    turns: Sequence[Turn]
    system: str = ""

    def body(self, chat: bool, answers: Sequence[str]) -> dict[str, Any]:
        """The request of turn ``len(answers)``."""
        turn = self.turns[len(answers)]
        body: dict[str, Any] = {"max_tokens": turn.max_tokens}
        if not isinstance(turn.prompt, str):
            return {**body, "prompt": list(turn.prompt)}
        asked = [str(one.prompt) for one in self.turns[: len(answers) + 1]]
        said = [text for pair in zip(asked, [*answers, ""], strict=True) for text in pair][:-1]
        if not chat:
            return {**body, "prompt": " ".join(filter(None, [self.system, *said]))}
        system = [{"role": "system", "content": self.system}] if self.system else []
        roles = ("user", "assistant")
        return {
            **body,
            "messages": system + [{"role": roles[i % 2], "content": t} for i, t in enumerate(said)],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of drawn traffic; lengths in words, which are about as many tokens."""

    requests: int = 64
    input_tokens: int = 256
    output_tokens: int = 128
    spread: float = 0.0  # lengths are uniform within this share of the mean
    turns: int = 4
    groups: int = 8
    prefix_tokens: int = 1024
    seed: int = 1


def draw(kind: str, shape: Shape) -> list[Conversation]:
    """Conversations of one of ``SHAPES``; the same for the same seed."""
    rng = random.Random(shape.seed)

    def length(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - shape.spread, 1 + shape.spread)))

    def text(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    def turn() -> Turn:
        return Turn(text(length(shape.input_tokens)), length(shape.output_tokens))

    if kind == "multi-turn":
        return [Conversation([turn() for _ in range(shape.turns)]) for _ in range(shape.requests)]
    if kind == "shared-prefix":
        prefixes = [text(shape.prefix_tokens) for _ in range(shape.groups)]
        drawn = [Conversation([turn()], prefixes[i % shape.groups]) for i in range(shape.requests)]
        rng.shuffle(drawn)
        return drawn
    return [Conversation([turn()]) for _ in range(shape.requests)]


def read(path: Path, scenario: str | None) -> list[Conversation]:
    """One scenario of a file ``{"scenarios": {name: [{"prompt_ids": [...], "max_tokens": n}, ...]}}``.
    Raises ``ConfigError``.
    """
    try:
        scenarios = json.loads(path.read_text())["scenarios"]
        names = ", ".join(sorted(scenarios))
        if scenario is None and len(scenarios) == 1:
            scenario = next(iter(scenarios))
        if scenario not in scenarios:
            raise ConfigError(f"scenario is {scenario!r}: {path} has {names}")
        return [Conversation([Turn(one["prompt_ids"], one["max_tokens"])]) for one in scenarios[scenario]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no file of workloads: {error!r}") from error
