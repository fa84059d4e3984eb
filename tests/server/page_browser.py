"""PageBrowser: a headless Chromium for the tests of the page, and a watch over what a page does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The distribution's Chromium; skips the test where it or playwright is missing.

    Its event loop must not outlive a module of tests: others call asyncio.run in this thread.
    """
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, expects: str = "", **options: Any) -> Iterator[Page]:
    """A page of its own profile, which may complain of nothing but what holds `expects`.

    `options` are playwright's for a context: viewport, color_scheme, http_credentials.
    """
    context = browser.new_context(locale="en", reduced_motion="reduce", **options)
    page = context.new_page()
    page.set_default_timeout(10_000)
    complaints: list[str] = []
    requested: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: requested.append(request.url))
    page.goto(url)
    yield page
    context.close()
    assert [told for told in complaints if not (expects and expects in told)] == []
    origin = "/".join(url.split("/")[:3])
    assert [to for to in requested if not to.startswith(f"{origin}/")] == []


def ask(page: Page, text: str) -> None:
    """Send a message and wait for the whole answer."""
    before = page.locator(".facts").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.locator(".facts").nth(before).wait_for()
    page.get_by_role("button", name="Send", exact=True).wait_for()


def answer_text(page: Page, number: int = -1) -> str:
    """An answer's text as it stands in the page, special tokens left out."""
    return str(
        page.locator(".answer > .tokens")
        .nth(number)
        .evaluate(
            "node => { const copy = node.cloneNode(true);"
            " copy.querySelectorAll('.unseen, .rejected').forEach(part => part.remove());"
            " return copy.textContent }"
        )
    )
