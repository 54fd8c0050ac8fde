"""The simulator: the reference's figures, and the real scheduler on traces."""

from __future__ import annotations

import json
import statistics

import pytest

from octavo.cli import main
from octavo.core.settings import SchedulerSettings
from octavo.errors import ConfigError
from octavo.simulate import paper, report
from octavo.simulate.costs import Machine
from octavo.simulate.lengths import ALPACA, PAPER
from octavo.simulate.replay import replay
from octavo.simulate.trace import VOCABULARY, Arrival, draw, read

SMALL = Machine(kv_bytes=819_200 * 16 * 20)  # 20 blocks of 16


def settings(**values) -> SchedulerSettings:
    return SchedulerSettings(
        **{"max_model_len": 2048, "vocab_size": VOCABULARY, "max_queue": 10_000, **values}
    )


@pytest.fixture(scope="module")
def packings():
    return [paper.packings(5000, seed, 16) for seed in range(20)]


def test_each_figure_of_the_packing_is_within_five_percent_of_the_reference(packings):
    whole, paged = (paper.mean_packing(column) for column in zip(*packings, strict=True))
    assert (whole.token_share, whole.requests) == pytest.approx(paper.REFERENCE_CONTIGUOUS, rel=0.05)
    assert (paged.token_share, paged.requests, paged.lost_slots) == pytest.approx(
        paper.REFERENCE_PAGED, rel=0.05
    )


def test_requests_total_about_480_tokens_and_never_more_than_2048():
    import random

    drawn = [sum(PAPER.draw(random.Random(seed))) for seed in range(5000)]
    assert statistics.mean(drawn) == pytest.approx(480, rel=0.05)
    assert max(drawn) <= 2048 and min(drawn) >= 2


@pytest.mark.parametrize("samples", paper.SAMPLES)
def test_sharing_saves_just_the_blocks_that_the_reference_counts(samples):
    apart, shared, saved = paper.REFERENCE_SHARING[samples]
    assert paper.sharing(samples, 16, 300, 100) == (apart, shared)
    assert 1 - shared / apart == pytest.approx(saved, abs=0.0005)


def test_the_paper_command_prints_ours_beside_the_references(capsys):
    assert main(["simulate", "paper", "--seeds", "1", "--requests", "1000"]) == 0
    out = capsys.readouterr().out
    assert "97.9%" in out and "n = 6" in out and "60.0%" in out


def test_a_replay_serves_every_request_and_counts_its_tokens():
    arrivals = draw(ALPACA, 60, rate=50, seed=3)
    run = replay(arrivals, settings(), SMALL)
    assert len(run.served) == 60 and not run.refused
    assert all(one.finished >= one.first_token > one.arrival.time for one in run.served)
    assert run.samples[-1].generated == sum(one.output_tokens for one in arrivals)
    assert run.samples[-1].kv_usage == 0
    figures = report.figures(run)
    assert figures["output_tokens_per_s"] == pytest.approx(run.samples[-1].generated / run.seconds)
    assert 0 < figures["kv_usage_max"] <= 1 and figures["waiting_max"] > 0


def test_a_replay_is_the_same_each_time():
    arrivals = draw(ALPACA, 30, rate=50, seed=3)
    first, again = (report.figures(replay(arrivals, settings(), SMALL)) for _ in range(2))
    assert first == again


def test_equal_hash_ids_hit_the_prefix_cache():
    arrivals = [Arrival(0, 1024, 4, (7, 8)), Arrival(100, 1030, 4, (7, 8, 9)), Arrival(200, 1024, 4, (8, 7))]
    run = replay(arrivals, settings(), Machine())
    assert [one.cached_tokens for one in run.served] == [0, 1024, 0]


def test_what_can_never_fit_is_refused_and_the_others_are_served():
    run = replay([Arrival(0, 400, 10), Arrival(0, 30, 5)], settings(), SMALL)
    assert len(run.refused) == 1 and "320" in run.refused[0][1]
    assert len(run.served) == 1


def test_traces_of_both_forms_are_read(tmp_path):
    mooncake, azure = tmp_path / "a.jsonl", tmp_path / "b.csv"
    lines = [
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 20, "output_length": 7},
    ]
    mooncake.write_text("\n".join(map(json.dumps, lines)))
    assert read(mooncake) == [Arrival(0, 20, 7), Arrival(2, 600, 5, (1, 2))]
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.2799600,374,44\n2023-11-16 18:17:04.7799600,396,109\n"
    )
    assert read(azure) == [Arrival(0, 374, 44), Arrival(pytest.approx(1.5), 396, 109)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"timestamp": 1, "input_length": 5}', "line 1"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}\nnot json', "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,0,5", "line 2"),
        ("", "no requests"),
    ],
)
def test_a_bad_trace_is_refused_by_its_line(tmp_path, text, line):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=line):
        read(path)


def test_a_sweep_and_a_run_are_drawn_and_written(tmp_path, capsys):
    png, figures = tmp_path / "a.png", tmp_path / "a.json"
    common = ["--rate", "20", "--requests", "20", "--plot", str(png), "--json", str(figures)]
    assert main(["simulate", "trace", "alpaca", *common]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert json.loads(figures.read_text())["requests"] == 20
    assert main(["simulate", "trace", "alpaca", *common, "--sweep", "block-size"]) == 0
    assert "best" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trace", "alpaca"], "--rate"),
        (["trace", "/nowhere"], "/nowhere"),
        (["trace", "alpaca", "--rate", "0"], "rate is 0"),
        (["paper", "--block-size", "-1"], "block-size is -1"),
        (["trace", "alpaca", "--rate", "1", "--kv-bytes", "5"], "hold no block"),
    ],
)
def test_wrong_flags_end_with_one_line(args, message, capsys):
    assert main(["simulate", *args]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
