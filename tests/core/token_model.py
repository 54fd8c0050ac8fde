"""A model without arithmetic, and an executor whose KV cache holds prefixes: a wrong block shows at once."""

from __future__ import annotations

from collections import deque

from octavo.core.beam_search import BeamSearch
from octavo.core.plan import NO_BLOCK, RowResult, StepPlan, StepResult, TokenLogprobs, TransferDone

SIZE = 2**61


def extend(digest: int, token: int) -> int:
    return (digest * 6364136223846793005 + token * 2654435761 + 1442695040888963407) % SIZE


class TokenModel:
    """What each sample draws, and each token's log probability, as pure functions of all tokens before."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def draw(self, digest: int, sample: int) -> int:
        return ((digest + sample * 0x9E3779B97F4A7C15) % SIZE >> 20) % self.vocab_size

    def logprob(self, digest: int, token: int) -> float:
        return -float(extend(digest, token + 1000) >> 40) / (1 << 18)

    def logprobs(self, digest: int, token: int, k: int) -> TokenLogprobs:
        scores = sorted((-self.logprob(digest, each), each) for each in range(self.vocab_size))
        rank = next(i for i, (_, each) in enumerate(scores) if each == token)
        top = [(each, -score) for score, each in scores[:k]]
        return TokenLogprobs(self.logprob(digest, token), rank + 1, top)

    def digest(self, tokens: list[int]) -> int:
        digest = 1
        for token in tokens:
            digest = extend(digest, token)
        return digest

    def alone(self, prompt: list[int], max_tokens: int, eos=(), sample=0) -> list[int]:
        """What a request gives when nothing else exists."""
        digest, out = self.digest(prompt), []
        while len(out) < max_tokens and not (out and out[-1] in eos):
            out.append(self.draw(digest, sample))
            digest = extend(digest, out[-1])
        return out

    def beams_alone(
        self, prompt, max_tokens, n, eos=(), length_penalty=1.0, early_stopping=False
    ) -> list[list[int]]:
        search = BeamSearch(n, max_tokens, frozenset(eos), length_penalty, early_stopping)
        while not search.done:
            digests = [self.digest(prompt + beam.token_ids) for beam in search.beams]
            search.step([self.logprobs(digest, 0, search.width) for digest in digests])
        return [result.beam.token_ids for result in search.results]

    def prompt_logprobs_alone(self, prompt: list[int], k: int) -> list[TokenLogprobs]:
        digests = [self.digest(prompt[:end]) for end in range(1, len(prompt))]
        return [self.logprobs(digest, token, k) for digest, token in zip(digests, prompt[1:], strict=True)]


class TokenExecutor(TokenModel):
    """Executes plans over a simulated cache: each slot of a page holds the KV group that wrote it and the
    digest of the whole prefix up to its token; of a state group, the first slot holds that of the last token.

    Reading a slot that does not hold just this prefix fails: a block was shared wrongly, freed too early or
    never written. ``sequences`` maps request ids to the tokens that each truly has (of beams nothing is known
    beforehand). Transfers take ``transfer_steps`` steps, and copy at their end.
    """

    def __init__(self, vocab_size, num_blocks, block_size, specs, host_blocks=0) -> None:
        super().__init__(vocab_size)
        self.block_size, self.specs = block_size, specs
        self.pages = [[None] * block_size for _ in range(num_blocks)]
        self.host = [[None] * block_size for _ in range(host_blocks)]
        self.sequences: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.faulty: set[str] = set()
        self.plans: list[StepPlan] = []
        self.transfers: deque = deque()
        self.transfer_steps = 1

    def start(self, name: str, tokens: list[int], known: bool = True) -> None:
        self.prompts[name] = len(tokens)
        if known:
            self.sequences[name] = list(tokens)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        sources, targets = {source for source, _ in plan.copies}, [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets) and not sources & set(targets), "copies go in any order"
        for source, target in plan.copies:
            self.pages[target] = list(self.pages[source])
        self.transfers += [(plan.step, transfer) for transfer in plan.transfers]
        states = [self._states(row) for row in plan.rows]
        digests = [self._write(row, state) for row, state in zip(plan.rows, states, strict=True)]
        results = [self._result(row, each) for row, each in zip(plan.rows, digests, strict=True)]
        return StepResult(plan.step, results, self._transfers_done(plan))

    def _transfers_done(self, plan: StepPlan) -> list[TransferDone]:
        done: list[TransferDone] = []
        while self.transfers:
            step, transfer = self.transfers[0]
            if plan.step - step < self.transfer_steps and (plan.rows or done):
                break
            self.transfers.popleft()
            for device, host in transfer.blocks:
                if transfer.load:
                    self.pages[device] = list(self.host[host])
                else:
                    self.host[host] = list(self.pages[device])
            done.append(TransferDone(transfer.id, 0.001))
        return done

    def _place(self, table: list[int], position: int) -> tuple[list, int]:
        block = table[position // self.block_size]
        assert block != NO_BLOCK, f"position {position} is kept nowhere"
        return self.pages[block], position % self.block_size

    def _groups(self, row):
        return [
            (group, spec, table)
            for group, (spec, table) in enumerate(zip(self.specs, row.block_tables, strict=True))
        ]

    def _states(self, row) -> dict:
        """What the state groups hold when the step begins."""
        return {
            group: self.pages[table[0]][0] for group, spec, table in self._groups(row) if spec.kind == "state"
        }

    def _write(self, row, states) -> list[int]:
        """Write the row's tokens; returns the digests of all prefixes of its sequence, drafts included."""
        name, truth = row.request_id, self.sequences.get(row.request_id)
        assert row.token_ids, "a row computes something"
        if truth is not None:
            assert truth[row.start : row.start + len(row.token_ids)] == row.token_ids, f"{name}: other tokens"
            before = truth[: row.start]
            digests, digest = [], 1
            for token in before:
                digests.append(digest := extend(digest, token))
        else:
            places = (self._place(row.block_tables[0], position) for position in range(row.start))
            digests = [page[slot][1] for page, slot in places]
        for token in row.token_ids + row.drafts:
            digests.append(extend(digests[-1] if digests else 1, token))
        for group, spec, table in self._groups(row):
            if spec.kind == "state":
                good = not row.start or states[group] == (group, digests[row.start - 1])
                assert good, f"{name} goes on from another state"
                self.pages[table[0]][0] = (group, digests[-1])
                continue
            for position in range(row.start, len(digests)):
                page, slot = self._place(table, position)
                page[slot] = (group, digests[position])
        return digests

    def _result(self, row, digests) -> RowResult:
        name, end = row.request_id, row.start + len(row.token_ids)
        for group, spec, table in self._groups(row):
            for position in range(spec.first_kept(row.start), len(digests)) if spec.kind != "state" else ():
                page, slot = self._place(table, position)
                assert page[slot] == (group, digests[position]), (
                    f"{name} reads another prefix at position {position} of group {group}"
                )
        if name in self.faulty:
            return RowResult(name, [], error="logits are NaN")
        scores = None
        if row.prompt_logprobs is not None:
            positions = range(row.start, min(end, self.prompts[name] - 1))
            scores = [self.logprobs(digests[p], row.history[p + 1], row.prompt_logprobs) for p in positions]
        if not row.samples:
            return RowResult(name, [], prompt_logprobs=scores)
        assert all(spec.position == end for spec in row.samples)
        if name not in self.sequences:  # a beam
            looked_at = [self.logprobs(digests[-1], 0, spec.logprobs) for spec in row.samples]
            return RowResult(name, [0], looked_at, prompt_logprobs=scores)
        drawn = []
        if row.drafts:
            for digest, draft in zip(digests[end - 1 :], [*row.drafts, None], strict=True):
                drawn.append(self.draw(digest, row.samples[0].sample_index))
                if drawn[-1] != draft:
                    break
            self.sequences[name] += drawn
            return RowResult(name, drawn)
        for spec in row.samples:
            owner = f"{name.split('/')[0]}/{spec.sample_index}" if "/" in name else name
            assert len(self.sequences[owner]) == end, f"{owner} draws its next token"
            drawn.append(self.draw(digests[-1], spec.sample_index))
            self.sequences[owner].append(drawn[-1])
        return RowResult(name, drawn, prompt_logprobs=scores)
