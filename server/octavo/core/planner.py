"""Which tokens of which sequences the next step computes, and who has to give way when blocks run out.

There is no prefill or decode phase. Each sequence has ``num_computed_tokens`` chasing its tokens, and each
step hands out one budget of tokens (``octavo.core.budget``): to running groups in order of (priority,
arrival), then to those that wait, in the same order. Prefix hits, chunks of a long prompt and groups that
come back are all that one rule.

A waiting group enters only with room for all tokens that it has by now, beside what those before it were
promised, so that nobody is let in to be thrown out at once. Blocks themselves are taken chunk by chunk. When
they run out the last group in order gives up all its own and waits in its place; whose rows are planned for
the step is no victim any more. The first group is a victim of nobody, and alone it fits, so it always
progresses: a step may at most have to wait for a transfer that still holds blocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TypeAlias

from octavo.core import preemption
from octavo.core.budget import QUEUE_TURNS, StepBudget
from octavo.core.group import Group, Planned
from octavo.core.kv_cache import KVCache
from octavo.core.prefill_rate import PrefillRate
from octavo.core.queue import Queue
from octavo.core.request import Request
from octavo.core.settings import SchedulerSettings

RESERVE_SHARE = 100  # one block in so many stays free on admission, for running sequences to grow into

_seats = attrgetter("seats")

Work: TypeAlias = tuple[Group, list[tuple[Request, int]] | None]  # tokens left of members; None: one decodes


class Planner:
    """Groups that run and that wait, each in order, and ``rows``, what is decided of the next step.

    ``block_bytes``: what swapping one block copies.
    """

    def __init__(
        self, settings: SchedulerSettings, kv: KVCache, rate: PrefillRate, *, block_bytes: int
    ) -> None:
        self.kv = kv
        self.running: list[Group] = []
        self.waiting = Queue()
        self.rows: list[Planned] = []
        self.copy_rate = preemption.CopyRate()
        self.preemptions: dict[preemption.Means, int] = {"recompute": 0, "swap": 0}
        self.block_bytes = block_bytes
        self._settings = settings
        self._rate = rate
        self._reserve = kv.pool.num_blocks // RESERVE_SHARE
        self.threshold = settings.long_prefill_token_threshold or settings.max_num_batched_tokens // 4
        self._prefilling: list[Group] = []  # running groups with a prompt under way
        self._preempted = False

    # Groups come and go

    def enqueue(self, group: Group) -> None:
        """Let a group wait in its place."""
        group.running = False
        self.waiting.add(group)

    def remove(self, group: Group) -> None:
        """A group is gone; its members hold nothing any more."""
        (self.running if group.running else self.waiting).remove(group)

    def requeue(self, group: Group, *, trusted: bool = True) -> None:
        """Send a group back to wait, without what it has computed."""
        self.remove(group)
        self._give_up(group, trusted=trusted)
        self.enqueue(group)

    def _give_up(self, group: Group, *, trusted: bool = True) -> None:
        for member in group.active:
            self.kv.free(member, trusted=trusted)
        group.unshare()
        group.swapped = False

    def tokens_under_way(self) -> int:
        """Tokens to compute of prompts that are begun."""
        left = (group.tokens_left() - len(group.members) for group in self._prefilling if group.members)
        return sum(max(0, count) for count in left)

    # A step

    def plan(self, *, early: bool) -> None:
        """Decide rows for all that has none yet. ``early``: while a step is under way whose result is not
        known; then it goes no further than the first group whose next tokens depend on that, and stops
        where somebody would have to be preempted.
        """
        self._drop_rows_of_the_ended()
        work, decodes, prefills, whole = self._work(early)
        settings = self._settings
        seats = 0
        if whole and self.waiting:
            ended = sum(row.request.finished for row in self.rows)  # their rows are still of the step
            seats = settings.max_num_seqs - count(self.running) - ended
        budget = StepBudget(
            settings.max_num_batched_tokens - sum(row.end - row.start for row in self.rows),
            decodes,
            prefills + self._queue_turns(seats),
            self.threshold,
            settings.enable_chunked_prefill,
        )
        self._preempted = False
        size = self.kv.block_size
        for group, left in work:
            if not group.running:
                continue
            request = group.alone if left is None else None
            if request and request.num_computed_tokens < request.room and not request.snapshot_due:
                if budget.decode():  # it writes on in a block of its own
                    end = request.num_computed_tokens + 1
                    self._decide(request, end, register=end % size == 0)
            elif not self._plan_group(group, left or self._left(group), budget, early):
                return
        if not self._preempted:
            self._admit(budget, seats, early)
        if settings.enable_chunked_prefill and budget.left:
            self._extend(budget)

    def _drop_rows_of_the_ended(self) -> None:
        """Others may count on the blocks that a known row fills; an unknown one is for its sequence alone."""
        gone = [row for row in self.rows if not row.known and row.request.finished]
        if not gone:
            return
        self.rows = [row for row in self.rows if row.known or not row.request.finished]
        for row in gone:
            row.group.planned = False
        for row in self.rows:  # of other members
            row.group.planned = True

    def _work(self, early: bool) -> tuple[list[Work], int, int, bool]:
        """What running groups could compute; how many sequences decode and how many are amid a prompt; and
        whether these are all groups.
        """
        work: list[Work] = []
        decodes = prefills = 0
        self._prefilling = [group for group in self._prefilling if group.planned and group.members]
        for group in self.running:
            if group.planned:
                continue
            if early and group.open_ended:
                return work, decodes, prefills, False
            if (one := group.alone) is not None and one.transfer is None:
                left = len(one.token_ids) + one.pending - one.num_computed_tokens
                if left == 1 and (not one.pending or len(one.token_ids) + 1 < one.max_total_tokens):
                    work.append((group, None))
                    decodes += 1
                    continue
            if group.unshared_prompt_is_computed:
                self.share_prompt(group)
            if members := self._left(group):
                work.append((group, members))
                short = sum(left == 1 for _, left in members)
                decodes += short
                prefills += len(members) - short
                if not group.shared or len(members) > 1 or short == 0:
                    self._prefilling.append(group)
        return work, decodes, prefills, True

    def _left(self, group: Group) -> list[tuple[Request, int]]:
        """The members that can compute something, and how many tokens."""
        left = [(request, group.tokens_to_plan(request)) for request in group.active]
        return [(request, count) for request, count in left if count > 0 and request.transfer is None]

    def _plan_group(
        self, group: Group, left: Sequence[tuple[Request, int]], budget: StepBudget, early: bool
    ) -> bool:
        """Plan what the budget gives a group, if there are blocks; False where planning has to stop."""
        taken = []
        total = 0
        for request, need in left:
            count = budget.decode() if need == 1 else budget.prefill(need)
            if count:
                total += count
                taken.append((request, request.num_computed_tokens + count))
            elif not self._settings.enable_chunked_prefill:
                self._preempted = True  # nobody enters before a prompt that waits for a whole step
        for request, end in taken:
            while not self.kv.grow(request, end):
                if early:
                    return False
                if not self._make_room(group):
                    budget.give(total)
                    return True
        for request, end in taken:
            self._decide(request, end, register=True)
        return True

    def _decide(self, request: Request, end: int, *, register: bool) -> None:
        start = request.num_computed_tokens
        request.num_computed_tokens = end
        known = end <= len(request.token_ids)
        if register and known:
            self.kv.register(request)
        request.planned = planned = Planned(request, start, end, known)
        request.group.planned = True
        self.rows.append(planned)

    def _extend(self, budget: StepBudget) -> None:
        """Give what is left over to long prompts, in order, as far as there are blocks."""
        for group in self._prefilling:
            for request in group.active:
                row = request.planned
                if row is None or not (count := budget.rest(max(0, request.num_tokens - row.end))):
                    continue
                request.snapshot_due = False  # it goes on in the same step
                if self.kv.grow(request, row.end + count, row.start):
                    row.end = request.num_computed_tokens = row.end + count
                    self.kv.register(request)
                else:
                    budget.give(count)

    # Who enters

    def _admit(self, budget: StepBudget, seats: int, early: bool) -> None:
        while self.waiting and budget.left and self.waiting.groups[0].seats <= seats:
            group = self.waiting.groups[0]
            if group.lead.transfer is not None or not self._enter(group, budget, seats):
                return
            seats -= group.seats
            self.waiting.remove(group)
            group.running = True
            insort(self.running, group, key=Group.get_order)
            if not group.planned and group.lead.transfer is None:  # all it had is there again
                left = self._left(group)
                budget.set_aside(sum(need == 1 for _, need in left))
                self._prefilling.append(group)
                self._plan_group(group, left, budget, early)

    def _queue_turns(self, seats: int) -> int:
        """As how many prompts those that wait for so many free seats count."""
        return max(0, min(QUEUE_TURNS, len(self.waiting), seats))

    def _enter(self, group: Group, budget: StepBudget, seats: int) -> bool:
        lead, free = group.lead, 0
        if self.running:
            promised = (self._promised(each, each.lead.num_computed_tokens) for each in self._prefilling)
            free = self._reserve + sum(promised)
        if group.swapped:
            group.swapped = not self.kv.swap_in(group.active, free)
            return not group.swapped
        self.kv.name_blocks(lead)
        hit = self.kv.find_prefix(lead)
        count = budget.prefill(lead.num_tokens - hit.num_tokens, self._queue_turns(seats))
        if not count:
            return False
        end = hit.num_tokens + count
        if self.running:
            free += self._promised(group, end)
        if not self.kv.admit(lead, hit, free, end):
            budget.give(count)
            return False
        if lead.num_cached_tokens < 0:
            lead.num_cached_tokens = hit.num_tokens
        self._prefilling.append(group)
        if lead.transfer is None:
            self._decide(lead, end, register=True)
        else:
            budget.give(count)
        return True

    def _promised(self, group: Group, computed: int) -> int:
        """Blocks that a group will still take for tokens it has by now, its first member having come to
        ``computed``.
        """
        need, lead = self.kv.blocks_needed, group.lead
        if group.shared and len(group.members) == 1:
            return max(0, need(len(lead.token_ids)) - need(computed))
        if group.shared:
            return sum(
                max(0, need(len(one.token_ids)) - need(one.num_computed_tokens)) for one in group.members
            )
        prompt = lead.num_prompt_tokens
        whole = prompt // self.kv.block_size * self.kv.block_size
        own = sum(need(len(one.token_ids) + 1) - need(whole) for one in group.members)
        return max(0, need(whole) - need(computed)) + own

    def share_prompt(self, group: Group) -> None:
        """Fork all members from the first, which has computed the prompt."""
        lead = group.lead
        for member in group.members[1:]:
            self.kv.fork(lead, member)
        group.share()

    # Who gives way

    def _make_room(self, group: Group) -> bool:
        """Take the blocks of the last group that can be a victim; False where ``group`` has to wait."""
        victim = next(
            (each for each in reversed(self.running) if not each.planned and each.lead.transfer is None), None
        )
        if victim is None or (victim is group and (victim is not self.running[-1] or len(self.running) == 1)):
            return False
        self._preempted = True
        self.running.remove(victim)
        means = self._means(victim)
        if means == "swap" and self.kv.swap_out(victim.active):
            victim.swapped = True
        else:
            means = "recompute"
            self._give_up(victim)
        self.preemptions[means] += 1
        for member in victim.active:
            member.preemptions += 1
        self.enqueue(victim)
        return victim is not group

    def _means(self, group: Group) -> preemption.Means:
        if self._settings.preemption_mode != "auto":
            return self._settings.preemption_mode
        computed = [member.num_computed_tokens for member in group.active]
        prompt = min(group.lead.num_prompt_tokens, computed[0])
        kept = 0
        if self._settings.enable_prefix_caching:
            found = prompt if len(computed) > 1 else computed[0]
            others = len(self.running)
            kept = preemption.tokens_kept(found, self.kv.pool.num_free, others, self.kv.block_size)
        again = prompt + sum(count - prompt for count in computed) - kept
        size = len(group.blocks()) * self.block_bytes
        return preemption.choose(again, self._rate.tokens_per_s, size, self.copy_rate.bytes_per_s)


def count(groups: Iterable[Group]) -> int:
    """The sequences of groups."""
    return sum(map(_seats, groups))
