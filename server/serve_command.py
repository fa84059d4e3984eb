"""specdec serve: the options of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.config import EngineConfig
from specdec.options import engine_options
from specdec.server.settings import DEFAULTS as SERVER
from specdec.server.settings import ServerSettings


@engine_options()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Model name that clients use; default: the model's.")
    ] = None,
    *,
    config: EngineConfig,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys, one to a line; or SPECDEC_API_KEYS, commas between. "
            "With a key all but /health asks for one."
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Site whose pages may ask, as https://example.org; repeatable."),
    ] = None,
    rate_limit: Annotated[
        float,
        typer.Option(help="POST requests per minute of each key, or address; 0 = no limit."),
    ] = SERVER.rate_limit,
    max_queued_requests: Annotated[
        int, typer.Option(help="Most requests without a token yet; 0 = no bound.")
    ] = SERVER.max_queued_requests,
    max_queued_tokens: Annotated[
        int, typer.Option(help="Most tokens of their prompts; 0 = no bound.")
    ] = SERVER.max_queued_tokens,
    max_body_len: Annotated[
        int, typer.Option(help="Longest body of a request in bytes.")
    ] = SERVER.max_body_len,
    max_header_len: Annotated[
        int, typer.Option(help="Longest head of a request in bytes.")
    ] = SERVER.max_header_len,
    header_timeout: Annotated[
        float, typer.Option(help="Seconds for a request's head.")
    ] = SERVER.header_timeout_s,
    body_timeout: Annotated[
        float, typer.Option(help="Seconds for a request's body.")
    ] = SERVER.body_timeout_s,
    queue_timeout: Annotated[
        float, typer.Option(help="Seconds until the engine begins, then 503; 0 = no limit.")
    ] = SERVER.queue_timeout_s,
    first_token_timeout: Annotated[
        float, typer.Option(help="Seconds until the first token, then 504; 0 = no limit.")
    ] = SERVER.first_token_timeout_s,
    total_timeout: Annotated[
        float, typer.Option(help="Seconds for a whole answer, then 504; 0 = no limit.")
    ] = SERVER.total_timeout_s,
    send_timeout: Annotated[
        float, typer.Option(help="Seconds after which a client that reads nothing is dropped.")
    ] = SERVER.send_timeout_s,
    template_timeout: Annotated[
        float, typer.Option(help="Seconds for a chat template.")
    ] = SERVER.template_timeout_s,
    grace: Annotated[
        float, typer.Option(help="Seconds that running answers have after the first signal.")
    ] = SERVER.grace_s,
    hang: Annotated[
        float,
        typer.Option(help="Seconds of the engine's silence that mean it hangs; 0 = no limit."),
    ] = SERVER.hang_s,
    strict_params: Annotated[
        bool, typer.Option("--strict-params", help="Refuse unknown fields of a body.")
    ] = SERVER.strict_params,
    force_usage: Annotated[
        bool, typer.Option("--force-usage", help="Every stream ends with its usage.")
    ] = SERVER.force_usage,
    request_templates: Annotated[
        bool, typer.Option("--allow-request-templates", help="A request may bring a chat template.")
    ] = SERVER.request_templates,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="A line of JSON on stderr for each request.")
    ] = SERVER.access_log,
    self_test: Annotated[
        bool, typer.Option(help="Measure the speed at the start; about 2 s.")
    ] = SERVER.self_test,
    shadow: Annotated[
        float,
        typer.Option(
            help="Share of finished requests, 0 to 1, that are run again without speculation "
            "while the server is idle; tokens that differ are counted and logged."
        ),
    ] = SERVER.shadow,
) -> None:
    """Serve the OpenAI-compatible API, a chat page at / and a dashboard at /dashboard."""
    from specdec.server.api_keys import load_keys

    settings = ServerSettings(
        api_keys=load_keys(api_key_file),
        cors_origins=tuple(cors_origin or ()),
        strict_params=strict_params,
        force_usage=force_usage,
        request_templates=request_templates,
        access_log=access_log,
        self_test=self_test,
        shadow=shadow,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        rate_limit=rate_limit,
        max_body_len=max_body_len,
        max_header_len=max_header_len,
        header_timeout_s=header_timeout,
        body_timeout_s=body_timeout,
        queue_timeout_s=queue_timeout,
        first_token_timeout_s=first_token_timeout,
        total_timeout_s=total_timeout,
        send_timeout_s=send_timeout,
        template_timeout_s=template_timeout,
        grace_s=grace,
        hang_s=hang,
    )
    from specdec.server.serve import serve as run

    run(config, settings, host=host, port=port, served_model_name=served_model_name)
