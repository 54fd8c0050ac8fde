"""A load's outcomes as figures, as text, and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.client.bench.load import Outcome
from octavo.figures import picture, save, spread

SHARES = (0.5, 0.9, 0.95, 0.99)
LATENCIES = {
    "ttft_ms": "time to first token",
    "itl_ms": "between tokens",
    "tpot_ms": "a token after the first",
    "e2e_ms": "whole answer",
}


def figures(outcomes: Sequence[Outcome], slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Milliseconds, tokens, requests and tokens a second. Requests that failed count as failures and in
    ``seconds``, nowhere else. ``slo``: bounds in ms by the names of ``LATENCIES``, all of which a good
    request keeps (its ``itl_ms`` is its mean).
    """
    good = [one for one in outcomes if one.error is None]
    failed = [one for one in outcomes if one.error is not None]
    seconds = max((o.ended for o in outcomes), default=0) - min((o.sent for o in outcomes), default=0)
    per = 1 / seconds if seconds else 0.0
    prompt, output = (sum(getattr(o, name) for o in good) for name in ("prompt_tokens", "output_tokens"))
    cached = sum(one.cached_tokens for one in good)
    lists = [latencies(one) for one in good]
    found: dict[str, Any] = {
        "requests": len(outcomes),
        "succeeded": len(good),
        "failed": len(failed),
        "errors": dict(Counter(str(one.error) for one in failed)),
        "error_messages": {str(one.error): one.message for one in failed},
        "seconds": seconds,
        "peak_in_flight": max((count for _, count in in_flight(outcomes)), default=0),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": cached / prompt if prompt else 0.0,
        "output_tokens": output,
        "requests_per_s": len(good) * per,
        "output_tokens_per_s": output * per,
        "total_tokens_per_s": (prompt + output) * per,
        "tokens_counted_by": dict(Counter(one.counted_by for one in good)),
        **{name: spread([v for each in lists for v in each[name]], SHARES) for name in LATENCIES},
    }
    if slo:
        kept = sum(_keeps(each, slo) for each in lists)
        found["goodput"] = {"slo": dict(slo), "requests_per_s": kept * per, "share": kept / len(outcomes)}
    return found


def latencies(one: Outcome) -> dict[str, list[float]]:
    """In ms; several gaps, one of each other (none where it does not exist)."""
    tpot = one.tpot
    values = {"ttft_ms": [one.ttft], "itl_ms": one.gaps, "tpot_ms": [] if tpot is None else [tpot]}
    return {name: [1000 * v for v in found] for name, found in {**values, "e2e_ms": [one.e2e]}.items()}


def _keeps(found: Mapping[str, list[float]], slo: Mapping[str, float]) -> bool:
    return all(sum(found[name]) <= bound * len(found[name]) for name, bound in slo.items())


def in_flight(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """How many requests were under way, from each moment at which that changed."""
    changes = sorted([(o.sent, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes])
    counts, now = [], 0
    for time, change in changes:
        now += change
        counts.append((time, now))
    return counts


def table(found: Mapping[str, Any]) -> str:
    """The figures for a person."""
    lines = [
        f"requests   {found['succeeded']} answered, {found['failed']} failed, in {found['seconds']:.2f} s; "
        f"at most {found['peak_in_flight']} at a time",
        f"tokens     {found['prompt_tokens']} in ({found['cached_share']:.1%} cached), "
        f"{found['output_tokens']} out",
        f"a second   {found['requests_per_s']:.2f} requests, {found['output_tokens_per_s']:.1f} output tokens"
        f", {found['total_tokens_per_s']:.1f} tokens in all",
    ]
    if good := found.get("goodput"):
        bounds = ", ".join(f"{name.removesuffix('_ms')} {bound:g} ms" for name, bound in good["slo"].items())
        lines.append(
            f"goodput    {good['requests_per_s']:.2f} requests a second ({good['share']:.1%}) within {bounds}"
        )
    names = ["mean", *(f"p{100 * share:g}" for share in SHARES)]
    lines.append(f"\n{'ms':<26}" + "".join(f"{name:>10}" for name in names))
    for key, title in LATENCIES.items():
        if values := found[key]:
            lines.append(f"{title:<26}" + "".join(f"{values[name]:>10.1f}" for name in names))
    if guessed := sum(found["tokens_counted_by"].get(way, 0) for way in ("text", "chunks")):
        lines.append(
            f"\n{guessed} answers did not say which chunk held how many tokens: times between are shared out"
        )
    for error, count in found["errors"].items():
        lines.append(f"\n{count} failed: {error}, the last: {found['error_messages'][error]}")
    return "\n".join(lines)


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw a PNG: latencies as shares of requests (or tokens) that were faster, and the load over time."""
    figure, axes = picture(2, 2)
    good = [one for one in outcomes if one.error is None]
    lists = [latencies(one) for one in good]
    start = min((one.sent for one in outcomes), default=0.0)
    for axis, names in ((axes[0][0], ("ttft_ms", "e2e_ms")), (axes[0][1], ("itl_ms", "tpot_ms"))):
        for name in names:
            values = sorted(v for each in lists for v in each[name])
            shares = [100 * (i + 1) / len(values) for i in range(len(values))]
            axis.step(values, shares, where="post", label=LATENCIES[name])
        axis.set_xlabel("ms")
        axis.set_ylabel("faster, %")
        axis.legend()
    moments = in_flight(outcomes)
    axes[1][0].step([t - start for t, _ in moments], [count for _, count in moments], where="post")
    axes[1][0].set_ylabel("requests under way")
    seconds = Counter(int(time - start) for one in good for time, count in one.chunks for _ in range(count))
    axes[1][1].step(sorted(seconds), [seconds[second] for second in sorted(seconds)], where="post")
    axes[1][1].set_ylabel("output tokens a second")
    for axis in axes[1]:
        axis.set_xlabel("time, s")
    save(figure, path)
