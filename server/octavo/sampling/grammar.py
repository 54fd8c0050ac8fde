"""Structured output: matchers that follow an output through its grammar, made off the step.

A grammar is a text in llguidance's own form, as ``octavo.sampling.grammar_compiler`` makes it. What is built
from it (a lexer and a parser over this model's tokens) is kept, and copied for each sequence.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.errors import InvalidRequest
from octavo.sampling.grammar_compiler import limits
from octavo.sampling.rules import RuleFault

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64  # grammars whose built form is kept


class GrammarMatcher:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos = frozenset(eos_token_ids)
        self._followed: list[int] = []
        self._ended = False

    def follow(self, output: Sequence[int]) -> None:
        """Go to the state after ``output``, forward or back. Raises ``RuleFault`` where it does not match."""
        same = _length_in_common(self._followed, output)
        if same < len(self._followed):
            self._matcher.rollback(len(self._followed) - same)
            del self._followed[same:]
        wanted = list(itertools.takewhile(lambda token: token not in self._eos, output[same:]))
        taken = self._matcher.try_consume_tokens(wanted)
        self._followed += wanted[:taken]
        self._ended = same + taken < len(output)
        if taken < len(wanted) or (self._ended and not self._matcher.is_accepting()):
            place = f"at token {same + taken} ({output[same + taken]})"
            raise RuleFault(f"the output leaves its grammar {place} {self._matcher.get_error()}".rstrip())

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens may come next [V]; once the grammar is complete, those that end the output.

        Raises ``RuleFault`` when the grammar is too complex to go on here.
        """
        if self._ended:
            mask = np.zeros(vocab_size, dtype=np.bool_)
            mask[list(self._eos)] = True
            return mask
        words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise RuleFault(f"the grammar cannot go on: {self._matcher.get_error()}")
        return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size).view(np.bool_)


def _length_in_common(one: list[int], other: Sequence[int]) -> int:
    if list(other[: len(one)]) == one:
        return len(one)
    return next(i for i, pair in enumerate(itertools.zip_longest(one, other)) if pair[0] != pair[1])


class Grammars:
    """Builds matchers for one model. Thread safe: grammars are built on a thread, matchers taken in the step.

    ``tokenizer_json`` is called once, when the first grammar comes. Ids that its tokenizer does not have are
    never allowed, though the model's ``vocab_size`` may hold some.
    """

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer_json, self._vocab_size, self._eos = tokenizer_json, vocab_size, list(eos_token_ids)
        self._threads = ThreadPoolExecutor(1, "grammar")
        self._lock = threading.Lock()
        self._built: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None

    def prepare(self, grammar: str) -> Future[LLMatcher]:
        """Begin to build what a grammar needs. The future holds ``InvalidRequest`` when it cannot be used."""
        with self._lock:
            future = self._built.get(grammar)
            if future is None:
                future = self._built[grammar] = self._threads.submit(self._build, grammar)
            self._built.move_to_end(grammar)
            while len(self._built) > KEPT:
                self._built.popitem(last=False)
            return future

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the start of the grammar, waiting for it where that was not prepared."""
        try:
            return GrammarMatcher(self.prepare(grammar).result().deep_copy(), self._eos)
        except InvalidRequest as error:
            raise RuleFault(error.message) from error

    def _build(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLTokenizer  # only who is asked for a grammar needs it

        if self._tokenizer is None:
            text = self._tokenizer_json()
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be used: {matcher.get_error()}", param="grammar")
        matcher.compute_bitmask()  # the first mask costs most
        return matcher
