"""GET /debug/speculation: the engine is asked between steps and never held up."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from specdec.config import EngineConfig
from specdec.decision import Decision
from specdec.errors import EngineStopped
from specdec.server.engine_client import EngineClient
from tests.server.script import chat

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import RunningServer

PATH = "/debug/speculation"

# Says that it is ready, leaves the first question unanswered until the second has come.
LATE_ENGINE = """
import socket, sys
from specdec.server.channel import Channel
from specdec.server.messages import Explain, Explanation, Ready
with socket.socket(fileno=int(sys.argv[1])) as sock:
    channel = Channel(sock)
    channel.send(Ready("m", "", "none", 100, 50))
    asked = []
    while not channel.is_closed:
        for message in channel.receive(is_blocking=True):
            if isinstance(message, Explain):
                asked.append(message.question_id)
                if len(asked) == 2:
                    for question_id in asked:
                        channel.send(Explanation(question_id, {"decisions": [question_id]}))
                if len(asked) == 3:
                    sys.exit(7)
"""


def test_it_explains_while_idle(server: RunningServer) -> None:
    server.client.chat.completions.create(**chat("a few steps"))
    facts = server.get(PATH).json
    assert (facts["model"], facts["drafter"]) == ("toy", "prediction,suffix")
    assert facts["speed_up"] == 1.42
    *_, last = facts["decisions"]
    assert set(Decision.__dataclass_fields__) < set(last)
    assert (last["reason"], last["predicted_gain"], last["observed_gain"]) == (
        "speculate",
        1.5,
        0.5,
    )
    assert facts["reasons"]["speculate"] == last["step"] + 1


def test_it_explains_between_the_steps_of_a_stream(server: RunningServer) -> None:
    stream = server.client.chat.completions.create(
        **chat("x" * 40, delay_s=0.02, end=False), max_tokens=1000, stream=True
    )
    next(stream)
    steps = [server.get(f"{PATH}?last=1").json["decisions"][0]["step"] for _ in range(3)]
    assert steps == sorted(steps)
    next(stream)
    stream.close()


def test_the_newest_decisions_are_those_asked_for(server: RunningServer) -> None:
    server.client.chat.completions.create(**chat("x" * 230))
    steps = {
        last: [decision["step"] for decision in server.get(f"{PATH}{last}").json["decisions"]]
        for last in ("", "?last=1", "?last=007", "?last=200")
    }
    newest = steps["?last=1"][0]
    assert {last: len(found) for last, found in steps.items()} == {
        "": 20,
        "?last=1": 1,
        "?last=007": 7,
        "?last=200": 200,
    }
    assert all(found == list(range(newest + 1))[-len(found) :] for found in steps.values())


@pytest.mark.parametrize("last", ["0", "201", "-1", "1.5", "ten", "", "9" * 5000, "%D9%A3"])
def test_a_bad_number_of_decisions_is_400(server: RunningServer, last: str) -> None:
    answer = server.get(f"{PATH}?last={last}")
    assert answer.status == 400
    error = answer.json["error"]
    assert (error["message"], error["param"]) == (
        "last must be a whole number between 1 and 200",
        "last",
    )


def test_several_clients_at_once_each_get_their_own(server: RunningServer) -> None:
    server.client.chat.completions.create(**chat("twelve steps"))
    found: dict[int, int] = {}

    def ask(last: int) -> None:
        found[last] = len(server.get(f"{PATH}?last={last}").json["decisions"])

    threads = [threading.Thread(target=ask, args=(last,)) for last in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {last: last for last in range(1, 13)}


def test_an_engine_that_cannot_explain_goes_on_serving(
    own_server: Callable[..., RunningServer],
) -> None:
    server = own_server()
    server.wait_ready()
    (server.folder / "silent").touch()
    answer = server.get(PATH)
    assert (answer.status, answer.json["error"]["type"]) == (500, "server_error")
    assert "cannot explain itself" in answer.json["error"]["message"]
    done = server.client.chat.completions.create(**chat("on"))
    assert done.choices[0].message.content == "on"
    assert "RuntimeError: the script says so" in server.end()


def test_a_dead_engine_is_503(own_server: Callable[..., RunningServer]) -> None:
    server = own_server()
    server.wait_ready()
    (server.folder / "held").touch()  # the engine that is started next does not come
    answer = server.post("/v1/chat/completions", chat("abc", die="kill"))
    assert answer.status == 503
    after = server.get(PATH)
    assert (after.status, after.headers["retry-after"]) == (503, "1")
    assert "killed by signal 9" in after.json["error"]["message"]


def test_an_answer_that_is_late_or_never_comes() -> None:
    """Nobody waits for it, it is not taken for another's, and a death ends the waiting."""

    async def ask() -> None:
        client = EngineClient((sys.executable, "-c", LATE_ENGINE))
        with pytest.raises(EngineStopped, match="the model is loading"):
            await client.explain(1)
        await client.start(EngineConfig())
        with pytest.raises(EngineStopped, match="the model is loading"):
            await client.explain(1)
        await client.wait_ready()
        with pytest.raises(EngineStopped, match="in one step for 0 s; ask again later"):
            await client.explain(1, wait_s=0)
        assert await client.explain(1) == {"decisions": [2]}
        with pytest.raises(EngineStopped, match="ended with exit code 7"):
            await client.explain(1, wait_s=60)
        await client.shutdown()

    asyncio.run(ask())
