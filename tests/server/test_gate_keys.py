"""API keys: which requests need one, in which forms it comes, and where it never shows."""

from __future__ import annotations

import base64
import http.client
import io
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any

import pytest

from specdec.errors import UsageError
from specdec.server.api_keys import VARIABLE, load_keys
from specdec.server.settings import ServerSettings
from tests.server.conftest import RunningServer, make_folder

if TYPE_CHECKING:
    from pathlib import Path

KEY, OTHER = "sk-right", "sk-other"
ASK = {"model": "toy", "prompt": "[[{}]]hello"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_folder(tmp_path_factory.mktemp("model"))
    running = RunningServer(folder, api_keys=(KEY, OTHER), access_log=True)
    running.wait_ready()
    yield running
    said = running.end()
    assert KEY not in said and OTHER not in said
    assert running.process.returncode == 0
    assert all(json.loads(line)["status"] for line in said.splitlines()), "nothing but the log"


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


def target(server: RunningServer, line: bytes, *headers: bytes) -> int:
    """The status of a request whose target a client library would not send."""
    head = b"\r\n".join([line + b" HTTP/1.1", *headers, b"Connection: close", b"", b""])
    return int(server.exchange(head).split()[1])


def test_health_alone_is_open(server: RunningServer) -> None:
    assert server.get("/health").status == 200
    assert server.get("/health?x=1").status == 200
    assert target(server, b"HEAD /health", b"Host: x") == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/version", "/metrics", "/debug/speculation", "/debug/load", "/dashboard"),
        *("/openapi.json", "/nothing", "/page/none.js"),
        *("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
    ],
)
def test_every_other_path_needs_a_key(server: RunningServer, path: str) -> None:
    for answer in (server.get(path), server.post(path, ASK), server.get(path, Authorization="")):
        assert answer.status == 401
        error = answer.json["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert set(error) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
    assert server.get(path, Authorization=f"Bearer {KEY}").status != 401


@pytest.mark.parametrize(
    "line",
    [
        *(b"GET //health", b"GET /health/", b"GET /HEALTH", b"GET /./health", b"GET /%68ealth"),
        *(b"GET /health/../v1/models", b"GET /health%2f..%2fv1/models", b"GET /health%00"),
        *(b"GET /health;/v1/models", b"GET /health#/v1/models", b"GET http://x/health", b"GET *"),
        *(b"GET http://x/v1/models", b"GET x", b"GET ?/health", b"OPTIONS *", b"POST /health"),
        *(b"DELETE /health", b"OPTIONS /v1/models", b"BREW /v1/models", b"GET /v1/models?/health"),
    ],
)
def test_no_way_of_writing_a_path_leads_around_the_key(server: RunningServer, line: bytes) -> None:
    assert target(server, line, b"Host: x") == 401


@pytest.mark.parametrize("host", [b"x/health", b"/health", b"x:1@health", b"", b"health?", b"\xff"])
def test_nor_does_a_host(server: RunningServer, host: bytes) -> None:
    assert target(server, b"GET /v1/models", b"Host: " + host) in (400, 401)


@pytest.mark.parametrize(
    "value",
    [
        *(f"Bearer {KEY}", f"bearer  {KEY} ", f"Bearer {OTHER}", basic(KEY)),
    ],
)
def test_a_right_key_opens(server: RunningServer, value: str) -> None:
    answer = server.post("/v1/completions", ASK, Authorization=value)
    assert answer.json["choices"][0]["text"] == "hello"


@pytest.mark.parametrize(
    "value",
    [
        *(f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY} {KEY}", KEY, "Bearer", "Bearer "),
        *(f"Bearer {KEY},{OTHER}", f"Token {KEY}", "Bearer ключ".encode(), b"Bearer \xff\xfe"),
        *(basic("wrong"), basic(""), "Basic", "Basic %%%", f"Basic {KEY}", "Basic " + "A" * 9999),
        *("Basic " + base64.b64encode(KEY.encode()).decode(), b"\xff" * 50, "Bearer " + "k" * 9999),
    ],
)
def test_a_wrong_or_malformed_key_is_401(server: RunningServer, value: str | bytes) -> None:
    raw = value if isinstance(value, bytes) else value.encode()
    assert target(server, b"GET /v1/models", b"Host: x", b"Authorization: " + raw) == 401


def test_two_keys_at_once_are_none(server: RunningServer) -> None:
    twice = [b"Authorization: Bearer " + key.encode() for key in (KEY, OTHER)]
    assert target(server, b"GET /v1/models", b"Host: x", *twice) == 401


def test_a_browser_is_asked_for_a_password_where_a_page_is(server: RunningServer) -> None:
    for path, scheme in (("/", "Basic"), ("/dashboard", "Basic"), ("/v1/models", "Bearer")):
        assert server.get(path).headers["www-authenticate"] == f'{scheme} realm="specdec"'
    page = server.get("/", Authorization=basic(KEY))
    assert page.status == 200
    assert "text/html" in page.headers["content-type"]


@pytest.mark.parametrize(
    ("site", "status"),
    [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)],
)
def test_a_remembered_password_serves_no_other_site(
    server: RunningServer, site: str, status: int
) -> None:
    headers = {"Sec_Fetch_Site": site}
    answer = server.post("/v1/completions", ASK, Authorization=basic(KEY), **headers)
    assert answer.status == status
    # A page has to know a key to send it as Bearer: nobody's browser does that by itself.
    bearer = server.post("/v1/completions", ASK, Authorization=f"Bearer {KEY}", **headers)
    assert bearer.status == 200


