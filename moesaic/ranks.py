"""`moesaic ranks`: the live table of a running server's ranks, and how many there are to be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from configs.env import read_env
from moesaic.http_client import Client, HttpError, unreached
from moesaic.options import SECONDS

LOOK_SECONDS = 0.5
COLOURS = {"up": "green", "joining": "yellow", "starting": "yellow", "loading": "yellow", "lost": "red"}


@click.command("ranks")
@click.option("--url", help="The server; default: MOESAIC_URL or http://127.0.0.1:8000.")
@click.option("--admin-api-key", help="Default: the first of MOESAIC_ADMIN_KEY.")
@click.option("--count", type=int, help="Grow or shrink to so many ranks, and wait until they serve.")
@click.option("--timeout", type=SECONDS, default=600.0, show_default=True, help="Seconds for --count.")
@click.option("--watch", is_flag=True, help="Show the table again and again, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table; with --watch one line each time.")
def command(
    url: str | None, admin_api_key: str | None, count: int | None, timeout: float, watch: bool, as_json: bool
) -> None:
    """Show which ranks of a running server serve, and with --count change how many there are. Exit code 1: not in
    time."""
    env = read_env()
    client = Client(url or env.url, admin_api_key or (env.admin_keys[0] if env.admin_keys else None))
    try:
        table = _resize(client, count, timeout) if count is not None else _get(client)
        if watch:
            with contextlib.suppress(KeyboardInterrupt):
                _watch(client, as_json)
        else:
            print(json.dumps(table), flush=True) if as_json else Console().print(_drawn(table))
    except BrokenPipeError:  # of our output: what reads it has ended (moesaic/cli.py)
        raise
    except (OSError, HttpError) as error:
        raise unreached(url or env.url, error) from None
    if count is not None and not watch and not _is_whole(table, count):
        print(f"moesaic: error: {count} ranks do not serve after {timeout:g} s", file=sys.stderr)
        sys.exit(1)


def _get(client: Client) -> dict[str, Any]:
    table: dict[str, Any] = asyncio.run(client.get("/admin/ranks"))
    return table


def _resize(client: Client, count: int, timeout: float) -> dict[str, Any]:
    """The table when all serve, or the last one when the time is over."""
    deadline = time.monotonic() + timeout
    table: dict[str, Any] = asyncio.run(client.post("/admin/ranks", {"count": count}))
    while not _is_whole(table, count) and table["count"] == count and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        table = _get(client)
    return table


def _is_whole(table: dict[str, Any], count: int) -> bool:
    return bool(table["count"] == count and table["mode"] == "full")


def _watch(client: Client, as_json: bool) -> None:
    if as_json:
        while True:
            print(json.dumps(_get(client)), flush=True)
            time.sleep(LOOK_SECONDS)
    with Live(_drawn(_get(client)), refresh_per_second=4) as live:
        while True:
            time.sleep(LOOK_SECONDS)
            live.update(_drawn(_get(client)))


def _drawn(table: dict[str, Any]) -> Table:
    title = f"{table['mode']}, epoch {table['epoch']}; may have {table['fewest']} to {table['most']} ranks"
    drawn = Table(title=title, title_justify="left")
    for name in ("rank", "state", "pid", "epoch", "running", "waiting", "KV used", "losses", "recovery"):
        drawn.add_column(name, justify="left" if name == "state" else "right")
    for row in table["ranks"]:
        colour = COLOURS.get(row["state"], "default")
        total = row["kv_blocks_total"]
        recovery = row["last_recovery_seconds"]
        drawn.add_row(
            str(row["rank"]),
            f"[{colour}]{row['state']}[/]",
            "-" if row["pid"] is None else str(row["pid"]),
            str(row["epoch"]),
            str(row["running"]),
            str(row["waiting"]),
            f"{row['kv_blocks_used'] / total:.0%}" if total else "-",
            str(row["losses"]),
            "-" if recovery is None else f"{recovery:.2f} s",
        )
    return drawn
