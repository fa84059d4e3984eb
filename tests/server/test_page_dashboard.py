"""The dashboard in a real browser: live figures, their history, and a server that goes away."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.page_browser import chromium, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.server.conftest import RunningServer

LOAD = {
    "uptime_s": 3725.4, "engine_up": True, "model": "toy", "drafters": ["prediction", "suffix"],
    "queued": 2, "running": 3, "tokens_per_s": 181.25, "tokens_per_step": 1.634,
    "acceptance_rate": 0.42, "kv_used": 0.125, "prefix_hit_rate": 0.631, "num_steps": 4321,
    "step_ms": 10.24, "ttft_ms": {"p50": 31.4, "p99": 80.6}, "itl_ms": {"p50": 5.23, "p99": 12.9},
    "reasons": {"speculate": 3, "off": 1},
    "drafters_detail": [
        {"name": "prediction", "drafted": 0, "accepted": 0},
        {"name": "suffix", "drafted": 200, "accepted": 50},
    ],
}  # fmt: skip
FIGURES = {
    "Tokens per second": "181.3", "Tokens per step": "1.63", "Drafts accepted": "42 %",
    "Running": "3", "Queued": "2", "First token, median": "31 ms", "First token, p99": "81 ms",
    "Token gap, median": "5.2 ms", "Token gap, p99": "12.9 ms", "Step": "10.2 ms",
    "KV cache used": "13 %", "Prompt tokens cached": "63 %",
}  # fmt: skip


def nothing_known(value: Any) -> Any:
    """The same facts with null for every number."""
    if isinstance(value, dict):
        return {name: nothing_known(inner) for name, inner in value.items()}
    return None if isinstance(value, int | float) and not isinstance(value, bool) else value


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    with opened(browser, f"{server.url}/dashboard", expects="Failed to load resource") as shown:
        yield shown


def tell(page: Page, load: object) -> None:
    """Let the server tell this load from now on."""
    page.unroute("**/debug/load")
    page.route("**/debug/load", lambda route: route.fulfill(body=json.dumps(load)))


def tiles(page: Page) -> dict[str, str]:
    parts: list[tuple[str, str]] = page.locator(".tile").evaluate_all(
        "nodes => nodes.map(node => [...node.children].map(child => child.textContent))"
    )
    return dict(parts)


def test_the_server_s_own_figures_are_shown(page: Page, server: RunningServer) -> None:
    answer = server.post(
        "/v1/completions", {"model": "toy", "prompt": '[[{"burst": 3}]]Hello', "max_tokens": 50}
    )
    assert answer.status == 200
    page.locator("#state", has_text="live").wait_for()
    page.locator("#uptime", has_text="steps").wait_for()
    shown = tiles(page)
    assert list(shown) == list(FIGURES)
    assert shown["Running"] == shown["Queued"] == "0"
    row = page.locator("#decisions tbody tr").first
    row.locator("td", has_text="speculate").wait_for()
    assert row.locator("td").all_inner_texts()[3:6] == ["7", "5", "6"]
    assert page.get_by_role(
        "img", name="Cost of a forward up to 8 rows, at most 20 ms"
    ).is_visible()


def test_every_figure_has_its_place_and_unit(page: Page) -> None:
    tell(page, LOAD)
    page.locator("#uptime", has_text="up 1 h 2 min, 4321 steps").wait_for()
    assert tiles(page) == FIGURES
    drafters = page.locator("#drafters tbody tr").all_inner_texts()
    assert [row.split("\t") for row in drafters] == [
        ["prediction", "0", "0", "–"],
        ["suffix", "200", "50", "25 %"],
    ]
    reasons = page.locator("#reasons tbody tr").all_inner_texts()
    assert [row.split("\t") for row in reasons] == [
        ["speculate", "3", "75 %"],
        ["off", "1", "25 %"],
    ]


def test_what_is_not_known_is_a_dash(page: Page) -> None:
    tell(page, nothing_known(LOAD))
    page.locator("#uptime", has_text="up 0 s, 0 steps").wait_for()
    assert set(tiles(page).values()) == {"–"}
    assert "null" not in page.locator("main").inner_text()
    assert "NaN" not in page.locator("main").inner_html()


def test_history_becomes_lines_with_gaps(page: Page) -> None:
    tell(page, LOAD)
    line = page.locator("#charts path.line").first
    page.locator("#charts path.line[d*=L]").first.wait_for(state="attached")
    tell(page, nothing_known(LOAD))
    page.get_by_role("img", name="Tokens per second, now –").wait_for()
    tell(page, LOAD)
    page.get_by_role("img", name="Tokens per second, now 181.3").wait_for()
    starts = (line.get_attribute("d") or "").count("M")
    assert starts == 2


def test_a_server_that_goes_away_is_said_and_its_return_seen(page: Page) -> None:
    page.locator("#state", has_text="live").wait_for()
    page.route("**/debug/*", lambda route: route.abort())
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert page.locator("#state").inner_text() == "away"
    assert "The server does not answer" in alert.inner_text()
    alert.evaluate("node => { node.dataset.first = 'yes' }")
    page.wait_for_timeout(2200)
    assert alert.get_attribute("data-first") == "yes", "an alert is made once, not every second"
    page.unroute("**/debug/*")
    page.locator("#state", has_text="live").wait_for()
    assert page.get_by_role("alert").count() == 0


def test_an_engine_that_cannot_explain_leaves_the_rest(
    browser: Browser, own_server: Callable[..., RunningServer]
) -> None:
    server = own_server()
    server.wait_ready()
    (server.folder / "silent").touch()
    with opened(browser, f"{server.url}/dashboard", expects="Failed to load resource") as page:
        page.locator("#state", has_text="live").wait_for()
        assert tiles(page)["Running"] == "0"


def test_a_hidden_page_asks_for_nothing(page: Page) -> None:
    page.locator("#state", has_text="live").wait_for()
    page.evaluate(
        """() => {
          window.hiddenNow = true;
          Object.defineProperty(document, "hidden", { get: () => window.hiddenNow });
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    page.wait_for_timeout(1500)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert asked == []
    with page.expect_request("**/debug/load"):
        page.evaluate(
            """() => {
              window.hiddenNow = false;
              for (let k = 0; k < 9; k++) document.dispatchEvent(new Event("visibilitychange"));
            }"""
        )
    with page.expect_request("**/debug/load"):
        pass
    page.wait_for_timeout(1500)
    num_asked = len([url for url in asked if url.endswith("/debug/load")])
    assert num_asked <= 4, "more than one loop asks"
