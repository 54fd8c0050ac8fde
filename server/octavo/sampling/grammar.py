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

_NO_FIRST_TOKEN = "NoExtensionBias"  # llguidance's name for it
KEPT = 64  # grammars whose built form is kept


class _Path:
    """A matcher that only goes forward, and the tokens that it has taken.

    llguidance can go back, but may then give its last mask for a state that only looks like that mask's own.
    """

    def __init__(self, matcher: LLMatcher, tokens: list[int]) -> None:
        self.matcher, self.tokens = matcher, tokens

    def copy(self) -> _Path:
        return _Path(self.matcher.deep_copy(), self.tokens.copy())

    def leads_to(self, tokens: Sequence[int]) -> bool:
        return list(tokens[: len(self.tokens)]) == self.tokens


class GrammarMatcher:
    """Where one output, and drafts after it, stand in their grammar. ``start`` is kept as it is."""

    def __init__(self, start: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._start, self._vocab_size = _Path(start, []), vocab_size
        self._eos = frozenset(eos_token_ids)
        self._output = self._start.copy()
        self._draft: _Path | None = None
        self._at, self._ended = self._output, False

    def follow(self, output: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Go to the state after ``output`` and ``drafts``, whatever came before. Raises ``RuleFault`` where
        they do not match.
        """
        if not self._output.leads_to(output):
            self._output = self._start.copy()
        self._go(self._output, output)
        if not drafts:
            return
        whole = [*output, *drafts]
        if self._draft is None or not self._draft.leads_to(whole):
            self._draft = self._output.copy()
        self._go(self._draft, whole)

    def _go(self, path: _Path, tokens: Sequence[int]) -> None:
        known = len(path.tokens)
        rest = list(itertools.takewhile(lambda token: token not in self._eos, tokens[known:]))
        taken = path.matcher.try_consume_tokens(rest)
        path.tokens += rest[:taken]
        place = known + taken
        self._at, self._ended = path, place < len(tokens)
        if taken < len(rest) or (self._ended and not path.matcher.is_accepting()):
            why = path.matcher.get_error()
            raise RuleFault(
                f"the output leaves its grammar at token {place} ({tokens[place]}) {why}".rstrip()
            )

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens may come next [V]; once the grammar is complete, those that end the output.

        Raises ``RuleFault`` when the grammar is too complex to go on here.
        """
        mask: NDArray[np.bool_] = np.zeros(vocab_size, dtype=np.bool_)
        if self._ended:
            mask[list(self._eos)] = True
            return mask
        words: NDArray[np.uint32] = np.zeros(-(-self._vocab_size // 32), dtype=np.uint32)
        matcher = self._at.matcher
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise RuleFault(f"the grammar cannot go on: {matcher.get_error()}")
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=self._vocab_size)[:vocab_size]
        mask[: len(bits)] = bits
        return mask


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
        return GrammarMatcher(built, self._tokenizer.vocab_size, self._eos)

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
        if fault.startswith(_NO_FIRST_TOKEN):
            fault = "no token can begin what it describes"
        if fault:
            raise InvalidRequest(f"the grammar cannot be used: {fault}", param="grammar")
        return matcher
