"""What a page of another site may make a browser send: nothing that starts work or tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.server.test_gate_keys import ASK, basic

if TYPE_CHECKING:
    from tests.server.conftest import RunningServer

KEY = "a-secret"
OTHER = "http://evil.example"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # no browser
        ({"Origin": OTHER}, 403),  # over plain http browsers may send no Sec-Fetch-Site
        ({"Origin": "null"}, 403),
        ({"Origin": "OWN"}, 200),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        # A proxy may have changed Host; the browser knows better.
        ({"Sec_Fetch_Site": "same-origin", "Origin": "https://chat.example"}, 200),
        ({"Origin": "https://ours.example"}, 200),  # --cors-origin
    ],
)
@pytest.mark.parametrize("has_keys", [False, True])
def test_work_is_begun_by_own_pages_only(
    own_server: Callable[..., RunningServer], headers: dict[str, str], status: int, has_keys: bool
) -> None:
    keys = (KEY,) if has_keys else ()
    server = own_server(api_keys=keys, cors_origins=("https://ours.example",))
    server.wait_ready()
    own = f"http://{urlsplit(server.url).netloc}"
    sent = {name: own if value == "OWN" else value for name, value in headers.items()}
    password = {"Authorization": basic(KEY)} if has_keys else {}
    answer = server.post("/v1/completions", ASK, Content_Type="text/plain", **sent, **password)
    assert answer.status == status
    if status == 403:
        assert "--cors-origin" in answer.json["error"]["message"]
    if has_keys:  # a page has to be told a key to send it so: nobody's browser does it by itself
        bearer = server.post("/v1/completions", ASK, Authorization=f"Bearer {KEY}", **sent)
        assert bearer.status == 200


def test_a_link_to_the_page_works_and_its_contents_stay_ours(
    own_server: Callable[..., RunningServer],
) -> None:
    server = own_server(api_keys=(KEY,))
    server.wait_ready()
    sent = {"Authorization": basic(KEY), "Sec_Fetch_Site": "cross-site"}
    assert server.get("/", Sec_Fetch_Mode="navigate", **sent).status == 200
    assert server.get("/debug/load", Sec_Fetch_Mode="no-cors", **sent).status == 403
