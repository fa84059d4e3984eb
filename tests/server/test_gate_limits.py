"""Limits: the queue's bounds, requests per minute, and when clients are told to come again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from specdec.errors import Overloaded, UsageError
from specdec.server import rate_limit
from specdec.server.admission import Admission, Place
from specdec.server.caller import Caller
from specdec.server.rate_limit import RateLimit
from specdec.server.settings import ServerSettings
from tests.server.script import script

if TYPE_CHECKING:
    from tests.server.conftest import Answer, RunningServer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def full(admission: Admission, num_requests: int, *prompt_lens: int) -> Overloaded:
    """The refusal of an answer of this size."""
    place = admission.enter(1) if prompt_lens else Place(admission)
    with pytest.raises(Overloaded) as caught:
        place.hold(num_requests, prompt_lens)
    place.leave()
    return caught.value


def test_the_queue_is_bounded_by_requests() -> None:
    admission = Admission(4, 0)
    first, second = admission.enter(3), admission.enter(1)
    assert "4 requests wait" in str(full(admission, 1))
    first.leave_one(0)
    third = admission.enter(1)
    for place in (first, first, second, third):
        place.leave()
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


def test_the_queue_is_bounded_by_prompt_tokens_shared_ones_once() -> None:
    admission = Admission(0, 100)
    place = admission.enter(1)
    place.hold(4, [60, 30])  # two prompts, two choices each
    assert (admission.num_requests, admission.num_tokens) == (4, 90)
    assert "90 prompt tokens wait" in str(full(admission, 1, 11))
    place.leave_one(0)  # the first choice's first token: its prompt has been computed
    place.leave_one(0)
    assert (admission.num_requests, admission.num_tokens) == (2, 30)


def test_what_comes_to_an_empty_queue_is_let_in() -> None:
    admission = Admission(2, 10)
    place = admission.enter(1)
    place.hold(5, [50])
    assert (admission.num_requests, admission.num_tokens) == (5, 50)
    full(admission, 1)
    place.leave()
    admission.enter(1)


def test_an_answer_may_not_grow_past_the_bound_beside_others() -> None:
    admission = Admission(4, 0)
    admission.enter(2)
    place = admission.enter(1)
    with pytest.raises(Overloaded):
        place.hold(3, [1])
    place.leave()
    assert (admission.num_requests, admission.num_tokens) == (2, 0)


def test_retry_after_follows_how_fast_the_queue_drains() -> None:
    clock = Clock()
    admission = Admission(10, 0, clock)
    places = [admission.enter(1) for _ in range(10)]
    assert full(admission, 1).retry_after_s == 1, "a queue that has just filled up is not stuck"
    clock.now += 20
    assert full(admission, 1).retry_after_s == 20, "nothing has left for 20 s"
    for place in places[:4]:
        place.leave()
    refill = [admission.enter(1) for _ in range(4)]
    assert full(admission, 1).retry_after_s == 4, "four have left within 20 s"
    assert full(admission, 5).retry_after_s == 20
    assert full(admission, 9).retry_after_s == 30, "never more"
    clock.now += 1000
    assert full(admission, 1).retry_after_s == 30
    for place in places[4:] + refill:
        place.leave()
    admission.enter(10)
    assert full(admission, 1).retry_after_s == 1


def test_a_bucket_refills_as_time_goes_by() -> None:
    clock = Clock()
    limit = RateLimit(6, clock)
    assert [limit.take("a") for _ in range(6)] == [0.0] * 6
    assert limit.take("a") == pytest.approx(10)
    assert limit.take("b") == 0.0, "another's bucket is full"
    clock.now += 9
    assert limit.take("a") == pytest.approx(1)
    clock.now += 1.001
    assert limit.take("a") == 0.0
    assert limit.take("a") > 0
    clock.now += 10_000
    assert [limit.take("a") for _ in range(7)][-1] > 0, "no more than a minute is saved up"


def test_less_than_one_a_minute_is_still_some() -> None:
    clock = Clock()
    limit = RateLimit(0.5, clock)
    assert limit.take("a") == 0.0
    assert limit.take("a") == pytest.approx(120)


def test_many_callers_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "MAX_CALLERS", 50)
    limit = RateLimit(1, Clock())
    limit.take("early")
    for number in range(200):
        limit.take(str(number))
    assert len(limit) == 50
    assert limit.take("199") > 0, "the newest are remembered"


def test_callers_are_told_apart_by_key_then_by_network() -> None:
    assert Caller("10.0.0.1", tenant="t").name == "t"
    assert Caller("10.0.0.1").name == "10.0.0.1"
    one, other = Caller("2001:db8::1").name, Caller("2001:db8::ffff:2%eth0").name
    assert one == other, "whoever has one IPv6 address has 2**64"
    assert Caller("2001:db8:0:1::1").name != one
    assert Caller("").name == "" == Caller().name


@pytest.mark.parametrize(
    "settings",
    [
        {"cors_origins": ("example.org",)},
        {"cors_origins": ("https://example.org/",)},
        {"header_timeout_s": 0},
        {"send_timeout_s": 0},
        {"max_queued_requests": -1},
        {"rate_limit": float("nan")},
        {"total_timeout_s": float("inf")},
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        ServerSettings(**settings)
    assert "\n" not in str(caught.value)


def ask(**directives: object) -> dict[str, Any]:
    return {"model": "toy", "prompt": script("ab", **directives)}


def check_refusal(answer: Answer, status: int, kind: str, code: str, longest_s: int = 30) -> None:
    assert answer.status == status
    assert (answer.json["error"]["type"], answer.json["error"]["code"]) == (kind, code)
    assert 1 <= int(answer.headers["retry-after"]) <= longest_s
    assert len(answer.text) < 1024


def test_a_full_queue_is_503_at_once(own_server: Callable[..., RunningServer]) -> None:
    server = own_server(max_queued_requests=3)
    server.wait_ready()
    waiting = [
        threading.Thread(target=server.post, args=("/v1/completions", {**ask(wait_s=3), "n": n}))
        for n in (1, 2)
    ]
    for number, thread in enumerate(waiting):
        thread.start()
        server.eventually(lambda n=number: len(server.journal("add")) == (1, 3)[n])  # type: ignore[misc]  # mypy sees no type in a lambda's default
    num_added = len(server.journal("add"))
    check_refusal(server.post("/v1/completions", ask()), 503, "server_error", "overloaded")
    chat = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    check_refusal(server.post("/v1/chat/completions", chat), 503, "server_error", "overloaded")
    assert len(server.journal("add")) == num_added, "the engine never hears of them"
    for thread in waiting:
        thread.join()
    assert server.post("/v1/completions", ask()).status == 200, "there is room again"


def test_running_answers_are_not_queued(own_server: Callable[..., RunningServer]) -> None:
    server = own_server(max_queued_requests=1)
    server.wait_ready()
    body = {**ask(delay_s=0.02, end=False), "max_tokens": 500, "stream": True}
    running = [server.open(post("/v1/completions", body)) for _ in range(1)]
    assert b"data:" in running[0].recv(4096) + running[0].recv(4096)
    for _ in range(3):
        assert server.post("/v1/completions", ask()).status == 200
    for connection in running:
        connection.close()


def test_too_many_prompt_tokens_are_503(own_server: Callable[..., RunningServer]) -> None:
    server = own_server(max_queued_tokens=60)
    server.wait_ready()
    thread = threading.Thread(target=server.post, args=("/v1/completions", ask(wait_s=2)))
    thread.start()
    server.eventually(lambda: server.journal("add"))
    long = {**ask(), "prompt": "a" * 60}
    check_refusal(server.post("/v1/completions", long), 503, "server_error", "overloaded")
    assert server.post("/v1/completions", {**ask(), "prompt": "a" * 9}).status == 200
    thread.join()
    assert server.post("/v1/completions", {**long, "prompt": "a" * 600}).status == 200


def post(path: str, body: object, *headers: str) -> bytes:
    """A request as bytes."""
    raw = json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(raw)}", *headers)
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + raw


def test_too_many_requests_of_one_key_are_429(own_server: Callable[..., RunningServer]) -> None:
    server = own_server(rate_limit=3, api_keys=("one", "two"))
    server.wait_ready()

    def asking(key: str) -> Answer:
        return server.post("/v1/completions", ask(), Authorization=f"Bearer {key}")

    assert [asking("one").status for _ in range(3)] == [200] * 3
    refused = asking("one")
    check_refusal(refused, 429, "rate_limit_error", "rate_limit_exceeded", longest_s=20)
    assert asking("two").status == 200, "another key has its own minute"
    assert server.get("/v1/models", Authorization="Bearer one").status == 200, "looking is free"
    assert server.post("/v1/completions", ask()).status == 401


def test_addresses_cannot_be_made_up(own_server: Callable[..., RunningServer]) -> None:
    server = own_server(rate_limit=1)
    server.wait_ready()
    for number, status in enumerate((200, 429, 429)):
        forwarded = {"X_Forwarded_For": f"10.0.0.{number}", "Forwarded": f"for=10.0.0.{number}"}
        assert server.post("/v1/completions", ask(), **forwarded).status == status
