"""A model without arithmetic: its KV cache holds the tokens themselves, so a wrong block shows at once."""

from __future__ import annotations

import pytest

from octavo.core.kv_layout import KVSpec
from octavo.core.outputs import EngineRequest
from octavo.core.plan import RowResult, StepPlan, StepResult
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerSettings


class TokenExecutor:
    """Executes plans over a simulated cache: each slot holds a digest of the whole prefix up to its token.

    The next token of a row is a pure function of all tokens before it. Reading a slot that does not hold
    just this prefix fails: a block was shared wrongly, freed too early or never written. ``sequences`` maps
    request ids to the tokens that each truly has.
    """

    def __init__(self, vocab_size: int, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        self.vocab_size, self.block_size = vocab_size, block_size
        self.slots = [[0] * (num_blocks * block_size) for _ in range(num_groups)]
        self.sequences: dict[str, list[int]] = {}
        self.digests: dict[str, list[int]] = {}
        self.faulty: set[str] = set()
        self.plans: list[StepPlan] = []

    def start(self, name: str, tokens: list[int]) -> None:
        self.sequences[name], self.digests[name] = list(tokens), []
        self._digest(name)

    def _digest(self, name: str) -> None:
        digests, tokens = self.digests[name], self.sequences[name]
        for token in tokens[len(digests) :]:
            digests.append(self.extend(digests[-1] if digests else 1, token))

    @staticmethod
    def extend(digest: int, token: int) -> int:
        return (digest * 6364136223846793005 + token * 2654435761 + 1442695040888963407) % 2**61

    def next_token(self, digest: int) -> int:
        return (digest >> 20) % self.vocab_size

    def alone(self, prompt: list[int], max_tokens: int, eos=()) -> list[int]:
        """What a request gives when nothing else exists."""
        digest, out = 1, []
        for token in prompt:
            digest = self.extend(digest, token)
        while len(out) < max_tokens and not (out and out[-1] in eos):
            out.append(self.next_token(digest))
            digest = self.extend(digest, out[-1])
        return out

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for row in plan.rows:
            truth, digests = self.sequences[row.request_id], self.digests[row.request_id]
            assert row.token_ids, "a row computes something"
            assert truth[row.start : row.start + len(row.token_ids)] == row.token_ids
            for group, table in enumerate(row.block_tables):
                for position in range(row.start, row.start + len(row.token_ids)):
                    self.slots[group][self._slot(table, position)] = digests[position]
        return StepResult(plan.step, [self._row(row) for row in plan.rows])

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _row(self, row) -> RowResult:
        name, end = row.request_id, row.start + len(row.token_ids)
        truth, digests = self.sequences[name], self.digests[name]
        for group, table in enumerate(row.block_tables):
            for position in range(end):
                assert self.slots[group][self._slot(table, position)] == digests[position], (
                    f"{name} reads another prefix at position {position} of group {group}"
                )
        if not row.samples:
            return RowResult(name, [])
        assert row.samples[0].position == end == len(truth)
        if name in self.faulty:
            return RowResult(name, [], error="logits are NaN")
        token = self.next_token(digests[-1])
        truth.append(token)
        self._digest(name)
        return RowResult(name, [token])


class Clock:
    """A clock that moves one millisecond a look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Bench:
    """A scheduler and its simulated executor."""

    def __init__(self, num_blocks=40, eos=(), groups=1, executor=None, **settings) -> None:
        values = {"max_model_len": 10_000, "vocab_size": 50, "block_size": 4, **settings}
        self.settings = SchedulerSettings(**values)
        self.clock = Clock()
        self.scheduler = Scheduler(
            self.settings, num_blocks, list(eos), clock=self.clock, groups=[KVSpec()] * groups
        )
        self.executor = executor or TokenExecutor(
            self.settings.vocab_size, num_blocks, self.settings.block_size, groups
        )
        self.outputs: dict[str, list] = {}

    def add(self, name, prompt, max_tokens=8, salt=None, prior=0, **sampling) -> None:
        params = SamplingParams(temperature=0, seed=0, max_tokens=max_tokens, **sampling)
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling=params,
            cache_salt=salt,
            num_prior_output_tokens=prior,
        )
        self.scheduler.add(request)
        self.executor.start(name, list(prompt))
        self.outputs[name] = []

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        for output in self.scheduler.update(plan, self.executor.execute(plan)):
            self.outputs[output.request_id].append(output)
        return True

    def abort(self, name) -> None:
        if output := self.scheduler.abort(name):
            self.outputs[name].append(output)

    def run(self, limit=10_000) -> None:
        for _ in range(limit):
            if not self.step():
                assert not self.scheduler.has_requests, "requests are left but nothing is planned"
                return
        raise AssertionError(f"not done after {limit} steps")

    def tokens(self, name) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def reason(self, name):
        return self.outputs[name][-1].finish_reason

    def cached(self, name) -> int:
        return self.outputs[name][-1].num_cached_tokens


@pytest.fixture
def bench():
    return Bench
