"""`moesaic serve`: its options. What it does is imported when they have been understood (moesaic/serving.py), so that a
wrong one is said at once."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from configs.server import STRUCTURED_BACKENDS
from front.chat.families import REASONING_PARSERS, TOOL_PARSERS
from launch.early import drop_early
from moesaic.command_line import VllmCommand
from moesaic.host_options import host_options
from moesaic.options import SECONDS, Bytes, engine_options
from moesaic.rooms import no_collections


@click.command("serve", cls=VllmCommand)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: every one of this machine."
)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port to listen on.")
@click.option("--uds", type=click.Path(), help="Unix domain socket to listen on, in the place of host and port.")
@click.option("--api-key", multiple=True, help="Key that clients must send; repeatable; or MOESAIC_API_KEY.")
@click.option("--admin-api-key", multiple=True, help="Key for admin routes; or MOESAIC_ADMIN_KEY.")
@click.option("--chat-template", type=click.Path(exists=True, dir_okay=False), help="File that replaces the model's.")
@click.option(
    "--tool-call-parser",
    type=click.Choice([*TOOL_PARSERS, "none"]),
    help="Format in which the model calls tools; default: what its chat template says.",
)
@click.option(
    "--reasoning-parser",
    type=click.Choice([*REASONING_PARSERS, "none"]),
    help="Format of the model's reasoning; default: what its chat template says.",
)
@click.option(
    "--structured-outputs-config",
    help=f"Field backend: {', '.join(STRUCTURED_BACKENDS)} (needs moesaic[xgrammar]); JSON; default: auto, llguidance.",
)
@click.option(
    "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
    default=True,
    show_default=True,
    help="Whether the model may choose to call tools, where a request gives some.",
)
@click.option(
    "--exclude-tools-when-tool-choice-none",
    is_flag=True,
    help='Do not tell the model of tools where a request says tool_choice: "none".',
)
@click.option("--enable-force-include-usage", is_flag=True, help="Usage in every piece of every stream.")
@click.option(
    "--enable-prompt-tokens-details/--no-enable-prompt-tokens-details",
    default=True,
    show_default=True,
    help="Usage of completions and chats with details: cached tokens, drafts, reasoning.",
)
@click.option(
    "--return-tokens-as-token-ids",
    is_flag=True,
    help='Tokens of logprobs as "token_id:N", unless a request says otherwise.',
)
@click.option(
    "--generation-config",
    type=click.Choice(["auto", "vllm"]),
    default="auto",
    show_default=True,
    help="Where the defaults of sampling come from: the model's generation_config.json, or the API's own.",
)
@click.option("--override-generation-config", help="Defaults of sampling in its place, as a JSON object or a file.")
@click.option("--default-chat-template-kwargs", help="What templates get unless a request says otherwise; JSON.")
@click.option(
    "--chat-template-content-format",
    type=click.Choice(["auto", "string", "openai"]),
    default="auto",
    show_default=True,
    help="What templates get of a message: one text (auto, string), or a list of parts as the API has it.",
)
@click.option("--root-path", default="", help="Path before every route that a proxy leaves there, such as /models/a.")
@click.option("--ssl-certfile", type=click.Path(exists=True, dir_okay=False), help="With --ssl-keyfile: HTTPS.")
@click.option("--ssl-keyfile", type=click.Path(exists=True, dir_okay=False), help="Its key, without a password.")
@click.option(
    "--max-request-bytes", type=Bytes(), default=8 << 20, help="Body of a request; beyond: 413; default: 8Mi."
)
@click.option(
    "--max-inflight-bytes",
    type=Bytes(),
    default=256 << 20,
    help="Bodies of all requests together; beyond: 503 with Retry-After; default: 256Mi.",
)
@click.option(
    "--max-num-queued-reqs",
    type=click.IntRange(0),
    default=4096,
    show_default=True,
    help="Beyond: 503 with Retry-After.",
)
@click.option(
    "--max-stored-responses",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="Responses that are kept for previous_response_id; 0: none.",
)
@click.option("--max-stored-bytes", type=Bytes(), default=64 << 20, help="Of them together; default: 64Mi.")
@click.option("--shutdown-timeout", type=SECONDS, default=30.0, show_default=True, help="Seconds a drain may take.")
@click.option("--sse-keep-alive-interval", type=SECONDS, default=15.0, show_default=True, help="Seconds; 0: never.")
@click.option("--request-timeout", type=SECONDS, default=0.0, show_default=True, help="Seconds; 0: none.")
@click.option("--allowed-origins", multiple=True, help="CORS origins; none: closed.")
@click.option(
    "--eplb-record-dir",
    type=click.Path(exists=True, file_okay=False, writable=True),
    help="Directory for recordings of the experts' loads (POST /eplb/record); default: none can be made.",
)
@click.option(
    "--profile-dir",
    type=click.Path(exists=True, file_okay=False, writable=True),
    help="Directory for timelines (POST /start_profile); default: none can be taken.",
)
@click.option("--otlp-traces-endpoint", help="Where spans go, as http://HOST:4318/v1/traces; default: nowhere.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of lines on stderr."
)
@click.option(
    "--log-requests/--no-log-requests",
    "--enable-log-requests/--disable-log-requests",
    default=True,
    show_default=True,
    help="A line for each that ends, without its texts.",
)
@click.option("--startup-timeout", type=SECONDS, default=600.0, show_default=True, help="Seconds until ready.")
@click.option("--parent", type=int, hidden=True, help="Process id of the parent, with which this one ends.")
@host_options
@engine_options
def command(**options: Any) -> None:
    """Serve MODEL (a Hugging Face directory or name; without it, the embedded model on two ranks) over HTTP."""
    try:
        with no_collections():
            serving = importlib.import_module("moesaic.serving")
        code = serving.serve(options)
    finally:
        drop_early()
    sys.exit(code)
