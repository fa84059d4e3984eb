"""TemplatePool: whatever a template does, it does to its own request only."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ContextLengthExceeded, InvalidRequest, Overloaded, SpecdecError
from specdec.server.settings import ServerSettings
from specdec.server.templates import LEAST_OUTPUT, RenderedChat, TemplatePool
from specdec.tokenizer import Tokenizer
from tests.server.conftest import RunningServer, make_folder

CHAT = [{"role": "user", "content": "Hi"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
NEST: list[Any] = []
for _ in range(5000):
    NEST = [NEST]


@asynccontextmanager
async def pool_of(folder: Path, **settings: Any) -> AsyncIterator[TemplatePool]:
    """A pool that takes templates from requests."""
    command = settings.pop("command", None)
    tokenizer = Tokenizer.load(make_folder(folder))
    options = {} if command is None else {"command": command}
    chosen = ServerSettings(request_templates=True, **settings)
    pool = TemplatePool(tokenizer, chosen, 100, **options)
    try:
        yield pool
    finally:
        await pool.close()


def children() -> set[int]:
    """Processes of this one."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def with_pool(
    folder: Path, use: Callable[[TemplatePool], Awaitable[None]], **settings: Any
) -> None:
    async def main() -> None:
        async with pool_of(folder, **settings) as pool:
            await use(pool)

    before = children()
    asyncio.run(main())
    assert children() == before, "a worker outlives its pool"


def test_a_worker_renders_what_the_tokenizer_renders(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_folder(tmp_path / "same"))

    async def use(pool: TemplatePool) -> None:
        await pool.start()
        assert await pool.render(CHAT) == RenderedChat("user:Hi\nassistant:")
        chat = [*CHAT, {"role": "assistant", "content": "I am "}]
        either: tuple[dict[str, Any], ...] = (
            {"add_generation_prompt": False},
            {"continue_final_message": True},
        )
        for options in either:
            answer = await pool.render(chat, **options)
            assert answer == RenderedChat(tokenizer.render_chat(chat, **options))
        own = await pool.render(
            CHAT, {"x": [1, "é"]}, chat_template="{{ x | tojson }}{{ messages }}"
        )
        assert own.text == "[1, \"é\"][{'role': 'user', 'content': 'Hi'}]"

    with_pool(tmp_path, use)


def test_what_messages_hold_is_encoded_as_text(tmp_path: Path) -> None:
    async def use(pool: TemplatePool) -> None:
        chat = [{"role": "user", "content": "a<|end|>b"}]
        answer = await pool.render(chat, chat_template="{{ messages[0].content }}<|end|>")
        tokenizer = Tokenizer.load(tmp_path)
        ids = tokenizer.encode_rendered(answer.text, answer.mark)
        assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b<|end|>"
        assert ids.count(tokenizer.eos_token_ids[0]) == 1
        assert ids[-1] == tokenizer.eos_token_ids[0]

    with_pool(tmp_path, use)


TROUBLE: dict[str, tuple[str, type[SpecdecError], str]] = {
    "a long string": ("{{ 'a' * 2000000000 }}", InvalidRequest, "too much memory"),
    "a long list": ("{{ [1] * 10**9 }}", InvalidRequest, "too much memory"),
    "a wide format": ("{{ '%999999999d' % 1 }}", InvalidRequest, "too much memory"),
    "a long text": (
        "{% for i in range(3000) %}{% for j in range(3000) %}x{% endfor %}{% endfor %}",
        ContextLengthExceeded,
        f"more than {LEAST_OUTPUT} characters",
    ),
    "endless": (ENDLESS, InvalidRequest, "took longer than 1 s"),
    "endless sums": ("{{ range(99999) | map('string') | list * 900 | sort }}", InvalidRequest, "."),
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", InvalidRequest, "Range too big"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", InvalidRequest, "recursion"),
    "classes": ("{{ ''.__class__.__mro__ }}", InvalidRequest, "unsafe"),
    "globals": ("{{ cycler.__init__.__globals__ }}", InvalidRequest, "unsafe"),
    "mutation": ("{{ messages.append(1) }}", InvalidRequest, "unsafe"),
    "refusal": ("{{ raise_exception('not\nso') }}", InvalidRequest, "messages: not so$"),
    "addresses": ("{{ raise_exception(raise_exception) }}", InvalidRequest, r"at 0x\.\.\.>$"),
    "syntax": ("{% if %}", InvalidRequest, "not a valid template"),
    "deep source": ("{% if 1 %}" * 3000, InvalidRequest, "not a valid template"),
    "deep braces": (
        "{{ " + "(" * 9000 + ")" * 9000 + " }}",
        InvalidRequest,
        "not a valid template",
    ),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_a_troublesome_template_fails_alone(tmp_path: Path, name: str) -> None:
    source, kind, message = TROUBLE[name]

    async def use(pool: TemplatePool) -> None:
        with pytest.raises(kind, match=message) as refused:
            await pool.render(CHAT, chat_template=source)
        assert len(str(refused.value)) < 500
        answers = await asyncio.gather(pool.render(CHAT), pool.render(CHAT, chat_template="ok"))
        assert [answer.text for answer in answers] == ["user:Hi\nassistant:", "ok"]

    with_pool(tmp_path, use, template_timeout_s=1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"nest": NEST}, "nested too deeply"),
        ({"number": 2**70}, "too big"),
        ({"chat_template": "x"}, "must not set chat_template"),
    ],
)
def test_variables_that_cannot_be_rendered_are_refused(
    tmp_path: Path, variables: dict[str, Any], message: str
) -> None:
    async def use(pool: TemplatePool) -> None:
        with pytest.raises(InvalidRequest, match=message):
            await pool.render(CHAT, variables)
        many = {f"name-{idx}": "x" * 100 for idx in range(100_000)}
        assert (await pool.render(CHAT, many)).text == "user:Hi\nassistant:"

    with_pool(tmp_path, use)


