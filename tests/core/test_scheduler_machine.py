"""The scheduler under random workloads on tiny pools: each request gives what it gives alone."""

from __future__ import annotations

from core.token_model import TokenModel, extend
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.core.kv_layout import KVSpec
from octavo.core.plan import NO_BLOCK
from octavo.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, QueueFull

EOS = 49
VOCAB = 50
FULL, STATE = KVSpec(), KVSpec("state")
WINDOW = KVSpec("sliding_window", 6)
REQUEST = st.fixed_dictionaries(
    {
        "stem": st.integers(0, 1),  # which of two texts the prompt starts with
        "length": st.integers(0, 25),  # how much of it
        "tail": st.lists(st.integers(0, 3), max_size=3),  # and what follows
        "max_tokens": st.integers(1, 20),
        "salt": st.sampled_from([None, None, None, "a"]),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "beams": st.sampled_from([False, False, True]),
        "priority": st.integers(0, 2),
        "timeout": st.sampled_from([None, None, None, 0.05]),
        "prompt_logprobs": st.sampled_from([None, None, None, 2]),
    }
)


class Guesser:
    """Proposes what sample 0 draws, and now and then something wrong."""

    def __init__(self) -> None:
        self.model = TokenModel(VOCAB)

    def propose(self, token_ids, limit):
        digest, drafts = self.model.digest(token_ids), []
        for _ in range(digest % (limit + 1)):
            token = self.model.draw(digest, 0)
            drafts.append(token if digest % 5 else (token + 1) % VOCAB)
            digest = extend(digest, drafts[-1])
        return drafts


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self, make_bench):
        super().__init__()
        self.make_bench = make_bench
        self.waited = []

    @initialize(
        num_blocks=st.integers(4, 40),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 8),
        budget=st.integers(1, 10) | st.integers(1, 40),
        chunked=st.sampled_from([True, True, False]),
        caching=st.sampled_from([True, True, False]),
        specs=st.sampled_from([[FULL], [FULL], [FULL, FULL], [FULL, WINDOW], [FULL, STATE]]),
        max_queue=st.integers(1, 12),
        policy=st.sampled_from(["fcfs", "priority"]),
        mode=st.sampled_from(["auto", "recompute", "swap"]),
        host=st.sampled_from([0, 5, 40]),
        offload=st.booleans(),
        drafts=st.sampled_from([0, 0, 3]),
        threshold=st.sampled_from([0, 1, 5]),
        transfer_steps=st.integers(0, 3),
    )
    def start(
        self, num_blocks, block_size, max_num_seqs, budget, chunked, caching, specs, max_queue, policy, mode,
        host, offload, drafts, threshold, transfer_steps, max_model_len=60,
    ):  # fmt: skip
        self.bench = self.make_bench(
            num_blocks=num_blocks,
            block_size=block_size,
            specs=specs,
            eos=[EOS],
            host=host,
            offload=offload,
            make_proposer=Guesser,
            max_model_len=max(2, max_model_len if chunked else budget),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(2, budget),
            max_queue=max_queue,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            preemption_mode=mode,
            long_prefill_token_threshold=threshold,
            num_speculative_tokens=0 if STATE in specs else drafts,
        )
        self.bench.executor.transfer_steps = transfer_steps
        self.scheduler = self.bench.scheduler
        self.blocks_ran_out, kv = False, self.scheduler.kv
        kv.grow, kv.admit = self.watched(kv.grow), self.watched(kv.admit)
        self.wanted: dict[str, tuple[list[int], dict]] = {}
        self.count = 0

    def watched(self, give_blocks):
        def watched(*args):
            given = give_blocks(*args)
            self.blocks_ran_out |= not given
            return given

        return watched

    @rule(requests=st.lists(REQUEST, min_size=1, max_size=4))
    def add(self, requests):
        for request in requests:
            self.add_one(request)

    def add_one(self, request):
        stem, n, max_tokens = request["stem"], request["n"], request["max_tokens"]
        prompt = [stem] + [(stem * 7 + i) % 50 for i in range(request["length"])] + request["tail"]
        name, self.count = f"r{self.count}", self.count + 1
        limits, need = self.scheduler.limits, len(prompt) + max_tokens
        blocks = limits.blocks_needed(len(prompt), need - 1, n)
        fits = need <= limits.max_model_len and blocks <= limits.num_blocks and n <= limits.max_num_seqs
        waits = self.scheduler.stats().waiting
        try:
            self.bench.add(
                name,
                prompt,
                max_tokens,
                salt=request["salt"],
                n=n,
                priority=request["priority"],
                timeout=request["timeout"],
                prompt_logprobs=request["prompt_logprobs"],
                use_beam_search=request["beams"] and n > 1,
            )
        except (ContextLengthExceeded, InvalidRequest):
            assert not fits
        except DeadlineExceeded:
            assert request["timeout"]
        except QueueFull as error:
            assert waits >= self.bench.settings.max_queue and error.retry_after_s >= 1
        else:
            assert fits
            for i in range(n):
                self.wanted[name if n == 1 else f"{name}/{i}"] = (prompt, request)

    @rule(steps=st.integers(1, 6), prepare=st.booleans())
    def step(self, steps, prepare):
        for _ in range(steps):
            self.bench.take(self.scheduler.expire())
            head = self.scheduler.running[0] if self.scheduler.running else None
            decided = self.scheduler.planner.rows or self.scheduler.kv.host.num_transfers
            before = self.progress(head)
            prompts, queue = self.prompts_under_way()
            stepped = self.bench.step(self.scheduler.prepare if prepare else lambda: None)
            assert stepped or not self.scheduler.has_requests, "requests are left but nothing is planned"
            if prompts is not None and not self.blocks_ran_out and stepped:
                self.check_shares(prompts, queue)
            waits = not self.bench.executor.plans or not self.bench.executor.plans[-1].rows
            if head in self.scheduler.running[:1] and not (
                prepare or decided or waits or self.scheduler.kv.host.num_transfers
            ):
                assert self.progress(head) > before, "the first in order always progresses"

    def prompts_under_way(self):
        """Who could compute several tokens now, with how many: of the running, and the first that waits if
        there are seats for it. And how many wait. None where that is only seen when the step is decided, or
        a part of it is decided already.
        """
        running, waiting, self.blocks_ran_out = self.scheduler.running, self.scheduler.waiting, False
        if self.scheduler.planner.rows or any(group.unshared_prompt_is_computed for group in running):
            return None, 0
        left = [
            (request, group.tokens_to_plan(request))
            for group in running
            for request in group.active
            if request.transfer is None
        ]
        seats = self.bench.settings.max_num_seqs - sum(group.seats for group in running)
        self.waited = [group.lead for group in waiting[:1]]
        for group in waiting[:1]:
            if group.seats <= seats and not group.swapped:
                left.append((group.lead, group.tokens_to_plan(group.lead)))
        return [(request, need) for request, need in left if need > 1], len(waiting)

    def check_shares(self, prompts, queue):
        """Each prompt got all it needed or its share, less what short ones before it took."""
        settings = self.bench.settings
        rows = {row.request_id: row for row in self.bench.executor.plans[-1].rows}
        names = {request.request_id for request, _ in prompts}
        decodes = sum(len(row.token_ids) == 1 and name not in names for name, row in rows.items())
        share = (settings.max_num_batched_tokens - decodes) // (len(prompts) + min(2, queue) or 1)
        for request, need in prompts if settings.enable_chunked_prefill else ():
            row = rows.get(request.request_id)
            if row and request in self.waited:  # it found the tokens before
                need -= row.start
            found = row is None and request.num_computed_tokens > 0 and request in self.waited
            if not (request.finished or request.transfer is not None or found):
                assert (len(row.token_ids) if row else 0) >= min(need, share)
            share -= need if need <= self.scheduler.planner.threshold else 0

    @staticmethod
    def progress(group):
        """Grows with every token that is computed or drawn and every sequence that ends."""
        if group is None:
            return ()
        ended = sum(one.finished for one in group.requests)
        if group.search:  # beams come and go, in each step
            return (
                ended,
                len(group.search.beams[0].token_ids),
                sum(one.drawn is not None for one in group.members),
                sum(one.num_computed_tokens for one in group.members),
            )
        left = [one for one in group.requests if not one.finished]
        return ended, sum(len(one.token_ids) + one.num_computed_tokens for one in left)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data):
        self.bench.abort(data.draw(st.sampled_from(sorted(self.wanted))))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), requests=st.lists(REQUEST, max_size=2))
    def things_happen_while_a_step_runs(self, data, requests):
        def before_and_after_the_next_is_prepared():
            for request in requests[:1]:
                self.add_one(request)
            if data.draw(st.booleans()):
                self.bench.abort(data.draw(st.sampled_from(sorted(self.wanted))))
            self.scheduler.prepare()
            for request in requests[1:]:
                self.add_one(request)
            for name in data.draw(st.lists(st.sampled_from(sorted(self.wanted)), max_size=3)):
                self.bench.abort(name)

        self.bench.step(before_and_after_the_next_is_prepared)

    @precondition(lambda self: self.scheduler.has_requests)
    @rule(data=st.data())
    def a_row_fails(self, data):
        if self.scheduler.roster.requests:
            self.bench.executor.faulty.add(data.draw(st.sampled_from(sorted(self.scheduler.roster.requests))))

    @rule(prepare=st.booleans())
    def a_step_breaks_off(self, prepare):
        self.scheduler.schedule()
        if prepare:
            self.scheduler.prepare()
        self.bench.take(self.scheduler.lose_step())

    @rule()
    def reset_prefix_cache(self):
        self.scheduler.reset_prefix_cache()

    @invariant()
    def every_block_has_the_owners_that_tables_name(self):
        pool = self.scheduler.kv.pool
        held = [0] * pool.num_blocks
        for group in (*self.scheduler.running, *self.scheduler.waiting):
            for request in (*group.members, *group.spare):
                assert request in group.active or not any(request.block_tables)
                for table in request.block_tables:
                    for block in table:
                        if block != NO_BLOCK:
                            held[block] += 1
        assert all(block.ref_count >= count for block, count in zip(pool.blocks, held, strict=True))
        idle = not self.scheduler.kv.host.num_transfers and not self.scheduler.planner.rows
        if idle and not self.scheduler.kv._copies:
            assert [block.ref_count for block in pool.blocks] == held
        for group in self.scheduler.waiting:
            assert not any(table for request in group.members for table in request.block_tables)

    @invariant()
    def what_waits_is_counted(self):
        waiting = self.scheduler.planner.waiting
        assert waiting.seats == sum(group.seats for group in waiting.groups)
        assert waiting.swapped == sum(group.seats for group in waiting.groups if group.swapped)
        assert waiting.tokens == sum(group.tokens_left() for group in waiting.groups)

    @invariant()
    def limits_hold_and_each_queue_is_in_order(self):
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert sum(group.seats for group in running) <= self.bench.settings.max_num_seqs
        for groups in (running, waiting):
            assert [group.order for group in groups] == sorted(group.order for group in groups)
        for plan in self.bench.executor.plans[-1:]:
            assert plan.num_tokens <= self.bench.settings.max_num_batched_tokens
            assert len(plan.rows) <= self.bench.settings.max_num_seqs

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        self.bench.run()
        for name, (prompt, request) in self.wanted.items():
            self.check(name, prompt, request)
        stats = self.scheduler.stats()
        event(f"swapped {stats.preemptions_by_swap > 0}")
        event(f"recomputed {stats.preemptions > stats.preemptions_by_swap}")
        event(f"hit {stats.prefix_cache_hits > 0}, drafts held {stats.accepted_draft_tokens > 0}")
        assert stats.running == stats.waiting == stats.waiting_tokens == stats.kv_usage == 0
        assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.num_blocks

    def check(self, name, prompt, request):
        model, outputs = self.bench.executor, self.bench.outputs[name]
        sample, max_tokens = int(name.partition("/")[2] or 0), request["max_tokens"]
        beams = request["beams"] and request["n"] > 1
        made, endings = self.bench.tokens(name), [output.finish_reason for output in outputs]
        assert endings and endings[-1] and not any(endings[:-1]), "it ends once"
        if beams:
            alone = model.beams_alone(prompt, max_tokens, request["n"], [EOS])[sample]
        else:
            alone = model.alone(prompt, max_tokens, [EOS], sample)
        if endings[-1] == "error":
            assert beams or alone[: len(made)] == made
        elif endings[-1] == "abort":
            assert alone[: len(made)] == made and (not outputs[-1].stop_reason or request["timeout"])
        else:
            assert made == alone, f"{name}: not the same as alone"
            assert endings[-1] == ("stop" if made[-1] == EOS else "length")
            if request["prompt_logprobs"] and sample == 0:
                scores = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
                assert scores == [model.prompt_logprobs_alone(prompt, 2)]


