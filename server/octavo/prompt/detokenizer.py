"""Text of a growing sequence of tokens, without decoding it again and again, and without cutting a character
in two.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from octavo.prompt.renderer import PromptRenderer


class Detokenizer:
    """Turns tokens into text as they come: ``push`` what is new, ``flush`` at the end.

    Everything pushed and flushed, joined, equals decoding the output's tokens at once. Bytes of an unfinished
    character are held back, and so is a run of byte tokens (``<0xE2>``) until another token ends it, since
    only the whole run says whether it is valid. Bytes that the prompt ends in complete a character with the
    first output tokens.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        prompt_ids: Sequence[int],
        skip_special: bool = True,
        shown: Collection[int] = (),
    ) -> None:
        """``shown``: special tokens that are text nevertheless."""
        self._pieces = renderer.pieces
        self._skipped = self._pieces.special.difference(shown) if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._run = bytearray()  # byte tokens not yet decoded
        self._adopt(prompt_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens; it may be empty."""
        return "".join(map(self._one, token_ids))

    def flush(self) -> str:
        """What was held back, incomplete bytes as U+FFFD. The sequence is over."""
        return self._end_run() + self._decoder.decode(b"", True)

    def _one(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        data, is_byte = self._pieces.piece(token_id)
        if is_byte:
            self._run += data
            return ""
        return self._end_run() + self._decoder.decode(data)

    def _end_run(self) -> str:
        """As the ``tokenizers`` library does: a run that is not valid UTF-8 gives U+FFFD for each of its
        bytes.
        """
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _adopt(self, prompt_ids: Sequence[int]) -> None:
        """Start with the bytes of a character that the prompt leaves unfinished."""
        tail = b""
        for token_id in reversed(prompt_ids[-4:]):  # a character has at most four bytes
            data, is_byte = self._pieces.piece(token_id)
            if not is_byte and not self._pieces.byte_level:
                break
            tail = data + tail
            if len(tail) >= 4:
                break
        held = _unfinished(tail)
        if self._pieces.byte_level:
            self._decoder.decode(held)
        else:
            self._run += held


def _unfinished(data: bytes) -> bytes:
    """The start of a character at the end of ``data``; empty when it ends with a whole one, or with invalid
    bytes.
    """
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead < 0x80:
            return b""
        if lead >= 0xC0:
            decoder = codecs.getincrementaldecoder("utf-8")()
            try:
                decoder.decode(data[-length:])
            except UnicodeDecodeError:
                return b""
            return decoder.getstate()[0]
    return b""
