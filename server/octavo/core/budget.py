"""How one step's budget of tokens is shared out.

Each sequence that decodes gets one token first. What they leave, R tokens, is for m prompts, in order. One
with no more than ``threshold`` tokens left is short and gets all it needs; a longer one gets at most an equal
share of what is there when its turn comes. So whatever is ahead of it, a prompt is sure to get

    min(what it needs, R // m - S)

tokens in the step, S being what the short prompts before it take (and at least one token when it is the first
of all). Long prompts never take the share of others, and short ones hold up those behind them once each: in
the step that finishes them. The queue counts as up to two prompts, so that those under way leave room for who
waits. A second pass gives what is left over to the long ones, in order.
"""

from __future__ import annotations

QUEUE_TURNS = 2  # those in the queue that prompts under way leave a share for


class StepBudget:
    """The tokens of one step, ``total`` of them, for so many ``decodes`` and ``prefills`` (the queue's among
    them). Without ``chunked`` a prompt gets all its tokens or none.
    """

    def __init__(self, total: int, decodes: int, prefills: int, threshold: int, chunked: bool) -> None:
        self._decode = min(decodes, total - (total > 0 and prefills > 0))
        self._prefill = total - self._decode
        self._turns = prefills
        self._threshold = threshold
        self._chunked = chunked

    @property
    def left(self) -> int:
        """Tokens that nobody has."""
        return self._decode + self._prefill

    def decode(self) -> bool:
        """One token for a sequence that decodes; False when there is none left."""
        if not self._decode:
            return False
        self._decode -= 1
        return True

    def set_aside(self, decodes: int) -> None:
        """Let so many sequences more decode, as far as the prompts have left something."""
        count = min(decodes, self._prefill)
        self._prefill -= count
        self._decode += count

    def prefill(self, need: int, turns: int | None = None) -> int:
        """How many of the ``need`` tokens of the prompt whose turn it is; ``turns``: it and those behind."""
        turns = self._turns if turns is None else turns
        self._turns = max(1, turns - 1)
        share = need if need <= self._threshold else max(1, self._prefill // turns)
        count = min(need, share, self._prefill)
        if not self._chunked and count < need:
            count = need if need <= self._prefill else 0
        self._prefill -= count
        return count

    def rest(self, need: int) -> int:
        """Of what is left over, up to ``need`` tokens."""
        count = min(need, self.left)
        self.give(-count)
        return count

    def give(self, count: int) -> None:
        """Tokens that are not used after all (or, negative, are)."""
        self._prefill += count
        if self._prefill < 0:
            self._decode, self._prefill = self._decode + self._prefill, 0
