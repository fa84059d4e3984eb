"""Summary: every figure against its definition, on exchanges that are known."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import UsageError
from specdec.evals.client.exchange import Exchange
from specdec.evals.load.client_watch import ClientBusy
from specdec.evals.load.extent import Extent
from specdec.evals.load.goals import Goals
from specdec.evals.load.level import Level
from specdec.evals.load.load_run import LoadRun, Sent
from specdec.evals.load.loops import run_level
from specdec.evals.load.server_counts import ServerCounts, client_counts, disagreement
from specdec.evals.load.summary import (
    DETAILS,
    Described,
    peak_concurrency,
    summarize,
    without_details,
)
from specdec.metrics import SpeculationStats
from tests.evals.virtual_time import VirtualLoop, exchange, run_virtually, server_of

IDLE = ClientBusy(0.0, 0.0, 0.0, 0.1)
PLAIN = Described("m", "", "openai-chat", 1.0)

# What `vllm bench serve --save-result --save-detailed` writes, for the figures that a script reads.
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    *("max_concurrent_requests", "input_lens", "output_lens", "ttfts", "itls", "errors"),
    *("start_times", "latencies", "queue_times"),
    *(
        f"{figure}_{name}_ms"
        for figure in ("mean", "median", "std", "p50", "p90", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
}


def run_of(
    *exchanges: Exchange, begin: float = 0.0, late_s: float = 0.0, num_warmup: int = 0
) -> LoadRun:
    """A level of these, of which the first are not counted."""
    sent = [
        Sent(index, one.sent_at - late_s, one, index >= num_warmup)
        for index, one in enumerate(exchanges)
    ]
    end = max(one.end_at for one in sent if one.is_counted)
    return LoadRun(Level(rate=1.0), tuple(sent), begin, end, IDLE)


def test_figures_of_two_answers() -> None:
    found = summarize(
        run_of(
            exchange((0.1, 1), (0.3, 2), (0.4, 1), end_s=0.5),
            exchange((0.3, 2), (0.7, 1), sent_at=1.0, end_s=1.0),
        ),
        PLAIN,
    )
    assert found["duration"] == 2.0
    assert (found["completed"], found["failed"], found["overloaded"]) == (2, 0, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 7)
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["std_ttft_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == pytest.approx(1e3 * (0.3 / 3 + 0.4 / 2) / 2)
    assert found["mean_itl_ms"] == pytest.approx(1e3 * (0.1 + 0.1 + 0.1 + 0.4) / 4)
    assert found["median_itl_ms"] == found["p50_itl_ms"] == pytest.approx(100)
    assert found["mean_e2el_ms"] == pytest.approx(750)
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 3.5
    assert found["total_token_throughput"] == 13.5
    assert found["max_output_tokens_per_s"] == 4
    assert found["max_concurrent_requests"] == 1
    assert found["request_goodput"] is None
    assert found["cost_per_million_output_tokens"] is None
    assert set(found) >= VLLM_KEYS
    assert not set(without_details(found)) & set(DETAILS)
    json.dumps(found, allow_nan=False)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.floats(0.01, 2), st.lists(st.floats(0.001, 1), max_size=9)),
        min_size=1,
        max_size=20,
    )
)
def test_percentiles_are_those_of_the_best_known_benchmark(
    drawn: list[tuple[float, float, list[float]]],
) -> None:
    exchanges, ttfts, itls, tpots = [], [], [], []
    for sent_at, first, gaps in drawn:
        times = np.cumsum([first, *gaps]).tolist()
        exchanges.append(exchange(*((at, 1) for at in times), sent_at=sent_at))
        ttfts.append(first)
        itls += np.diff(times).tolist()
        tpots += [(times[-1] - first) / len(gaps)] if gaps else []
    found = summarize(run_of(*exchanges, begin=-1.0), PLAIN)
    for name, values in (("ttft", ttfts), ("itl", itls), ("tpot", tpots)):
        for percent in (50, 90, 99):
            figure = found[f"p{percent}_{name}_ms"]
            expected = 1e3 * np.percentile(values, percent) if values else None
            assert figure == (None if expected is None else pytest.approx(expected))
    duration = max(one.sent_at + one.end_s for one in exchanges) + 1.0
    assert found["output_throughput"] == pytest.approx(sum(map(len, itls_of(drawn))) / duration)
    assert found["request_throughput"] == pytest.approx(len(drawn) / duration)


def itls_of(drawn: Sequence[tuple[float, float, list[float]]]) -> list[list[float]]:
    """A time for each token."""
    return [[first, *gaps] for _, first, gaps in drawn]


def test_one_that_follows_another_is_not_with_it() -> None:
    """Also where the sum of two times is not quite the third."""
    sent = [
        Sent(0, 0.1, exchange((0.2, 1), sent_at=0.1), True),
        Sent(1, 0.3, exchange((0.2, 1), sent_at=0.3), True),
        Sent(2, 0.3, exchange((0.1, 1), sent_at=0.3), True),
    ]
    assert sent[0].end_at > 0.3
    assert peak_concurrency(sent) == 2


@pytest.mark.parametrize("first_s", [0.125, 0.375, 0.49])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_rates_are_those_of_the_steady_state(concurrency: int, first_s: float) -> None:
    """Three tokens per half second and client, however much of it the first token takes."""

    async def work(loop: VirtualLoop) -> LoadRun:
        send = server_of(loop, [(first_s, 0.5 - first_s)])
        level, extent = Level(concurrency=concurrency), Extent(requests=4 * concurrency)
        return await run_level(level, send, extent, clock=loop.time)

    found = summarize(run_virtually(work), PLAIN)
    assert found["max_concurrency"] == found["max_concurrent_requests"] == concurrency
    assert found["request_rate"] == "inf"
    num_rounds = found["duration"] / 0.5
    assert num_rounds == pytest.approx(round(num_rounds)), "from the end of answers to another"
    assert found["output_throughput"] == pytest.approx(6 * concurrency)
    assert found["request_throughput"] == pytest.approx(2 * concurrency)


def test_what_is_not_counted_has_no_times_but_its_tokens() -> None:
    found = summarize(
        run_of(
            exchange((9.0, 1), (10.5, 3), end_s=10.5),
            exchange((1.0, 1), (2.0, 1), sent_at=10.0),
            begin=10.0,
            num_warmup=1,
        ),
        PLAIN,
    )
    assert found["num_prompts"] == found["completed"] == 1
    assert found["mean_ttft_ms"] == 1000
    assert found["total_output_tokens"] == 2
    assert found["duration"] == 2.0
    assert found["output_throughput"] == (3 + 2) / 2
    assert found["total_token_throughput"] == (3 + 2 + 10) / 2, "one prompt was read meanwhile"
    assert found["request_throughput"] == 1.0
    assert found["num_sent"] == 2


def test_what_was_refused_or_failed_is_counted_apart() -> None:
    found = summarize(
        run_of(
            exchange((0.5, 1), (1.0, 1)),
            exchange(sent_at=0.1, outcome="overloaded", num_prompt=0, error="full"),
            exchange((0.2, 1), sent_at=0.2, outcome="error", error="gone"),
            exchange(sent_at=0.3, outcome="error", num_prompt=0, error="gone"),
        ),
        PLAIN,
    )
    assert found["num_prompts"] == 4
    assert (found["completed"], found["overloaded"], found["failed"]) == (1, 1, 2)
    assert found["mean_ttft_ms"] == 500
    assert found["errors"] == ["", "full", "gone", "gone"]
    assert found["output_lens"] == [2, 0, 1, 0]
    assert found["total_output_tokens"] == 2


def test_nothing_that_came_leaves_no_figure() -> None:
    found = summarize(run_of(exchange(end_s=1.0, outcome="error", num_prompt=0)), PLAIN)
    assert found["mean_ttft_ms"] is None
    assert found["p99_itl_ms"] is None
    assert found["output_throughput"] == 0
    json.dumps(found, allow_nan=False)


def test_without_counts_there_is_no_itl_but_a_throughput() -> None:
    found = summarize(
        run_of(exchange((0.5, None), (1.0, None), (1.5, None), (2.0, None), num_output=8)), PLAIN
    )
    assert found["mean_itl_ms"] is None
    assert found["num_without_counts"] == 1
    assert found["mean_tpot_ms"] == pytest.approx(1e3 * 1.5 / 7)
    assert found["output_throughput"] == 4.0


def test_goodput_is_of_answers_that_keep_every_goal() -> None:
    """By each goal alone, and all: 4 answers in 4 s."""
    answers = (
        exchange((0.1, 1), (0.3, 2), end_s=0.3),  # ttft 100, tpot 100, e2el 300
        exchange((0.2, 1), (0.4, 1), end_s=0.4),  # 200, 200, 400
        exchange((1.0, 1), end_s=1.0),  # 1000, a single token, 1000
        exchange((0.1, 1), (4.0, 39), end_s=4.0),  # 100, 100, 4000
        exchange((0.1, 1), outcome="error", end_s=0.1),
    )
    for text, good in (
        ("ttft:100", 2),
        ("ttft:200", 3),
        ("tpot:100", 3),
        ("tpot:99.9", 1),
        ("e2el:1000", 3),
        ("ttft:1000,tpot:200,e2el:400", 2),
        ("ttft:1", 0),
    ):
        described = Described("m", "", "openai-chat", 1.0, goals=Goals.parse(text), price=3.6)
        found = summarize(run_of(*answers), described)
        assert found["request_goodput"] == pytest.approx(good / 4), text
        assert found["intervals"]["good_share"]["value"] == good / 5
        tokens = found["output_throughput"]
        assert found["cost_per_million_output_tokens"] == pytest.approx(1000 / tokens)
    assert not Goals.parse("ttft:1000").is_met(answers[-1]), "it did not come whole"
    uncounted = exchange((0.1, None), num_output=0)
    assert not Goals.parse("tpot:1000").is_met(uncounted), "nobody knows"


def test_times_from_when_a_request_was_due() -> None:
    found = summarize(run_of(exchange((0.5, 1), (1.0, 1), sent_at=2.0), late_s=0.25), PLAIN)
    assert found["mean_client_queue_time_ms"] == pytest.approx(250)
    assert found["mean_ttft_ms"] == pytest.approx(500)
    assert found["mean_ttft_including_client_queue_ms"] == pytest.approx(750)
    assert found["mean_e2el_including_client_queue_ms"] == pytest.approx(1250)
    assert found["queue_times"] == pytest.approx([0.25])


def test_tokens_per_step_are_of_all_steps() -> None:
    stats = []
    for accepted in ((3, 0), (1, 1, 1)):
        total = SpeculationStats()
        for number in accepted:
            total.observe_step((("s",),) * 4, (("s",),) * number)
        stats.append(total)
    found = summarize(run_of(*(exchange((1.0, 2), stats=one) for one in stats)), PLAIN)
    assert found["tokens_per_step"] == pytest.approx(1 + 6 / 5)
    assert found["acceptance_rate"] == pytest.approx(6 / 20)


METRICS = """
# TYPE vllm:request_success counter
vllm:request_success_total{finished_reason="stop",model_name="m"} 3.0
vllm:request_success_total{finished_reason="length",model_name="m"} 4.0
vllm:request_success_total{finished_reason="abort",model_name="m"} 9.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{model_name="m"} 700.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 50.0
vllm:generation_tokens_total{engine="1",model_name="m"} 20.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 7.0
vllm:time_to_first_token_seconds_count{model_name="m"} 7.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 3.5
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model_name="m"} 10.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 40.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 12.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 8.0
"""


def test_metrics_of_a_server_are_read_by_name() -> None:
    found = ServerCounts.read(METRICS)
    assert found is not None
    assert (found.requests, found.prompt_tokens, found.output_tokens) == (7, 700, 70)
    assert found.times["ttft"] == (3.5, 7)
    assert found.as_json()["mean_ttft_ms"] == 500
    assert "mean_itl_ms" not in found.as_json()
    assert found.spec_decode() == {
        "spec_decode_acceptance_rate": 30.0,
        "spec_decode_acceptance_length": 2.2,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 40,
        "spec_decode_accepted_tokens": 12,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.4],
    }
    nothing = found.minus(found)
    assert nothing.requests == nothing.output_tokens == nothing.drafts == 0
    assert nothing.accepted_at == (0, 0)
    assert nothing.spec_decode() == {}


@pytest.mark.parametrize("text", [None, "", "<html>not found</html>", "up 1\n"])
def test_other_servers_count_nothing(text: str | None) -> None:
    assert ServerCounts.read(text) is None


def test_a_disagreement_is_told_in_numbers() -> None:
    client = client_counts(run_of(exchange((0.1, 1), (0.2, 4))).sent)
    assert (client.requests, client.prompt_tokens, client.output_tokens) == (1, 10, 5)
    assert client.times["itl"] == pytest.approx((0.1, 4))
    assert disagreement(client, client) is None
    told = disagreement(ServerCounts(1, 10, 6), client)
    assert told is not None
    assert "6 output tokens against 5" in told
    assert "requests" not in told


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:0", "ttft:-1", "itl:5", "ttft:x", "ttft:nan", "tpot:5,,"]
)
def test_goals_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--goodput takes milliseconds by name"):
        Goals.parse(text)


def test_a_busy_client_is_told_of() -> None:
    assert IDLE.warning(0.0) is None
    assert "40 ms late" in (ClientBusy(0, 0.04, 0.1, 0.1).warning(0.0) or "")
    assert "used 90% of a core" in (ClientBusy(0, 0, 0, 0.9).warning(0.0) or "")
    assert "sent 30 ms late" in (IDLE.warning(0.03) or "")
