"""The page's files: all in memory, typed, revalidated, and unable to reach beyond the server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from specdec.server.page_routes import FOLDER, PageFile, page_files

if TYPE_CHECKING:
    from tests.server.conftest import Answer, RunningServer

FILES = page_files()
SHARED_HEADERS = {
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def headers(answer: Answer) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.headers.items()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.path))
def test_every_file_is_served_as_what_it_is(server: RunningServer, file: PageFile) -> None:
    answer = server.get(file.path)
    told = headers(answer)
    assert answer.status == 200
    assert answer.text == file.content.decode()
    assert told["content-type"] == file.content_type
    assert SHARED_HEADERS.items() <= told.items()
    policy = [part.strip() for part in told["content-security-policy"].split(";")]
    assert policy[0] == "default-src 'self'"
    assert "unsafe" not in told["content-security-policy"]


def test_both_pages_are_there(server: RunningServer) -> None:
    assert "<title>specdec chat</title>" in server.get("/").text
    assert "<title>specdec dashboard</title>" in server.get("/dashboard").text
    assert headers(server.get("/page/chat.js"))["content-type"] == "text/javascript; charset=utf-8"


def test_a_file_that_the_browser_has_is_not_sent_again(server: RunningServer) -> None:
    etag = headers(server.get("/page/style.css"))["etag"]
    for known in (etag, f'"other", W/{etag}'):
        answer = server.request("GET", "/page/style.css", If_None_Match=known)
        assert (answer.status, answer.text) == (304, "")
        assert headers(answer)["etag"] == etag
    assert server.request("GET", "/page/style.css", If_None_Match='"other"').status == 200


def test_head_has_the_headers_alone(server: RunningServer) -> None:
    answer = server.request("HEAD", "/")
    assert (answer.status, answer.text) == (200, "")
    assert int(headers(answer)["content-length"]) == len((FOLDER / "index.html").read_bytes())


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/index.html",
        "/page/../page_routes.py",
        "/page/..%2fpage_routes.py",
        "/page/%2e%2e/__init__.py",
        "/page//etc/passwd",
        "/page/style.css/",
        "/page/style.css%00",
        "/page/STYLE.CSS",
    ],
)
def test_no_other_path_reaches_a_file(server: RunningServer, path: str) -> None:
    answer = server.get(path)
    assert answer.status in (307, 404)
    assert "import" not in answer.text


def test_the_page_refuses_to_be_written_to(server: RunningServer) -> None:
    assert server.post("/", {}).status == 405


def texts() -> list[tuple[str, str]]:
    return [(file.name, file.read_text()) for file in sorted(FOLDER.iterdir())]


def test_the_page_makes_no_markup_of_strings() -> None:
    """What a model writes may be markup: it goes into the page as text, whatever it is."""
    banned = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser"
    )
    assert [name for name, text in texts() if re.search(banned, text)] == []


def test_the_page_names_nothing_from_elsewhere() -> None:
    allowed = "http://www.w3.org/2000/svg"
    found = [
        (name, url)
        for name, text in texts()
        for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)
        if url != allowed
    ]
    assert found == []


def test_html_has_no_inline_script_or_style() -> None:
    for name in ("index.html", "dashboard.html"):
        html = (FOLDER / name).read_text()
        assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", html) == []
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", html))


def test_every_import_of_a_module_is_a_file() -> None:
    names = {file.name for file in FOLDER.iterdir()}
    for name, text in texts():
        for wanted in re.findall(r"from \"\./([^\"]+)\"|/page/([\w.-]+)", text):
            assert (wanted[0] or wanted[1]) in names, f"{name} wants {wanted}"


def test_every_file_says_what_it_is_and_is_short() -> None:
    for name, text in texts():
        lines = text.splitlines()
        assert len(lines) <= 350, name
        if not name.endswith(".svg"):
            stem = Path(name).stem.replace("index", "chat page")
            said = (lines[1] if name.endswith(".html") else lines[0]).lower()
            assert said.lstrip("/*<!- ").startswith(stem), name
