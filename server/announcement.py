"""Announcement: what the server says on stderr when it is ready."""

from __future__ import annotations

from specdec.config import EngineConfig
from specdec.server.engine_facts import EngineFacts
from specdec.server.messages import Ready
from specdec.server.service import Service


def announcement(url: str, config: EngineConfig, ready: Ready, service: Service) -> str:
    """The lines, the first of which never changes its form; the others are indented.

    Example:
        ready: http://127.0.0.1:8000 (model smollm2-135m-instruct, drafter prediction,suffix)
          chosen   int4 weights, which the checkpoint was made from: 3.6 ms a step, bf16 7.5; ...
          model    smollm2-135m-instruct in /home/me/.cache/specdec/...; context 8192 tokens
          drafts   prediction,suffix; adaptive, at most 16 nodes a step
          memory   weights 257 MiB, drafters 0 MiB, KV cache 1023 MiB, 1454 blocks for 46528 tokens
          access   everybody; --api-key-file asks for a key
          speed    111 tokens/s plain, 240 with speculation: 2.16x on a list that repeats itself
    """
    lines = [
        f"ready: {url} (model {service.served_model_name}, drafter {ready.drafter})",
        *([f"  chosen   {ready.reason}"] if ready.reason else []),
        f"  model    {ready.model_name} in {ready.folder}; context {ready.max_model_len} tokens",
        f"  drafts   {_drafts(config, ready)}",
    ]
    facts = ready.facts
    if facts is not None:
        lines.append(f"  memory   {_memory(facts)}")
    lines.append(f"  access   {_access(service)}")
    if facts is not None and (test := facts.self_test) is not None:
        lines.append(
            f"  speed    {test.plain:.0f} tokens/s plain, {test.speculative:.0f} with speculation: "
            f"{test.speed_up:.2f}x on a list that repeats itself"
        )
    return "\n".join(lines)


def _drafts(config: EngineConfig, ready: Ready) -> str:
    if ready.node_budget == 0 or ready.drafter == "none":
        return "none: plain decoding"
    most = "at most" if config.control == "adaptive" else "always up to"
    return f"{ready.drafter}; {config.control}, {most} {ready.node_budget} nodes a step"


def _memory(facts: EngineFacts) -> str:
    cache_bytes = facts.num_blocks * facts.block_bytes
    num_tokens = facts.num_blocks * facts.block_size
    return (
        f"weights {_mib(facts.weight_bytes)}, drafters {_mib(facts.drafter_bytes)}, "
        f"KV cache {_mib(cache_bytes)}, {facts.num_blocks} blocks for {num_tokens} tokens"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def _access(service: Service) -> str:
    keys = len(service.settings.api_keys)
    if not keys:
        return "everybody; --api-key-file asks for a key"
    return f"who has {'the API key' if keys == 1 else f'one of {keys} API keys'}"