def test_each_key_has_a_cache_of_its_own(server: RunningServer) -> None:
    def salt(key: str, **fields: str) -> str:
        answer = server.post("/v1/completions", {**ASK, **fields}, Authorization=f"Bearer {key}")
        assert answer.status == 200
        return str(server.journal("add")[-1]["cache_salt"])

    assert salt(KEY) == salt(KEY) != salt(OTHER)
    assert salt(KEY, cache_salt="a") not in (salt(KEY), salt(OTHER, cache_salt="a"))
    assert KEY not in salt(KEY)


def test_without_keys_nobody_is_asked(own_server: Callable[..., RunningServer]) -> None:
    running = own_server()
    running.wait_ready()
    for headers in ({}, {"Authorization": "Bearer anything"}):
        assert running.post("/v1/completions", ASK, **headers).status == 200
    assert running.journal("add")[-1]["cache_salt"] == ""
    assert running.end() == ""


def load(file: Path | None = None, **environ: str) -> tuple[tuple[str, ...], str]:
    said = io.StringIO()
    with redirect_stderr(said):
        keys = load_keys(file, environ)
    assert VARIABLE not in environ, "no child inherits it"
    return keys, said.getvalue()


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n one \r\ntwo # not a comment\none\n")
    file.chmod(0o600)
    assert load(file) == (("one", "two # not a comment"), "")
    assert load(file, SPECDEC_API_KEYS="three, one,") == (
        ("one", "two # not a comment", "three"),
        "",
    )
    assert load() == ((), "")
    file.chmod(0o644)
    assert load(file)[1] == f"warning: others may read {file}; chmod 600 helps\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no API key"),
        (b"# none\n \n", "holds no API key"),
        (b"caf\xc3\xa9\n", "must be printable ASCII"),
        (b"k\n" * 2**20, "is too long"),
        (None, "cannot read the API keys in .*no such file"),
    ],
)
def test_a_file_that_opens_nothing_is_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    with pytest.raises(UsageError, match=words) as caught:
        load(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["", " , "])
def test_a_variable_without_a_key_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="SPECDEC_API_KEYS holds no key"):
        load(SPECDEC_API_KEYS=value)


def test_keys_never_show_in_the_settings() -> None:
    assert "hush" not in repr(ServerSettings(api_keys=("hush",)))
    for key in ("", "a\nb", "é", "a\0"):
        with pytest.raises(UsageError) as caught:
            ServerSettings(api_keys=(key,))
        assert not key or key not in str(caught.value)


def test_the_key_is_asked_for_before_the_body(server: RunningServer) -> None:
    connection: Any = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    assert connection.getresponse().status == 401, "before a byte of the body is there"
    connection.close()
