"""`moesaic chat`: a conversation with a running server, in the terminal."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click

from configs.env import read_env
from moesaic.http_client import Client, HttpError


@click.command("chat")
@click.option("--url", help="The server; default: MOESAIC_URL or http://127.0.0.1:8000.")
@click.option("--api-key", help="Default: the first of MOESAIC_API_KEY.")
@click.option("--model", help="Default: the first that the server names.")
@click.option("--system", help="A system message.")
@click.option("--temperature", type=float, help="Default: the server's.")
@click.option("--max-tokens", type=int, help="Default: the rest of the context.")
@click.argument("message", required=False)
def command(message: str | None, **options: Any) -> None:
    """Talk to a running server. With MESSAGE: one answer, then exit. Ctrl-D ends the conversation."""
    env = read_env()
    key = options["api_key"] or (env.api_keys[0] if env.api_keys else None)
    client = Client(options["url"] or env.url, key)
    try:
        model = options["model"] or asyncio.run(client.get("/v1/models"))["data"][0]["id"]
        _converse(client, model, message, options)
    except (OSError, HttpError) as error:
        raise ValueError(f"{options['url'] or env.url}: {error}") from None


def _converse(client: Client, model: str, message: str | None, options: dict[str, Any]) -> None:
    messages: list[dict[str, str]] = []
    if options["system"]:
        messages.append({"role": "system", "content": options["system"]})
    request: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    request |= {name: options[name] for name in ("temperature", "max_tokens") if options[name] is not None}
    if message is None:
        print(f"{model}. Ctrl-D ends.", file=sys.stderr)
    while True:
        text = message if message is not None else _ask()
        if text is None:
            return
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": asyncio.run(_answer(client, request))})
        if message is not None:
            return


def _ask() -> str | None:
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return None
        if text:
            return text


async def _answer(client: Client, request: dict[str, Any]) -> str:
    """Prints the answer while it comes."""
    pieces: list[str] = []
    async for event in client.events("/v1/chat/completions", request):
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            pieces.append(piece)
            print(piece, end="", flush=True)
    print()
    return "".join(pieces)
