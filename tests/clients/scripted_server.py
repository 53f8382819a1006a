"""A server on a port of this machine whose model says what a test has written for it: the real front on a fake of the
rank side, for programs that need more than the embedded model can say."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from server_parts import FakeRanks, server, small_tokenizer

from configs.server import ServerConfig
from front.messages import AddRequest
from server.http import bounded_protocol
from server.process import HttpServer

CONTEXT = 1 << 20  # tokens; programs begin with tens of thousands, of so small a vocabulary
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class ScriptedRanks(FakeRanks):
    """says: from the text of a prompt to that of the answer."""

    def __init__(self, says: Callable[[str], str]) -> None:
        super().__init__()
        self._says = says
        self._scripts: dict[int, list[int]] = {}
        self.prompts: list[str] = []

    def script_of(self, message: AddRequest) -> list[int]:
        if message.request_id not in self._scripts:
            prompt = small_tokenizer().decode(message.token_ids[: message.prompt_len])
            self.prompts.append(prompt)
            text = self._says(prompt)
            self._scripts[message.request_id] = [*small_tokenizer().encode(text, add_special_tokens=False), 0]
        return self._scripts[message.request_id]


@contextlib.asynccontextmanager
async def scripted(says: Callable[[str], str], seconds: float) -> AsyncIterator[tuple[str, ScriptedRanks]]:
    """Its address, and the ranks. seconds: a test that takes longer fails."""
    ranks = ScriptedRanks(says)
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3", chat_template=TEMPLATE)
    async with server(config, ranks=ranks, seconds=seconds, max_model_len=CONTEXT) as s:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            http = HttpServer(
                uvicorn.Config(
                    s.app, http=bounded_protocol(config.max_header_bytes), ws="none", lifespan="off", log_config=None
                )
            )
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", ranks
            finally:
                http.should_exit = True
                await serving
