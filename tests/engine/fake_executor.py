"""Executors for tests of the engine's process: tokens that only depend on the position, at a given pace.

Named in the launch message as ``fake_executor:NAME``; this folder is on the engine's PYTHONPATH.
"""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

from octavo.core.plan import RowResult, StepResult
from octavo.errors import ConfigError


class CountingExecutor:
    """Draws ``position % vocab_size``. A prompt that starts with one of these tokens does something else."""

    FAIL_ROW, FAIL_STEP, HANG, DIE = 90, 91, 92, 93

    def __init__(self, config, *, pace_s=0.0, max_model_len=2000):
        self.info = SimpleNamespace(
            max_model_len=max_model_len,
            vocab_size=100,
            num_blocks=max(1, max_model_len // config.block_size),
            block_bytes=1 << 16,
            num_host_blocks=0,
            eos_token_ids=[99],
            kv={"dtype": "bfloat16", "groups": [{"kind": "full"}]},
        )
        self.pace = threading.Event()  # never set: waiting on it is the step's work
        self.pace_s = pace_s

    def check(self):
        pass

    def execute(self, plan):
        self.pace.wait(self.pace_s)
        return StepResult(plan.step, [self.draw(row) for row in plan.rows])

    def draw(self, row):
        if row.start == 0:
            if row.token_ids[0] == self.FAIL_STEP:
                raise ValueError("the step is broken")
            if row.token_ids[0] == self.HANG:
                self.pace.wait()
            if row.token_ids[0] == self.DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            if row.token_ids[0] == self.FAIL_ROW:
                return RowResult(row.request_id, [], error="logits are NaN")
        return RowResult(row.request_id, [row.samples[0].position % 99] if row.samples else [])


def fast(config, path, progress):
    progress("loading weights", str(path))
    progress("warming", "")
    return CountingExecutor(config)


def paced(config, path, progress):
    """100 steps a second at most."""
    return CountingExecutor(config, pace_s=0.01)


def slow(config, path, progress):
    """Two seconds a step."""
    return CountingExecutor(config, pace_s=2.0)


def refused(config, path, progress):
    progress("loading weights", str(path))
    raise ConfigError("the longest that fits is 42")


def broken(config, path, progress):
    raise ValueError("no such tensor")


def never(config, path, progress):
    progress("loading weights", "for ever")
    threading.Event().wait()
