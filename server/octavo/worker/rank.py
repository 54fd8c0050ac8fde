"""A tensor parallel rank's process: ``python -m octavo.worker.rank``, told on standard input what it is.

It does what rank 0 does, in the same order, so that they meet in every collective. A fault is told to rank 0
and ends the process; so does the end of rank 0.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from octavo.child_process import end_with_owner, read_frame
from octavo.config import engine_config
from octavo.core.plan import StepPlan
from octavo.errors import OctavoError
from octavo.models.config import ModelConfig
from octavo.worker.executor import LocalExecutor, build_rank
from octavo.worker.loading import Place
from octavo.worker.ranks import (
    FAULT_S,
    Call,
    Failed,
    Launch,
    Step,
    ToRank,
    Value,
    connect,
    encoder,
    to_rank,
)
from octavo_kernels.communicator import Communicator

_log = logging.getLogger("octavo.worker")


class RankZero:
    """The group, as the other ranks see it: they hear and tell rank 0 alone."""

    def __init__(self, launch: Launch) -> None:
        self.rank, self.world = launch.rank, launch.world
        self._launch = launch
        self._commands = Connection(launch.commands)

    def join(self, place: Place, model: ModelConfig) -> Communicator:
        return connect(self, place, self._launch.memory)

    def least(self, number: int) -> int:
        self.say(Value(number))
        answer = self.hear()
        assert isinstance(answer, Value)
        return answer.number

    def hear(self) -> ToRank:
        return to_rank.decode(self._commands.recv_bytes())

    def say(self, message: Value | Failed) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # rank 0 is gone: so are we, soon
            self._commands.send_bytes(encoder.encode(message))


class Follower:
    """Runs the steps that rank 0 runs."""

    def __init__(self, executor: LocalExecutor) -> None:
        self._executor = executor
        self._ended: set[int] = set()  # transfers that have ended here, and perhaps not on rank 0

    def step(self, step: Step) -> None:
        while not self._ended.issuperset(step.done):
            self._run(StepPlan(step.plan.step, []))  # which waits for one
        self._ended.difference_update(step.done)
        self._run(step.plan)

    def call(self, call: Call) -> None:
        getattr(self._executor, call.method)(*call.arguments)
        if call.method == "sleep":
            self._ended.clear()

    def _run(self, plan: StepPlan) -> None:
        self._ended.update(done.id for done in self._executor.execute(plan).done)


def run(launch: Launch) -> int:
    """Load, then follow rank 0. Returns the process's exit status."""
    owner = RankZero(launch)
    try:
        values: dict[str, Any] = dict(launch.config)
        config = engine_config(values.pop("model"), values)
        executor = build_rank(config, Path(launch.model_path), lambda stage, detail: None, owner)
        gc.collect()
        gc.freeze()
        follower = Follower(executor)
        while True:
            match owner.hear():
                case Step() as step:
                    follower.step(step)
                case Call() as call:
                    follower.call(call)
                    owner.say(Value())
                case message:
                    raise OctavoError(f"a rank takes no {type(message).__name__} now")
    except EOFError:
        return 0
    except OctavoError as error:
        owner.say(Failed(type(error).__name__, error.message))
    except Exception as error:  # whatever it is, rank 0 must hear of it before this process ends
        time.sleep(FAULT_S / 2)  # it may come of another rank's end, of which rank 0 hears first, and ends us
        _log.exception("tensor parallel rank %d failed", launch.rank)
        owner.say(Failed("OctavoError", f"{type(error).__name__}: {error}"))
    return 1


def main() -> int:
    stdin = sys.stdin.fileno()
    launch = msgspec.msgpack.decode(read_frame(stdin), type=Launch)
    end_with_owner(stdin)
    logging.basicConfig(
        level=logging.WARNING,  # what all ranks do, rank 0 logs
        format=f"%(asctime)s %(levelname)s %(name)s, rank {launch.rank}: %(message)s",
    )
    return run(launch)


if __name__ == "__main__":
    sys.exit(main())
