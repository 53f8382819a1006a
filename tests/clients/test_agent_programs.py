"""Programs that work by themselves, from the registry, against a server whose model says what is written here: each asks,
calls a tool of its own, and answers with what the tool gave. They are installed by: make clients."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from scripted_server import scripted

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / ".venv" / "clients" / "node" / "node_modules" / ".bin"
PATIENCE = 240.0  # seconds; they are large, and the machine may be shared
ANSWER = "All is done."

pytestmark = [pytest.mark.clients, pytest.mark.slow]


def program(name: str) -> str:
    path = PROGRAMS / name
    if not path.exists():
        pytest.skip(f"needs {name}, which is installed by: make clients")
    return str(path)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def run(command: list[str], directory: Path, environment: dict[str, str]) -> str:
    """What it prints. Its home is a directory of the test: no settings and no keys of the user's are read."""
    given = {"PATH": os.environ["PATH"], "HOME": str(directory), "NO_COLOR": "1", **environment}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env=given,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        pytest.fail(f"not within {PATIENCE:g} s: {out.decode()}{err.decode()}")
    assert process.returncode == 0, out.decode() + err.decode()
    return out.decode()


def test_codex(tmp_path: Path) -> None:
    """By /v1/responses, with its function get_goal, for which nothing has to be run."""
    codex = program("codex")
    turns: list[str] = []

    def says(prompt: str) -> str:
        turns.append(prompt)
        return call("get_goal") if len(turns) == 1 else ANSWER

    async def main() -> None:
        async with scripted(says, PATIENCE) as (url, _):
            provider = f'name = "Moesaic"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
            (tmp_path / "config.toml").write_text(
                f'model = "fox-moe"\nmodel_provider = "moesaic"\n[model_providers.moesaic]\n{provider}'
                "[analytics]\nenabled = false\n"
            )
            words = ["exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only", "Look."]
            out = await run([codex, *words], tmp_path, {"CODEX_HOME": str(tmp_path)})
            items = [json.loads(line).get("item", {}) for line in out.splitlines()]
            assert any(item.get("type") == "agent_message" and item["text"] == ANSWER for item in items), out
            first, second = turns
            result = second.removeprefix(first.removesuffix("assistant:"))
            assert len(result) < len(second) and "tool:" in result and "unsupported call" not in result, result

    asyncio.run(main())


def test_claude_code(tmp_path: Path) -> None:
    """By /v1/messages, with its tool Read."""
    claude = program("claude")
    note = tmp_path / "note.txt"
    note.write_text("The fox is seven.\n")

    def says(prompt: str) -> str:
        return ANSWER if "The fox is seven." in prompt else call("Read", file_path=str(note))

    async def main() -> None:
        async with scripted(says, PATIENCE) as (url, ranks):
            environment = {
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_AUTH_TOKEN": "none",
                "ANTHROPIC_MODEL": "fox-moe",
                "ANTHROPIC_SMALL_FAST_MODEL": "fox-moe",
                "CLAUDE_CONFIG_DIR": str(tmp_path / "settings"),
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
            }
            words = ["-p", "What does note.txt say?", "--output-format", "json", "--allowed-tools", "Read"]
            found = json.loads(await run([claude, *words], tmp_path, environment))
            assert found["result"] == ANSWER and not found["is_error"], found
            assert sum("The fox is seven." in prompt for prompt in ranks.prompts) == 1

    asyncio.run(main())
