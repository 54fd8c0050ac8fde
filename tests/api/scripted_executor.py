"""Executors for tests of the HTTP server: the next token is a pure function of the last one, its position and
the seed.

Named as ``scripted_executor:NAME``; this folder is on the engine's PYTHONPATH. The scheduler, the KV cache
and the engine's process around them are the real ones.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import zlib
from concurrent.futures import Future
from types import SimpleNamespace

from octavo.core.plan import RowResult, StepResult, TokenLogprobs
from octavo.errors import InvalidRequest

FIRST_PLAIN = 4  # ids below are special
EOS = 1
PART = 0  # where a part of a script ends
FAIL_ROW, DIE = 300, 301  # a prompt that starts with one of these makes its row fail, or kills the process
REFUSE_ROW = 303  # one that starts with this has settings that leave no token
REFUSED = "refused by the engine"  # a grammar that holds this text
LATE = 20  # the position at which ``late_fault`` fails


class ScriptedExecutor:
    """Every token is as likely as the scripted order says; one in 64 draws ends the sequence."""

    def __init__(self, config, path, pace_s=0.0, num_blocks=400):
        length = config.max_model_len if isinstance(config.max_model_len, int) else 2048
        self.info = SimpleNamespace(
            max_model_len=length,
            vocab_size=json.loads((path / "config.json").read_text())["vocab_size"],
            num_blocks=num_blocks,
            block_bytes=1 << 16,
            num_host_blocks=0,
            eos_token_ids=[EOS],
            kv={"dtype": "bfloat16", "groups": [{"kind": "full"}]},
        )
        self.asleep = set()
        self.fails_at = -1
        self.told = {FAIL_ROW, DIE, REFUSE_ROW}  # the first tokens that are heeded
        self._pace_s = pace_s
        self._pace = threading.Event()  # never set: waiting on it is the step's work

    def prepare(self, grammar):
        built = Future()
        if REFUSED in grammar:
            built.set_exception(InvalidRequest("the grammar has too many states", param="grammar"))
        else:
            built.set_result(None)
        return built

    def sleep(self, level):
        self.asleep = {"weights", "kv_cache"} if level > 1 else {"kv_cache"}

    def load_weights(self):
        self.asleep.discard("weights")

    def check(self):
        pass

    def make_cache(self):
        assert self.asleep == {"kv_cache"}
        self.asleep.clear()

    def execute(self, plan):
        assert not self.asleep
        self._pace.wait(self._pace_s)
        return StepResult(plan.step, [self._row(row) for row in plan.rows])

    def _row(self, row):
        if row.start == self.fails_at or self._told(row, FAIL_ROW):
            return RowResult(row.request_id, [], error="logits are NaN")
        if self._told(row, REFUSE_ROW):
            return RowResult(row.request_id, [], error="the grammar leaves no token to draw", refused=True)
        if self._told(row, DIE):
            os.kill(os.getpid(), signal.SIGKILL)
        scores = self._prompt_scores(row)
        if not row.samples:
            return RowResult(row.request_id, [], prompt_logprobs=scores)
        ranked = [self._ranked(row.token_ids[-1], sample) for sample in row.samples]
        logprobs = None
        if (wanted := row.samples[0].logprobs) is not None:
            tops = [[(token, -0.5 - rank) for rank, token in enumerate(each)] for each in ranked]
            logprobs = [TokenLogprobs(-0.5, 1, top[:wanted]) for top in tops]
        return RowResult(row.request_id, [each[0] for each in ranked], logprobs, prompt_logprobs=scores)

    def _told(self, row, token):
        return row.start == 0 and row.token_ids[0] == token and token in self.told

    def _prompt_scores(self, row):
        """The token at position p of the prompt has the logprob -p, and is unlike the top ones."""
        if row.prompt_logprobs is None:
            return None
        places = [p for p in range(row.start + 1, row.start + len(row.token_ids) + 1) if p < len(row.history)]
        top = [(FIRST_PLAIN + rank, -0.25 - rank) for rank in range(row.prompt_logprobs)]
        return [TokenLogprobs(-float(p), 30, top) for p in places]

    def _ranked(self, last, sample):
        drawn = (sample.seed, sample.sample_index) if sample.temperature else ()
        number = zlib.crc32(repr((last, sample.position, drawn)).encode())
        plain = self.info.vocab_size - FIRST_PLAIN
        ranked = [FIRST_PLAIN + (number // 64 + step) % plain for step in range(20)]
        return [EOS, *ranked] if number % 64 == 0 else ranked


class Reciting(ScriptedExecutor):
    """Says what stands in the prompt between its first token and the next ``EOS``; without prefix caching."""

    def __init__(self, config, path):
        super().__init__(config, path)
        self._read = {}
        self._said = {}

    def _row(self, row):
        read = self._read.setdefault(row.request_id, [])
        read += row.token_ids
        if not row.samples:
            return RowResult(row.request_id, [])
        self._said[row.request_id] = said = self._said.get(row.request_id, 0) + 1
        wanted = row.samples[0].logprobs
        logprobs = None if wanted is None else [TokenLogprobs(-0.5, 1, [(read[said], -0.5)][:wanted])]
        return RowResult(row.request_id, [read[said]], logprobs)


class Acting(ScriptedExecutor):
    """Plays the script in the first message, in each of the assistant's turns the next part, up to ``PART``.
    After the last part it says what the last message holds. Without prefix caching.
    """

    def __init__(self, config, path):
        super().__init__(config, path)
        self._read = {}
        self._to_say = {}

    def _row(self, row):
        read = self._read.setdefault(row.request_id, [])
        read += row.token_ids
        if not row.samples:
            return RowResult(row.request_id, [])
        if row.request_id not in self._to_say:  # all of the prompt is read
            self._to_say[row.request_id] = self._line(read)
        line = self._to_say[row.request_id]
        token = next(line)
        wanted = row.samples[0].logprobs
        logprobs = None if wanted is None else [TokenLogprobs(-0.5, 1, [(token, -0.5)][:wanted])]
        return RowResult(row.request_id, [token], logprobs)

    def _line(self, prompt):
        messages = [[]]
        for token in prompt:
            if token == EOS:
                messages.append([])
            else:
                messages[-1].append(token)
        *messages, begun = messages  # each begins with its role, the last is only that
        turn = sum(message[0] == begun[0] for message in messages)
        script = messages[0][1:]
        for _ in range(turn):
            script = script[script.index(PART) + 1 :] if PART in script else []
        said = script[: script.index(PART)] if PART in script else messages[-1][1:]
        return itertools.chain(said, itertools.repeat(EOS))


def acting(config, path, progress):
    return Acting(config, path)


def reciting(config, path, progress):
    return Reciting(config, path)


def fast(config, path, progress):
    progress("loading weights", "scripted")
    progress("warming", "")
    return ScriptedExecutor(config, path)


def sound(config, path, progress):
    """No prompt makes it fail."""
    executor = ScriptedExecutor(config, path)
    executor.told = set()
    return executor


def paced(config, path, progress):
    """50 steps a second at most."""
    return ScriptedExecutor(config, path, pace_s=0.02)


def late_fault(config, path, progress):
    """Paced, and rows fail at position ``LATE``."""
    executor = ScriptedExecutor(config, path, pace_s=0.02)
    executor.fails_at = LATE
    return executor


def small(config, path, progress):
    """A KV cache of 50 blocks."""
    return ScriptedExecutor(config, path, num_blocks=50)


def never(config, path, progress):
    progress("loading weights", "for ever")
    threading.Event().wait()


def refused(config, path, progress):
    from octavo.errors import ConfigError

    raise ConfigError("max-model-len 9999 does not fit: the longest that fits is 42")
