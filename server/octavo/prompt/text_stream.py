"""From a sequence's tokens to its text: detokenise, watch for stop strings, say where and why it ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from octavo.core.outputs import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.prompt.detokenizer import Detokenizer
from octavo.prompt.renderer import PromptRenderer
from octavo.prompt.stop import StopMatcher


class TextDelta(msgspec.Struct, frozen=True):
    """New text, and how many of the pushed tokens count (fewer than pushed when a stop string ended the
    sequence).
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class TextStream:
    """The text of one sequence. The server, streaming or not, and the offline API put answers together with
    it.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        shown: Collection[int] = (),
    ) -> None:
        """``shown``: special tokens that are text nevertheless."""
        self._detokenizer = Detokenizer(renderer, prompt_ids, sampling.skip_special_tokens, shown)
        self._stop = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._unwatched = sampling.min_tokens  # tokens in whose text no stop string is looked for
        self._show_stop_token = sampling.include_stop_str_in_output

    def push(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> TextDelta:
        """Text of these tokens. ``finish_reason`` is the engine's, with the sequence's last tokens.

        When the returned delta is finished though the engine's was not, a stop string matched: abort the
        request.
        """
        text = ""
        for index, token_id in enumerate(token_ids):
            last = finish_reason == "stop" and index == len(token_ids) - 1
            if last and not self._show_stop_token:
                break  # the token that ended the sequence is not part of the text
            new = self._detokenizer.push((token_id,))
            if self._unwatched:
                self._unwatched -= 1
                text += new
                continue
            text += self._stop.push(new)
            if self._stop.matched is not None:
                return TextDelta(text, index + 1, "stop", self._stop.matched)
        if finish_reason is None:
            return TextDelta(text, len(token_ids))
        text += self._stop.push(self._detokenizer.flush())
        if self._stop.matched is not None:
            return TextDelta(text, len(token_ids), "stop", self._stop.matched)
        return TextDelta(text + self._stop.flush(), len(token_ids), finish_reason, stop_reason)
