"""What a request's rules do to its logits: penalties, biases, bans and grammars, one row at a time.

The order is vLLM's: grammar and allowed tokens, bad words, bias, penalties; the ban of stop tokens comes
last. What is counted over a sequence is kept from step to step and taken further by its new tokens; it can
always be made anew from the tokens, so losing it costs time only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import LogitRules

Row: TypeAlias = NDArray[np.float32]

_BANNED = np.float32(-np.inf)
_MAX_REPETITION = 1e30  # as a factor or a divisor it leaves every logit finite


class Past(NamedTuple):
    """What the draws of one row follow: the tokens of its sequence, then drafts taken to come after them.

    ``tokens`` may be the live list; a draw at ``position`` follows the first ``position`` of both.
    """

    request_id: str
    tokens: list[int]
    drafts: Sequence[int] = ()


class RuleFault(Exception):
    """A row that its request's rules leave without a token; the message says why."""


class Matcher(Protocol):
    """Follows one output through a grammar (``octavo.sampling.grammar``)."""

    def follow(self, output: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Go to the state after ``output`` and ``drafts``, whatever came before. Raises ``RuleFault`` where
        they do not match.
        """

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens may come next [V]. Raises ``RuleFault``."""


class Grammars(Protocol):
    """Makes matchers."""

    def matcher(self, grammar: str) -> Matcher:
        """One at the start of the grammar. Raises ``RuleFault``."""


class _Counts:
    """The distinct tokens of a sequence, and how often each occurs in its output."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.length = len(prompt)
        self._ids = np.unique(np.array(prompt, dtype=np.int64))
        self._output: Row = np.zeros(len(self._ids), dtype=np.float32)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}

    def add(self, tokens: Sequence[int]) -> None:
        """Output tokens that follow."""
        self.length += len(tokens)
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                room = max(16, place)
                self._ids = np.concatenate([self._ids, np.empty(room, dtype=np.int64)])
                self._output = np.concatenate([self._output, np.zeros(room, dtype=np.float32)])
            self._ids[place] = token
            self._output[place] += 1

    def followed_by(self, tokens: Sequence[int]) -> _Counts:
        """A copy that goes on with these."""
        other = _Counts(())
        other.length, other._places = self.length, dict(self._places)
        other._ids, other._output = self._ids.copy(), self._output.copy()
        other.add(tokens)
        return other

    def penalise(self, row: Row, rules: LogitRules) -> None:
        distinct = len(self._places)
        ids, output = self._ids[:distinct], self._output[:distinct]
        values = row[ids]
        if rules.repetition_penalty != 1.0:
            penalty = min(max(rules.repetition_penalty, 1 / _MAX_REPETITION), _MAX_REPETITION)
            repetition = np.float32(penalty)
            values = np.where(values > 0, values / repetition, values * repetition)
        values -= np.float32(rules.frequency_penalty) * output
        values -= np.float32(rules.presence_penalty) * (output > 0)
        row[ids] = values


class _Sequence:
    """The rules of one sequence and what was counted for them so far."""

    def __init__(self, rules: LogitRules, tokens: list[int], grammars: Grammars | None) -> None:
        self._rules, self._tokens, self._taken = rules, tokens, len(tokens)
        self._counts: _Counts | None = None
        self._matcher: Matcher | None = None
        if rules.presence_penalty or rules.frequency_penalty or rules.repetition_penalty != 1.0:
            self._counts = _Counts(tokens[: rules.num_prompt_tokens])
        if rules.grammar is not None:
            if grammars is None:
                raise RuleFault("this engine has no grammars")
            self._matcher = grammars.matcher(rules.grammar)
        self._bias = np.fromiter(rules.logit_bias, dtype=np.int64)
        self._biases = np.fromiter(rules.logit_bias.values(), dtype=np.float32)
        self._allowed = np.array(rules.allowed_token_ids, dtype=np.int64)
        self._ends = np.array(rules.banned_until, dtype=np.int64)
        self._longest_word = max(map(len, rules.bad_words), default=0)

    def goes_on_as(self, rules: LogitRules, tokens: list[int]) -> bool:
        """Whether what was counted is a beginning of ``tokens`` under the same rules."""
        if rules is not self._rules and rules != self._rules:
            return False
        taken = self._taken
        if tokens is not self._tokens and tokens[:taken] != self._tokens[:taken]:
            return False
        self._tokens, self._taken = tokens, len(tokens)
        return len(tokens) >= taken

    def apply(self, row: Row, drafts: Sequence[int]) -> None:
        """Change ``row`` [V], the logits after the sequence and ``drafts``. Raises ``RuleFault``."""
        rules = self._rules
        if self._matcher is not None:
            self._matcher.follow(self._tokens[rules.num_prompt_tokens :], drafts)
            row[~self._matcher.allowed(len(row))] = _BANNED
        if len(self._allowed):
            kept = row[self._allowed]
            row.fill(_BANNED)
            row[self._allowed] = kept
        if self._longest_word:
            row[self._words_about_to_end(drafts)] = _BANNED
        if len(self._bias):
            row[self._bias] += self._biases
        if self._counts is not None:
            self._counts.add(self._tokens[self._counts.length :])
            counts = self._counts.followed_by(drafts) if drafts else self._counts
            counts.penalise(row, rules)
        if len(self._tokens) + len(drafts) - rules.num_prompt_tokens < rules.min_tokens:
            self._ban_ends(row)

    def _words_about_to_end(self, drafts: Sequence[int]) -> list[int]:
        tail = [*self._tokens[-self._longest_word :], *drafts]
        words = self._rules.bad_words
        return [word[-1] for word in words if len(word) == 1 or tuple(tail[1 - len(word) :]) == word[:-1]]

    def _ban_ends(self, row: Row) -> None:
        """No stop token yet, unless the other rules leave nothing else (a complete grammar)."""
        kept = row[self._ends]
        row[self._ends] = _BANNED
        if row.max() == _BANNED:
            row[self._ends] = kept


class RuleBook:
    """Applies rules, and keeps what was counted for the ``capacity`` sequences seen last."""

    def __init__(self, capacity: int, grammars: Grammars | None = None) -> None:
        self._capacity, self._grammars = capacity, grammars
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()

    def changed(self, row: Row, rules: LogitRules, past: Past, position: int) -> Row:
        """The logits [V] of the draw at ``position`` as the rules change them; ``row`` stays as it is.

        Raises ``RuleFault`` when the tokens so far leave the grammar.
        """
        sequence = self._sequence(rules, past)
        new = row.copy()
        sequence.apply(new, past.drafts[: position - len(past.tokens)])
        return new

    def _sequence(self, rules: LogitRules, past: Past) -> _Sequence:
        sequence = self._sequences.get(past.request_id)
        if sequence is None or not sequence.goes_on_as(rules, past.tokens):
            sequence = self._sequences[past.request_id] = _Sequence(rules, past.tokens, self._grammars)
        self._sequences.move_to_end(past.request_id)
        while len(self._sequences) > self._capacity:
            self._sequences.popitem(last=False)
        return sequence
