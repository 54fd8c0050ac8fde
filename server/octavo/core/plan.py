"""The step plan: what the scheduler asks of an executor, and what comes back. Plain values, no tensors.

What is made once a row and step is kept from the garbage collector (``gc=False``): it lies in no cycle, and
hundreds a step would set the collector off in every one.
"""

from __future__ import annotations

import msgspec

NO_BLOCK = -1  # in a block table: nothing is kept there (it slid out of a window), and nothing reads it


class LogitRules(msgspec.Struct, frozen=True, kw_only=True):
    """What changes a row's logits before a token is drawn; one object a request, None where nothing does.

    Penalties follow the OpenAI API and vLLM: presence and frequency count output tokens, repetition counts
    prompt and output. ``banned_until`` are tokens not drawn while the output is shorter than ``min_tokens``.
    ``bad_words`` are token sequences whose last token is not drawn after the others. ``grammar`` is a
    compiled-form grammar (``octavo.sampling.grammar``) that the output has to follow.
    """

    num_prompt_tokens: int  # of the row's ``history``; the rest is output
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    banned_until: tuple[int, ...] = ()
    grammar: str | None = None


class SampleSpec(msgspec.Struct, frozen=True, gc=False):
    """How to draw one token of one row.

    The draw is a pure function of (seed, sample_index, position): the same whatever the batch, and replayable
    elsewhere. ``position`` is the index of the token to be drawn within the whole sequence, prompt included.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    sample_index: int
    position: int
    logprobs: int | None = None
    min_p: float = 0.0
    rules: LogitRules | None = None


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step: tokens to compute at positions ``start``, ``start + 1``, ...

    ``block_tables`` holds one list of physical block numbers per KV group, long enough for the last token
    computed; ``NO_BLOCK`` where a group keeps nothing. A state group has one block, read where ``start`` > 0
    and overwritten with the state after the row's last token.

    ``samples`` are the draws from the logits after the last token: none while a chunk does not reach the end
    of the sequence, one as a rule, one for each sample where a prompt with n > 1 ends.

    ``drafts`` are speculative tokens, computed after ``token_ids`` in the same pass; then ``samples`` is one
    spec, whose position is that of the first draft, and the token at each draft's place is drawn from the
    target by its own random number: drafts equal to the draws are accepted, the first other draw ends the
    row's tokens.

    ``history`` is all tokens of the sequence before the drafts, where a rule, a grammar, a draft model or
    ``prompt_logprobs`` need them. ``prompt_logprobs`` (k alternatives) asks for the log probabilities of the
    tokens that follow each of ``token_ids`` within the prompt.

    ``propose`` is how many tokens a draft model shall propose to follow the row's draws
    (``RowResult.drafts``; fewer where ``block_tables[0]`` has no room for the draws and all but the last of
    the proposals). It computes only rows with ``propose``: what they compute and what is drawn, after the
    tokens from position ``drafted`` to ``start``, which it has not computed yet and finds in ``history``.
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_tables: list[list[int]]
    samples: list[SampleSpec] = []
    drafts: list[int] = []
    history: list[int] | None = None
    prompt_logprobs: int | None = None
    propose: int = 0
    drafted: int = -1  # -1: all before ``start``


class Transfer(msgspec.Struct, frozen=True):
    """Blocks to move between the pool and the host tier: (device block, host block) pairs.

    Saves read blocks as all earlier steps left them. Until a transfer is reported done nothing else writes
    into its blocks, and no row or copy reads the device blocks of a load.
    """

    id: int
    load: bool  # host to device; else device to host
    blocks: list[tuple[int, int]]


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass. ``copies`` are (source, destination) blocks to copy first (copy on write).

    ``transfers`` start with this step and run beside it. A plan without rows waits for a transfer to end.
    """

    step: int
    rows: list[Row]
    copies: list[tuple[int, int]] = []
    transfers: list[Transfer] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) + len(row.drafts) for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities at one position: the drawn token's, its rank (1 = most likely), the top k."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """What one row gave.

    ``token_ids``: one for each of its samples, or with drafts the accepted ones and one more; ``logprobs``
    likewise, where asked for. ``prompt_logprobs``: one for each of the row's tokens whose successor is in the
    prompt. ``drafts``: what a draft model proposes to follow. ``error`` is set when this row alone failed
    (for instance NaN logits); ``refused``: by its request's own settings.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    refused: bool = False
    prompt_logprobs: list[TokenLogprobs] | None = None
    drafts: list[int] = []


class TransferDone(msgspec.Struct, frozen=True):
    """A transfer that has ended, and how long the copying took."""

    id: int
    seconds: float


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced, rows in the order of the plan, and the transfers that ended meanwhile."""

    step: int
    rows: list[RowResult]
    done: list[TransferDone] = []
