"""`moesaic chat`: a conversation with a running server, in the terminal."""

from __future__ import annotations

import asyncio
import importlib
import ssl
import sys
from collections.abc import Callable
from typing import Any

import click

from configs.env import read_env
from moesaic.chat.conversation import Conversation
from moesaic.http_client import Client, HttpError, unreached

COMMANDS = ["/help", "/reset", "/system ", "/params ", "/save ", "/exit"]
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@click.command("chat")
@click.option("--url", help="The server, http:// or https://; default: MOESAIC_URL or http://127.0.0.1:8000.")
@click.option("--api-key", help="Default: the first of MOESAIC_API_KEY.")
@click.option("--model", help="Default: the first that the server names.")
@click.option("--system", help="A system message.")
@click.option("--temperature", type=float, help="Default: the server's.")
@click.option("--top-p", type=float, help="Default: the server's.")
@click.option("--max-tokens", type=int, help="Default: the rest of the context.")
@click.argument("message", required=False)
def command(message: str | None, **options: Any) -> None:
    """Talk to a running server. With MESSAGE: one answer, then exit. Ctrl-C stops an answer, Ctrl-D ends the
    conversation, /help lists what else there is."""
    env = read_env()
    url = options["url"] or env.url
    client = Client(url, options["api_key"] or (env.api_keys[0] if env.api_keys else None))
    try:
        model = options["model"] or asyncio.run(client.get("/v1/models"))["data"][0]["id"]
        params = {name: options[name] for name in ("temperature", "top_p", "max_tokens")}
        conversation = Conversation(model, options["system"], params)
        if message is not None:
            conversation.say("user", message)
            _answer(client, conversation)
            return
    except ssl.SSLCertVerificationError as error:
        reason = f"certificate verify failed: {error.verify_message}; SSL_CERT_FILE=FILE names a certificate to trust"
        raise ValueError(f"{url}: {reason}") from None
    except (OSError, HttpError) as error:
        raise unreached(url, error) from None
    print(f"{model}. /help lists the commands, Ctrl-D ends.", file=sys.stderr)
    _converse(client, url, conversation, _reader())


def _reader() -> Callable[[str], str]:
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        return input
    ask: Callable[[str], str] = importlib.import_module("moesaic.chat.line_editing").Lines(COMMANDS).ask
    return ask


def _converse(client: Client, url: str, conversation: Conversation, ask: Callable[[str], str]) -> None:
    """Until Ctrl-D. Nothing that goes wrong with one answer ends the conversation."""
    while True:
        try:
            text = ask("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            _note("Ctrl-D ends")
            continue
        if text == "/exit":
            return
        if text.startswith("/") and not text.startswith("//"):
            try:
                _note(conversation.command(text))
            except ValueError as error:
                _note(str(error))
            continue
        if not text:
            continue
        conversation.say("user", text[1:] if text.startswith("//") else text)
        try:
            _answer(client, conversation)
        except KeyboardInterrupt:
            _note("stopped")
        except OSError as error:
            _note(f"{unreached(url, error)}; the message was not answered")
        except HttpError as error:
            _note(f"{error}; the message was not answered")
        if conversation.messages[-1]["role"] == "user":
            conversation.take_back()


def _answer(client: Client, conversation: Conversation) -> None:
    """Prints the answer while it comes, and keeps what has come also when it is broken off. Turns that have no room in
    the context any more are dropped, oldest first, and that is said."""
    dropped = 0
    while True:
        pieces: list[str] = []
        try:
            cut = asyncio.run(_stream(client, conversation.request(), pieces))
            break
        except HttpError as error:
            if error.code != "context_length_exceeded" or not conversation.drop_oldest():
                raise
            dropped += 1
        finally:
            if pieces:
                conversation.say("assistant", "".join(pieces))
    if not pieces:
        conversation.say("assistant", "")
    if dropped:
        _note(f"the context is full: the oldest {dropped} turn(s) are forgotten")
    if cut and "max_tokens" not in conversation.params:
        _note("the answer ends here because the context is full")


async def _stream(client: Client, request: dict[str, Any], pieces: list[str]) -> bool:
    """Whether the answer was cut off. pieces: gets the text while it comes."""
    cut = thinking = shown = False
    try:
        async for event in client.events("/v1/chat/completions", request):
            for choice in event["choices"]:
                delta = choice["delta"]
                thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
                if bool(thought) != thinking and (thought or delta.get("content")):
                    thinking = bool(thought)
                    print(DIM if thinking else f"{PLAIN}\n", end="") if sys.stdout.isatty() else print()
                for call in delta.get("tool_calls") or ():
                    thought += _shown_call(call.get("function") or {})
                piece = delta.get("content") or ""
                pieces.append(piece)
                print(thought + piece, end="", flush=True)
                shown = True
                cut = cut or choice["finish_reason"] == "length"
    finally:  # also where it is stopped: what comes next is not dim, and on a line of its own
        if shown:
            print(PLAIN if thinking and sys.stdout.isatty() else "", flush=True)
    return cut


def _shown_call(function: dict[str, Any]) -> str:
    name = function.get("name")
    return (f"\n[{name}] " if name else "") + (function.get("arguments") or "")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
