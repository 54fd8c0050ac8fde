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

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
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
        mask: NDArray[np.bool_] = np.zeros(vocab_size, dtype=np.bool_)
        if self._ended:
            mask[list(self._eos)] = True
            return mask
        words: NDArray[np.uint32] = np.zeros(-(-self._vocab_size // 32), dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise RuleFault(f"the grammar cannot go on: {self._matcher.get_error()}")
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=self._vocab_size)[:vocab_size]
        mask[: len(bits)] = bits
        return mask


def _length_in_common(one: list[int], other: Sequence[int]) -> int:
    if list(other[: len(one)]) == one:
        return len(one)
    return next(i for i, pair in enumerate(itertools.zip_longest(one, other)) if pair[0] != pair[1])


class Grammars:
    """Builds matchers for one model. Thread safe: grammars are built on a thread, matchers taken in the step.

    ``tokenizer_json`` is called once, when the first grammar comes: who asks for none pays nothing. Ids that
    the tokenizer does not have are never allowed.
    """

    def __init__(self, tokenizer_json: Callable[[], str], eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json, self._eos = tokenizer_json, list(eos_token_ids)
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
            built = self.prepare(grammar).result()
        except InvalidRequest as error:
            raise RuleFault(error.message) from error
        assert self._tokenizer is not None
        return GrammarMatcher(built.deep_copy(), self._tokenizer.vocab_size, self._eos)

    def _build(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLTokenizer  # only who is asked for a grammar needs it

        try:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(self._tokenizer_json(), eos_token=self._eos)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
            matcher.compute_bitmask()  # the first mask costs most
            fault = matcher.get_error()
        except BaseException as error:  # native code's panics too: they are this grammar's, not the engine's
            fault = str(error)
        if fault:
            raise InvalidRequest(f"the grammar cannot be used: {fault}", param="grammar")
        return matcher
