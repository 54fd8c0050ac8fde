"""What the engine asks of whoever runs the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from octavo.config import EngineConfig
from octavo.core.plan import StepPlan, StepResult


class ExecutorInfo(Protocol):
    """What a loaded model allows; fixed once the executor is built."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens; one such request fits the cache."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1."""

    @property
    def num_blocks(self) -> int:
        """Physical KV blocks of ``block_size`` tokens, numbered 0 .. num_blocks - 1."""

    @property
    def block_bytes(self) -> int:
        """What one block takes, and a transfer of it copies."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier; 0 where there is none."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Ids that end a sequence, unless the request ignores them."""

    @property
    def kv(self) -> Mapping[str, Any]:
        """``{"dtype": "bfloat16", "groups": [{"kind": "full"}]}``: of keys and values; one block table a
        group, in the order of a row's tables.
        """


class Executor(Protocol):
    """Runs step plans, one at a time and in order.

    In each layer the keys and values of every row are written before any row attends: rows of one step may
    read blocks that other rows of it fill (equal prefixes that arrive together).
    """

    @property
    def info(self) -> ExecutorInfo: ...

    def prepare(self, grammar: str) -> Future[Any]:
        """Begin, beside the steps, to build what rows with this grammar need.

        The future raises ``InvalidRequest`` when the grammar cannot be used.
        """

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; rows come back in the order of the plan.

        A fault of one row goes into its ``error``; anything raised here ends the engine.
        """

    def check(self) -> None:
        """Raise what keeps steps from being run from now on, where something does (a rank that is gone)."""

    def sleep(self, level: int) -> None:
        """Give back the memory of the KV cache, whatever it holds, at level 2 of the weights too.

        Level 1 keeps the weights where they are in host memory already. Not while a step runs.
        """

    def load_weights(self) -> None:
        """Bring the weights back after ``sleep``; does nothing where they are there.

        Raises ``ModelLoadError`` when they cannot be read any more.
        """

    def make_cache(self) -> None:
        """An empty KV cache, as large as it was, beside the weights: steps can be run again."""


Progress = Callable[[str, str], None]  # (stage, detail)
ExecutorFactory = Callable[[EngineConfig, Path, Progress], Executor]
