"""Who may join the queue: it is bounded, and nobody waits who cannot start in time."""

from __future__ import annotations

from octavo.errors import DeadlineExceeded, QueueFull

MAX_RETRY_AFTER_S = 60  # a longer guess at when the queue has room is not worth telling


def check_queue(
    *,
    max_queue: int,
    max_queue_tokens: int,
    waiting: int,
    seats: int,
    tokens: int,
    new_tokens: int,
    rate: float,
) -> None:
    """Raise ``QueueFull`` where ``max_queue`` sequences wait, or ``new_tokens`` more would be above
    ``max_queue_tokens`` (0: no limit).

    A client request that finds one place is taken whole: were its samples to need a place each, single
    sequences would always be before it at a full queue. ``waiting`` sequences are there, ``seats`` of them
    could run; ``tokens`` are to be computed before the last of them starts, at ``rate`` tokens a second
    (0.0: unknown).
    """
    wait = retry_after(tokens, rate)
    if waiting - seats >= max_queue:
        raise QueueFull(
            f"{waiting} requests wait (max-queue {max_queue}): try again later", retry_after_s=wait
        )
    if max_queue_tokens and tokens and tokens + new_tokens > max_queue_tokens:
        raise QueueFull(
            f"{tokens} tokens wait, {new_tokens} would join them (max-queue-tokens {max_queue_tokens}): "
            "try again later",
            retry_after_s=wait,
        )


def check_deadline(deadline: float | None, *, now: float, tokens: int, rate: float) -> None:
    """Raise ``DeadlineExceeded`` for a request that would start after its deadline (seconds, as ``now``)."""
    if deadline is None:
        return
    start = now + (tokens / rate if rate else 0.0)
    if start >= deadline:
        wait = (
            f"{tokens} tokens wait before it, about {start - now:.1f} s" if now < deadline else "it is past"
        )
        raise DeadlineExceeded(
            f"the request cannot start within its timeout of {max(0.0, deadline - now):.1f} s more: {wait}",
            retry_after_s=retry_after(tokens, rate),
        )


def retry_after(tokens: int, rate: float) -> int:
    """Seconds after which the queue of now is gone, as far as is known."""
    guess = tokens / rate if rate else 1
    return max(1, min(MAX_RETRY_AFTER_S, round(guess)))