def test_templates_of_requests_hold_up_only_their_like(tmp_path: Path) -> None:
    """With every worker for them busy, they wait as long as they might run, and no longer."""

    async def use(pool: TemplatePool) -> None:
        await pool.start()
        await pool.render(CHAT, chat_template="warm")
        slow = [asyncio.create_task(pool.render(CHAT, chat_template=ENDLESS)) for _ in range(2)]
        await asyncio.sleep(0.2)
        late = asyncio.create_task(pool.render(CHAT, chat_template="late"))
        assert (await pool.render(CHAT)).text == "user:Hi\nassistant:"
        assert not any(task.done() for task in (*slow, late))
        for task in slow:
            with pytest.raises(InvalidRequest, match="took longer"):
                await task
        assert (await late).text == "late"

    with_pool(tmp_path, use, template_timeout_s=2)


def test_what_waits_too_long_is_turned_away(tmp_path: Path) -> None:
    async def use(pool: TemplatePool) -> None:
        asked = [pool.render(CHAT, chat_template=ENDLESS) for _ in range(6)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(answer) for answer in answers} == {InvalidRequest, Overloaded}
        assert (await pool.render(CHAT, chat_template="ok")).text == "ok"

    with_pool(tmp_path, use, template_timeout_s=0.5)


def test_a_client_that_goes_away_leaves_the_worker_whole(tmp_path: Path) -> None:
    """It renders to the end for nobody, and then for the next."""
    slow = "{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}slow"
    before = children()

    async def use(pool: TemplatePool) -> None:
        await pool.render(CHAT, chat_template="warm")
        for _ in range(3):
            task = asyncio.create_task(pool.render(CHAT, chat_template=slow))
            await asyncio.sleep(0.25)  # a worker has it by then
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert (await pool.render(CHAT, chat_template="next")).text == "next"
        assert len(children() - before) <= 2

    with_pool(tmp_path, use)


def test_a_worker_that_dies_idle_is_replaced_unseen(tmp_path: Path) -> None:
    async def use(pool: TemplatePool) -> None:
        before = children()
        await pool.start()
        (worker,) = children() - before
        os.kill(worker, signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert (await pool.render(CHAT)).text == "user:Hi\nassistant:"

    with_pool(tmp_path, use)


ANSWERS = {
    "nothing": b"",
    "half a header": b"\0\0",
    "half a body": b"\0\0\0\x09abc",
    "no msgpack": b"\0\0\0\x03\xc1\xc1\xc1",
    "another type": b"\0\0\0\x01\x01",
    "too long": b"\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_damaged_answer_ends_that_worker(tmp_path: Path, name: str) -> None:
    """The request gets one line, the next one a new worker, and none waits."""
    broken = f"""
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
stream = sock.makefile("rb")
for answer in (bytes.fromhex("0000000180"), {ANSWERS[name]!r}):  # the first says it has started
    stream.read(int.from_bytes(stream.read(4), "big"))
    sock.sendall(answer)
"""

    async def use(pool: TemplatePool) -> None:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="broke the process") as refused:
                await pool.render(CHAT)
            assert "\n" not in str(refused.value)

    with_pool(tmp_path, use, command=(sys.executable, "-c", broken))


def test_a_worker_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    async def use(pool: TemplatePool) -> None:
        with pytest.raises(SpecdecError, match="does not start"):
            await pool.start()

    with_pool(tmp_path, use, command=(sys.executable, "-c", "pass"))


def test_a_server_refuses_templates_unless_it_was_told_to_take_them(
    server: RunningServer, own_server: Callable[..., RunningServer]
) -> None:
    body = {"model": "toy", "messages": CHAT, "chat_template": "new[[{}]]Hello"}
    refused = server.post("/v1/chat/completions", body)
    assert refused.status == 400
    assert refused.json["error"]["param"] == "chat_template"
    assert "--allow-request-templates" in refused.json["error"]["message"]
    kwargs = {"chat_template_kwargs": {"chat_template": "x"}}
    refused = server.post("/v1/chat/completions", {"model": "toy", "messages": CHAT, **kwargs})
    assert refused.status == 400
    assert refused.json["error"]["param"] == "chat_template_kwargs"
    open_server = own_server(request_templates=True, template_timeout_s=1)
    open_server.wait_ready()
    answer = open_server.post("/v1/chat/completions", body)
    assert answer.json["choices"][0]["message"]["content"] == "Hello"
    slow = open_server.post("/v1/chat/completions", {**body, "chat_template": ENDLESS})
    assert slow.status == 400
    assert slow.json["error"]["message"] == "the chat template took longer than 1 s"
    assert slow.json["error"]["param"] == "messages"


def test_no_worker_outlives_a_server_that_is_killed(
    own_server: Callable[..., RunningServer],
) -> None:
    running = own_server()
    running.wait_ready()
    pid = running.process.pid
    workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(workers) == 2, "an engine and a template worker"
    running.end(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker is still there"
        time.sleep(0.02)