def test_random_workloads_give_each_request_what_it_gives_alone(bench):
    run_state_machine_as_test(
        lambda: SchedulerMachine(bench),
        settings=settings(max_examples=150, stateful_step_count=40, deadline=None),
    )


def test_whoever_is_before_it_a_prompt_gets_its_share_of_each_step(bench):
    @settings(max_examples=60, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 80), min_size=2, max_size=6),
        decodes=st.integers(0, 2),
        budget=st.integers(4, 40),
        threshold=st.sampled_from([0, 1, 5]),
    )
    def run(lengths, decodes, budget, threshold):
        machine = SchedulerMachine(bench)
        machine.start(
            num_blocks=300, block_size=4, max_num_seqs=8, budget=budget, chunked=True, caching=False,
            specs=[FULL], max_queue=12, policy="fcfs", mode="auto", host=0, offload=False, drafts=0,
            threshold=threshold, transfer_steps=0, max_model_len=200,
        )  # fmt: skip
        for i in range(decodes):
            machine.bench.add(f"decodes {i}", [i], max_tokens=30, ignore_eos=True)
            machine.step(1, False)
        for i, length in enumerate(lengths):
            machine.bench.add(f"prompt {i}", [i + 9] * length, max_tokens=3)
        while machine.scheduler.has_requests:
            machine.step(1, False)

    run()
