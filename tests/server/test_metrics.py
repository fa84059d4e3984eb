"""GET /metrics: what is scraped is what clients have seen, whatever became of their requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec.errors import EngineStopped
from specdec.server.engine_totals import EngineTotals, added
from tests.server.open_request import hang_up, send
from tests.server.real_engine import ask, serving_weights
from tests.server.scrape import Scrape
from tests.server.script import chat, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import RunningServer


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving_weights(tmp_path_factory.mktemp("weights")) as running:
        yield running


def test_the_counters_are_the_sums_of_what_clients_saw(real: RunningServer) -> None:
    before = Scrape(real)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda index: ask(real, index), range(12)))
    scrape = Scrape(real, before)
    figures = [answer.metrics["speculative_decoding"] for answer, _ in answers]

    def total(name: str) -> int:
        return sum(figure[name] for figure in figures)

    def by_source(name: str) -> dict[str, int]:
        return dict(sum((Counter(figure[name]) for figure in figures), Counter()))

    reasons = Counter(reason for _, reasons in answers for reason in reasons)
    assert set(reasons) == {"stop", "length"}
    assert scrape.by("finished_reason", "vllm:request_success_total") == reasons
    num_prompt = sum(answer.usage.prompt_tokens for answer, _ in answers)
    num_output = sum(answer.usage.completion_tokens for answer, _ in answers)
    assert scrape.value("vllm:prompt_tokens_total") == num_prompt
    assert scrape.value("vllm:prefix_cache_queries_total") == num_prompt
    assert scrape.value("vllm:prefix_cache_hits_total") == sum(
        answer.usage.prompt_tokens_details.cached_tokens for answer, _ in answers
    )
    assert scrape.value("vllm:generation_tokens_total") == num_output
    assert scrape.value("specdec:decode_steps_total") == total("num_spec_steps")
    spec = "vllm:spec_decode_num"
    assert scrape.value(f"{spec}_draft_tokens_total") == total("num_draft_tokens")
    num_accepted = scrape.value(f"{spec}_accepted_tokens_total")
    assert num_accepted == total("num_accepted_draft_tokens") > 0
    for what in ("drafted", "accepted"):
        by_drafter = scrape.by("drafter", f"specdec:{what}_tokens_total")
        assert by_drafter == by_source(f"{what}_by_source")
    accepted_at = scrape.by("position", f"{spec}_accepted_tokens_per_pos_total")
    histograms = [figure["acceptance_histogram"] for figure in figures]
    for position in range(max(map(len, histograms)) - 1):
        reached = sum(sum(histogram[position + 1 :]) for histogram in histograms)
        assert accepted_at[str(position)] == reached
    num_drafts = scrape.value(f"{spec}_drafts_total")
    assert 1 + sum(n / num_drafts for n in accepted_at.values()) == pytest.approx(
        1 + num_accepted / num_drafts
    )
    drafted_at = scrape.by("position", "specdec:spec_decode_num_draft_tokens_per_pos_total")
    assert sum(drafted_at.values()) == total("num_draft_tokens")
    for name in ("vllm:e2e_request_latency", "vllm:time_to_first_token", "vllm:request_queue_time"):
        assert scrape.value(f"{name}_seconds_count") == len(answers)
    assert scrape.value("vllm:request_prompt_tokens_sum") == num_prompt
    assert scrape.value("vllm:request_generation_tokens_sum") == num_output
    num_steps = scrape.value("specdec:step_seconds_count")
    assert scrape.by("reason", "specdec:decisions_total") == {"fixed": num_steps}


def test_an_aborted_request_counts_and_so_does_what_was_done_for_it(real: RunningServer) -> None:
    before = Scrape(real)
    fields = {"model": "toy", "max_tokens": 400, "logit_bias": {"65": 9, "66": 9}}
    stream = real.client.completions.create(prompt="abc", stream=True, **fields)
    next(stream)
    stream.close()
    real.eventually(lambda: Scrape(real).value("vllm:num_requests_running") == 0)
    assert Scrape(real).value("specdec:requests_running") == 0
    assert Scrape(real).value("specdec:requests_queued") == 0
    grown = Scrape(real, before)
    assert grown.by("finished_reason", "vllm:request_success_total") == {"abort": 1}
    assert grown.value("vllm:generation_tokens_total") > 0
    assert grown.value("specdec:decode_steps_total") > 0
    assert grown.value("vllm:e2e_request_latency_seconds_count") == 0, "its length says nothing"


@pytest.mark.parametrize(
    "accept", ["", "application/openmetrics-text; version=1.0.0, text/plain;version=0.0.4;q=0.5"]
)
def test_every_scraper_gets_plain_text_with_the_names_as_they_are(
    server: RunningServer, accept: str
) -> None:
    answer = server.request("GET", "/metrics", accept=accept)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "_created" not in answer.text
    names = {
        sample.name
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert "vllm:time_to_first_token_seconds_bucket" in names
    assert not any(name.startswith(("vllm_", "specdec_")) for name in names)


def test_requests_count_by_route_and_status_and_a_scanner_adds_no_names(
    own_server: Callable[..., RunningServer],
) -> None:
    server = own_server()
    server.wait_ready()
    for path in ("/v1/models", "/v1/models", "/wp-admin", "/etc/passwd", "/v1/chat/completions"):
        server.get(path)
    server.post("/v1/chat/completions", b"{")
    hang_up(send(server, wait_s=60), "close")
    name = "specdec:http_requests_total"
    server.eventually(lambda: f'{name}{{model_name="toy",route="/v1/chat' in Scrape(server).text)
    server.eventually(lambda: 'status="499"' in Scrape(server).text)
    scrape = Scrape(server)

    def count(route: str, status: int) -> float:
        return scrape.value(name, route=route, status=str(status))

    assert count("/v1/models", 200) == 2
    assert count("other", 404) == 2
    assert count("/v1/chat/completions", 400) == 1
    assert count("/v1/chat/completions", 405) == 1
    assert count("/v1/chat/completions", 499) == 1
    assert "wp-admin" not in scrape.text


def test_an_engine_in_a_long_step_holds_up_no_scrape(
    own_server: Callable[..., RunningServer],
) -> None:
    server = own_server()
    server.wait_ready()
    assert Scrape(server).value("specdec:engine_up") == 1
    connection = send(server, delay_s=4)
    server.eventually(lambda: server.journal("add"))
    scrape = Scrape(server)
    assert scrape.value("specdec:engine_up") == 0
    assert scrape.value("specdec:requests_queued") == 1
    assert scrape.value("specdec:decode_steps_total") == 0, "counters stay while it is silent"
    load = server.get("/debug/load").json
    assert (load["engine_up"], load["queued"], load["kv_used"]) == (False, 1, None)
    connection.close()


def test_a_load_page_has_what_it_shows(own_server: Callable[..., RunningServer]) -> None:
    server = own_server()
    server.wait_ready()
    first = server.get("/debug/load").json
    messages = say("twelve tokens", burst=3, delay_s=0.01)
    answer = server.client.chat.completions.create(model="toy", messages=messages)
    second = server.get("/debug/load").json
    assert first["ttft_ms"] == first["itl_ms"] == {"p50": None, "p99": None}
    assert (first["tokens_per_s"], first["step_ms"]) == (0, None)
    assert (second["model"], second["drafters"]) == ("toy", ["prediction", "suffix"])
    assert (second["queued"], second["running"], second["engine_up"]) == (0, 0, True)
    assert 0 < second["tokens_per_s"] <= answer.usage.completion_tokens
    assert 10 <= second["ttft_ms"]["p50"] <= second["ttft_ms"]["p99"]
    assert 10 / 3 <= second["itl_ms"]["p50"] < 10, "per token, not per burst"
    assert second["num_steps"] == second["reasons"]["speculate"] > 0
    assert set(first) == set(second)


class FakeEngine:
    """Answers with these counts, one after the other; None is an engine that does not."""

    num_restarts = 3

    def __init__(self, answers: list[dict[str, Any] | None]) -> None:
        self.answers = answers
        self.num_asked = 0

    async def count(self) -> dict[str, Any]:
        self.num_asked += 1
        await asyncio.sleep(0.01)
        answer = self.answers.pop(0) if self.answers else None
        if answer is None:
            raise EngineStopped("the engine has been in one step")
        return answer


def test_counters_go_on_where_the_last_engine_left_off() -> None:
    engine = FakeEngine(
        [
            {"instance": "a", "totals": {"n": 5, "by": {"x": 2}, "at": [1]}, "now": {"held": 3}},
            {"instance": "a", "totals": {"n": 7, "by": {"x": 3}, "at": [2]}, "now": {"held": 1}},
            None,
            {"instance": "b", "totals": {"n": 1, "by": {"y": 1}, "at": [0, 1]}, "now": {"held": 0}},
            {"instance": "b", "totals": {"n": 2, "by": {"y": 1}, "at": [0, 2]}, "now": {"held": 0}},
        ]
    )

    async def states() -> list[tuple[Any, ...]]:
        totals = EngineTotals(engine)
        seen = []
        while engine.answers:
            await totals.refresh()
            seen.append((totals.is_up, totals.totals, totals.now))
        assert totals.lately("n") == 4
        return seen

    last = {"n": 7, "by": {"x": 3}, "at": [2]}
    assert asyncio.run(states()) == [
        (True, {"n": 5, "by": {"x": 2}, "at": [1]}, {"held": 3}),
        (True, last, {"held": 1}),
        (False, last, {}),
        (True, {"n": 8, "by": {"x": 3, "y": 1}, "at": [2, 1]}, {"held": 0}),
        (True, {"n": 9, "by": {"x": 3, "y": 1}, "at": [2, 2]}, {"held": 0}),
    ]


def test_many_who_look_at_once_ask_a_silent_engine_twice() -> None:
    engine = FakeEngine([])

    async def look() -> None:
        totals = EngineTotals(engine)
        await asyncio.gather(*(totals.refresh() for _ in range(20)))
        assert engine.num_asked == 2
        await totals.refresh()
        assert engine.num_asked == 3

    asyncio.run(look())


def test_an_engine_that_was_replaced_is_told_and_its_counts_stay(
    own_server: Callable[..., RunningServer],
) -> None:
    server = own_server()
    server.wait_ready()
    messages = [{"role": "user", "content": "some steps"}]
    server.client.chat.completions.create(model="toy", messages=messages)
    before = Scrape(server)
    assert server.post("/v1/chat/completions", chat("", die="kill")).status == 503
    assert Scrape(server).value("vllm:generation_tokens_total") > 0
    server.eventually(lambda: Scrape(server).value("specdec:engine_restarts_total") == 1)
    server.client.chat.completions.create(model="toy", messages=messages)
    grown = Scrape(server, before)
    assert grown.by("reason", "specdec:decisions_total") == before.by(
        "reason", "specdec:decisions_total"
    ), "the new engine did what the old one had done"
    assert grown.by("finished_reason", "vllm:request_success_total") == {"error": 1, "stop": 1}


def test_added_takes_what_one_side_lacks_as_nothing() -> None:
    assert added({}, {"a": {"b": [1, 2]}}) == {"a": {"b": [1, 2]}}
    assert added({"a": {"b": [1]}, "c": 1.5}, {"a": {"b": [2, 3]}}) == {
        "a": {"b": [3, 3]},
        "c": 1.5,
    }
