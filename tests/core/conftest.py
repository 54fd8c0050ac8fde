"""A scheduler beside its simulated executor, driven by hand."""

from __future__ import annotations

import pytest
from core.token_model import TokenExecutor

from octavo.core.kv_layout import KVSpec
from octavo.core.outputs import EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings


class Clock:
    """A clock that moves one millisecond a look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Bench:
    """A scheduler and its simulated executor."""

    def __init__(
        self, num_blocks=40, eos=(), groups=1, executor=None, specs=None, host=0, offload=False,
        make_proposer=None, **settings,
    ) -> None:  # fmt: skip
        values = {"max_model_len": 10_000, "vocab_size": 50, "block_size": 4, **settings}
        self.settings = SchedulerSettings(**values)
        self.clock = Clock()
        specs = specs or [KVSpec()] * groups
        self.scheduler = Scheduler(
            self.settings,
            num_blocks,
            list(eos),
            clock=self.clock,
            groups=specs,
            block_bytes=1000,
            num_host_blocks=host,
            offload=offload,
            make_proposer=make_proposer,
        )
        self.executor = executor or TokenExecutor(
            self.settings.vocab_size, num_blocks, self.settings.block_size, specs, host
        )
        self.outputs: dict[str, list] = {}

    def add(
        self, name, prompt, max_tokens=8, salt=None, prior=0, n=1, priority=0, timeout=None, **sampling
    ) -> None:
        """Queue one request; with n > 1 its samples are NAME/0, NAME/1, ..."""
        params = SamplingParams(**{"temperature": 0, "seed": 0, "max_tokens": max_tokens, **sampling})
        names = [name] if n == 1 else [f"{name}/{i}" for i in range(n)]
        requests = [
            EngineRequest(
                request_id=each,
                prompt_token_ids=list(prompt),
                sampling=params,
                sample_index=i,
                group=name if n > 1 else None,
                cache_salt=salt,
                num_prior_output_tokens=prior,
                priority=priority,
                deadline=None if timeout is None else self.clock.now + timeout,
            )
            for i, each in enumerate(names)
        ]
        self.scheduler.add(requests)
        for each in names:
            self.executor.start(each, list(prompt), known=not params.use_beam_search)
            self.outputs[each] = []

    def step(self, meanwhile=lambda: None) -> bool:
        """One step; False when there was nothing to do. ``meanwhile`` is called while it runs."""
        self.take(self.scheduler.expire())
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        meanwhile()
        self.take(self.scheduler.update(plan, self.executor.execute(plan)))
        return True

    def take(self, outputs) -> None:
        for output in outputs:
            self.outputs[output.request_id].append(output)

    def abort(self, name) -> None:
        if output := self.scheduler.abort(name):
            self.take([output])

    def run(self, limit=10_000, **meanwhile) -> None:
        for _ in range(limit):
            if not self.step(**meanwhile):
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
