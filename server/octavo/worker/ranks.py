"""The ranks of a tensor parallel group: each a process that runs every step on its share of the model.

The engine's own process is rank 0: it schedules and draws. The others are told each step's plan, read from it
what to compute, and answer nothing; ``octavo.worker.rank`` is what they run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import queue
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from octavo import errors
from octavo.child_process import cause_of, start_module, tell
from octavo.config import EngineConfig
from octavo.core.plan import Row, StepPlan, StepResult
from octavo.engine.executor import Executor, ExecutorInfo
from octavo.models.config import ModelConfig
from octavo.worker.loading import Place
from octavo_kernels.communicator import Communicator, TorchCommunicator
from octavo_kernels.cpu.communicator import SharedMemoryCommunicator, shared_memory

RANK = "octavo.worker.rank"  # the module that the others run
CLOSE_S = 10.0  # a rank that was told to end has so long before it is killed
FAULT_S = 2.0  # after a collective failed: until it is known which rank is gone


class Launch(msgspec.Struct, frozen=True):
    """What a new rank is told on its standard input.

    ``commands`` and ``memory`` are file descriptors that it inherits: a ``Connection`` to rank 0, and memory
    that all ranks share: for the C++ kernels, or as a file for Gloo or NCCL to meet at.
    """

    rank: int
    world: int
    config: dict[str, Any]
    model_path: str
    commands: int
    memory: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Run this plan, once these transfers have ended here too: the scheduler has heard that they have."""

    plan: StepPlan
    done: list[int]


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Do as rank 0 does: a method of ``LocalExecutor``. Answered by a ``Value``."""

    method: str
    arguments: list[int] = []


class Value(msgspec.Struct, frozen=True, tag="value"):
    """A number for, or from, ``least``; or that a call is done."""

    number: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank cannot go on and ends: an ``OctavoError`` by the name of its class."""

    kind: str
    message: str


ToRank = Step | Call | Value
FromRank = Value | Failed

encoder = msgspec.msgpack.Encoder()
to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


class Ranks(Protocol):
    """The group, as a rank sees it while it loads its share. All call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def join(self, place: Place, model: ModelConfig) -> Communicator | None:
        """Meet the others. Raises ``OctavoError`` when one of them cannot come."""

    def least(self, number: int) -> int:
        """The least of all ranks' numbers. It waits until all have said theirs."""


class Alone:
    """The model is not shared."""

    rank, world = 0, 1

    def join(self, place: Place, model: ModelConfig) -> None:
        return None

    def least(self, number: int) -> int:
        return number


