"""RealEngine: a server before the real engine, with a random toy model that writes bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specdec.server.engine_client import ENGINE_COMMAND
from tests.server.conftest import RunningServer, make_folder, serving
from tests.toy import CONFIG, RandomTensors, compiled_native

VOCAB = 257
PROJECTIONS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
# Two likely tokens, so that something recurs and is drafted.
SAMPLED = {"temperature": 1, "top_p": 0.9, "logit_bias": {"65": 9, "66": 9}}
_ENGINE = """
import signal, socket, sys
from specdec.engine import Engine
from specdec.server import engine_process
{imports}
signal.signal(signal.SIGINT, signal.SIG_IGN)
with socket.socket(fileno=int(sys.argv[1])) as sock:
    build = lambda config: {build}
    sys.exit(engine_process.run(sock, build))
"""


def add_weights(folder: Path) -> None:
    """Make a model of `make_folder`'s folder."""
    config = {**CONFIG, "vocab_size": VOCAB, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        names += [f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"]
        names += [f"{layer}.{projection}.weight" for projection in PROJECTIONS]
    source = RandomTensors(config, seed=1)
    tensors = {name: source.get(name).to(torch.float32).contiguous() for name in names}
    save_file(tensors, folder / "model.safetensors")


def engine_command(build: str, imports: str = "") -> tuple[str, ...]:
    """A command for an engine process whose engine is `build`, an expression of `config`."""
    return (sys.executable, "-c", _ENGINE.format(build=build, imports=imports))


@contextmanager
def serving_weights(
    folder: Path, engine_command: Sequence[str] = ENGINE_COMMAND, **options: Any
) -> Iterator[RunningServer]:
    """A server that is ended in any case and must not have complained."""
    compiled_native()
    add_weights(make_folder(folder))
    with serving(folder, engine_command=engine_command, **options) as running:
        yield running


def ask(server: RunningServer, index: int) -> tuple[Any, Any]:
    """One request of a mixed load: its usage and its acceptance figures, as a client sees them."""
    fields: dict[str, Any] = {
        "model": "toy",
        "seed": index,
        "max_tokens": 10 + 7 * index,
        **SAMPLED,
    }
    if index % 3 == 1:
        fields["extra_body"] = {"stop_token_ids": [66]}
    elif index % 5 == 4:
        fields["extra_body"] = {"speculation": {"enabled": False}}
    prompt = "abc" * (5 + index)
    if index % 2:
        answer = server.client.completions.create(prompt=prompt, **fields)
        return answer, [answer.choices[0].finish_reason]
    messages = [{"role": "user", "content": prompt}]
    *chunks, last = server.client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **fields
    )
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    return last, [reason for reason in reasons if reason]
