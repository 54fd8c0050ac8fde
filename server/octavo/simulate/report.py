"""A replay as figures, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.figures import picture, save, spread
from octavo.simulate.replay import Replay


def figures(run: Replay) -> dict[str, Any]:
    """What people ask of a serving run. Seconds, tokens a second, shares 0 .. 1."""
    ttft = [one.ttft for one in run.served]
    latency = [one.normalised_latency for one in run.served]
    prompt = sum(one.arrival.prompt_tokens for one in run.served)
    output = sum(one.arrival.output_tokens for one in run.served)
    usage = [sample.kv_usage for sample in run.samples]
    seconds = run.seconds or 1.0
    return {
        "requests": len(run.served),
        "refused": len(run.refused),
        "seconds": run.seconds,
        "requests_per_s": len(run.served) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
        "ttft_s": spread(ttft),
        "normalised_latency_s_per_token": spread(latency),
        "preemptions": run.samples[-1].preemptions if run.samples else 0,
        "cached_prompt_share": sum(one.cached_tokens for one in run.served) / max(1, prompt),
        "kv_usage_mean": sum(usage) / max(1, len(usage)),
        "kv_usage_max": max(usage, default=0.0),
        "slots_with_tokens": run.token_share,
        "running_mean": sum(sample.running for sample in run.samples) / max(1, len(run.samples)),
        "running_max": max((sample.running for sample in run.samples), default=0),
        "waiting_max": max((sample.waiting for sample in run.samples), default=0),
        "steps": run.steps,
    }


def plot(run: Replay, path: Path) -> None:
    """Draw the run over time into a PNG: sequences, blocks in use, tokens made, time to first token."""
    figure, axes = picture(2, 2)
    times = [sample.time for sample in run.samples]
    axes[0][0].plot(times, [sample.running for sample in run.samples], label="running")
    axes[0][0].plot(times, [sample.waiting for sample in run.samples], label="waiting")
    axes[0][0].set_ylabel("sequences")
    axes[0][0].legend()
    axes[0][1].plot(times, [100 * sample.kv_usage for sample in run.samples])
    axes[0][1].set_ylabel("blocks in use, %")
    axes[1][0].plot(times, [sample.generated for sample in run.samples], label="tokens made")
    preempted = axes[1][0].twinx()
    preempted.plot(times, [sample.preemptions for sample in run.samples], color="tab:red")
    axes[1][0].set_ylabel("tokens made")
    preempted.set_ylabel("preemptions", color="tab:red")
    axes[1][1].scatter([one.arrival.time for one in run.served], [one.ttft for one in run.served], s=6)
    axes[1][1].set_ylabel("time to first token, s")
    for axis in axes.flat:
        axis.set_xlabel("time, s")
    save(figure, path)


def plot_sweep(runs: dict[int, dict[str, Any]], path: Path) -> None:
    """Draw a sweep over block sizes: latency, and how much of the memory in use holds tokens."""
    figure, axes = picture(1, 2)
    sizes = list(runs)
    latency = [run["normalised_latency_s_per_token"]["mean"] for run in runs.values()]
    axes[0].plot(sizes, latency, marker="o")
    axes[0].set_ylabel("mean normalised latency, s/token")
    axes[1].plot(sizes, [100 * run["slots_with_tokens"] for run in runs.values()], marker="o")
    axes[1].set_ylabel("allocated slots that hold tokens, %")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("block size, tokens")
    save(figure, path)