class OtherRanks:
    """Ranks 1 .. world - 1, as rank 0 sees them: processes that ``join`` starts and ``close`` ends.

    The end of any of them breaks the group for good: no call waits from then on, ``check`` says why.
    """

    rank = 0

    def __init__(self, config: EngineConfig, path: Path) -> None:
        self.world = config.tensor_parallel_size
        self._config, self._path = config, path
        self._processes: list[_Process] = []
        self._communicator: Communicator | None = None
        self._memory: int | None = None
        self._gone = threading.Event()
        self._fault: errors.OctavoError | None = None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def join(self, place: Place, model: ModelConfig) -> Communicator:
        if place.ops.name == "cpu":
            widest = 4 * max(model.hidden_size, -(-model.vocab_size // self.world))
            memory = shared_memory(self.world, widest)
        else:
            memory = os.memfd_create("octavo-meeting")
        self._memory = memory  # open until ``close``: NCCL meets in the first collective
        for rank in range(1, self.world):
            self._processes.append(self._start(rank, memory))
        self._communicator = connect(self, place, memory)
        return self._communicator

    def _start(self, rank: int, memory: int) -> _Process:
        config = {**dataclasses.asdict(self._config), "api_key": ()}  # no rank needs clients' keys
        path = str(self._path.absolute())
        ours, theirs = Pipe()
        with theirs:
            launch = Launch(rank, self.world, config, path, theirs.fileno(), memory)
            return _Process(launch, ours, self._break)

    def least(self, number: int) -> int:
        least = min(number, *(self._answer(process) for process in self._processes))
        self.tell(Value(least))
        return least

    def tell(self, message: ToRank) -> None:
        data = encoder.encode(message)
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone: ``check`` says why
                process.commands.send_bytes(data)

    def together(self, method: str, ours: Callable[[], None], *arguments: int) -> None:
        """``ours`` here and the same method of ``LocalExecutor`` on the others, to their ends."""
        with self.faults():
            self.tell(Call(method, list(arguments)))
            ours()
            for process in self._processes:
                self._answer(process)

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """Work that all ranks do at once: where it cannot be done as one is gone, that is what is raised.

        What interrupts it here leaves the others somewhere else in it: the group is broken then.
        """
        try:
            yield
        except BaseException as error:
            explained = isinstance(error, errors.OctavoError) or not isinstance(error, Exception)
            if not explained and self._gone.wait(FAULT_S):
                self.check()
            self._break(errors.OctavoError(f"a step of the tensor parallel ranks failed: {error!r:.200}"))
            raise
        self.check()

    def check(self) -> None:
        """Raise the ``OctavoError`` that broke the group, if one did."""
        if self._fault is not None:
            raise copy.copy(self._fault)  # which keeps no frames: they hold the executor, which ends us

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()
        if self._communicator is not None:
            self._communicator.close()
        if self._memory is not None:
            os.close(self._memory)

    def _answer(self, process: _Process) -> int:
        answer = process.answers.get()
        if answer is None:
            self._gone.wait()
            self.check()
            raise AssertionError("a rank is gone, and nobody said why")
        return answer.number

    def _break(self, fault: errors.OctavoError) -> None:
        """From any thread: the first fault is the one that counts."""
        if self._fault is None:
            self._fault = fault
        self._gone.set()
        if self._communicator is not None:
            self._communicator.abort()


class _Process:
    """One of the other ranks. ``gone`` is called, on a thread of its own, with why it ended."""

    def __init__(
        self, launch: Launch, commands: Connection, gone: Callable[[errors.OctavoError], None]
    ) -> None:
        self.commands = commands
        self.answers: queue.SimpleQueue[Value | None] = queue.SimpleQueue()  # None: no more will come
        self._process = start_module(RANK, pass_fds=(launch.commands, launch.memory))
        tell(self._process, encoder.encode(launch))
        self._closing = threading.Event()
        threading.Thread(target=self._listen, args=(launch.rank, gone), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._closing.set()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended before it had read what is still buffered
            self._process.stdin.close()  # which ends it, whatever it is doing
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self, rank: int, gone: Callable[[errors.OctavoError], None]) -> None:
        """Take its answers, until it ends."""

        def say(kind: type[errors.OctavoError], why: str) -> None:
            if not self._closing.is_set():
                gone(kind(f"tensor parallel rank {rank}: {why}"))

        with contextlib.suppress(EOFError, OSError):
            while True:
                match _from_rank.decode(self.commands.recv_bytes()):
                    case Failed(kind, message):  # its process may take a while to end
                        say(getattr(errors, kind), message)
                    case answer:
                        self.answers.put(answer)
        say(errors.OctavoError, f"it ended: {cause_of(self._process.wait())}")
        self.answers.put(None)


class TensorParallelExecutor:
    """An executor of which this process is rank 0: ``own`` runs its share of each step, ``ranks`` theirs."""

    def __init__(self, own: Executor, ranks: OtherRanks) -> None:
        self._own, self.ranks = own, ranks
        self._done: list[int] = []  # transfers that have ended, which the others have not been told
        weakref.finalize(self, ranks.close)

    @property
    def info(self) -> ExecutorInfo:
        return self._own.info

    def prepare(self, grammar: str) -> Future[Any]:
        return self._own.prepare(grammar)

    def check(self) -> None:
        self.ranks.check()

    def execute(self, plan: StepPlan) -> StepResult:
        self.ranks.check()
        with self.ranks.faults():
            self.ranks.tell(Step(without_rules(plan), self._done))
            result = self._own.execute(plan)
            self._done = [one.id for one in result.done]
        return result

    def sleep(self, level: int) -> None:
        self.ranks.together("sleep", lambda: self._own.sleep(level), level)
        self._done = []

    def load_weights(self) -> None:
        self.ranks.together("load_weights", self._own.load_weights)

    def make_cache(self) -> None:
        self.ranks.together("make_cache", self._own.make_cache)


def without_rules(plan: StepPlan) -> StepPlan:
    """A plan without what only draws need, for ranks that compute logits and draw nothing."""
    if all(row.history is None for row in plan.rows):
        return plan
    return msgspec.structs.replace(plan, rows=[_without_rules(row) for row in plan.rows])


def _without_rules(row: Row) -> Row:
    history = row.history if row.prompt_logprobs is not None else None  # which tells what to score
    samples = [msgspec.structs.replace(spec, rules=None) for spec in row.samples]
    return msgspec.structs.replace(row, history=history, samples=samples)


def connect(ranks: Ranks, place: Place, memory: int) -> Communicator:
    """This rank's communicator: in ``memory`` for the C++ kernels, else through Gloo or, on GPUs, NCCL."""
    if place.ops.name == "cpu":
        return SharedMemoryCommunicator(ranks.rank, ranks.world, memory)
    ranks.least(0)  # all processes are there: none of them waits for one that could not start
    meeting = Path(f"/proc/self/fd/{memory}")  # without a name there is nothing to be left behind
    communicator = TorchCommunicator(ranks.rank, ranks.world, place.device.collectives, meeting)
    communicator.all_reduce(torch.zeros(1, 1, device=place.device.torch_device))  # only here NCCL connects
    return communicator
