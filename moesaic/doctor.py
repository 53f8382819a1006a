"""`moesaic doctor`: what is wrong with this machine, or between those of a launch, before a server is started."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from configs.engine import Plan
from configs.env import interface_variables
from configs.hosts import Hosts
from configs.server import ServerConfig
from engine.plan import downloaded, make_plan, step_rows
from engine.process.console import guard_console
from launch.doctor.findings import ORDER, Finding, worst
from launch.doctor.machine import Machine
from launch.doctor.run import Doctor
from moesaic import serve, serving
from moesaic.host_options import take_hosts
from moesaic.options import EMBEDDED_RANKS, engine_config

EXIT_BROKEN = 1


@click.command("doctor", context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--alone", is_flag=True, help="This machine only, though it is a part of a launch (an init container).")
@click.option(
    "--wait", type=click.FloatRange(0.1, 3600), default=10.0, show_default=True, help="Seconds for the others."
)
@click.option("--expect-mbit", type=click.FloatRange(0), default=0.0, help="Mbit/s that a connection must carry.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[WORDS OF serve]")
def command(as_json: bool, alone: bool, wait: float, expect_mbit: float, words: tuple[str, ...]) -> None:
    """Check this machine for the server that `moesaic serve` with these words would start; on every node of a launch at
    once also what lies between them. Each line says ok, slow or broken, and what to type.

    Exit code 0: nothing is broken; 1: something is; 2: bad input.
    """
    guard_console()
    began = time.monotonic()
    doctor, http = examined(words, alone, wait, expect_mbit)
    found = doctor.run()
    if doctor.node == 0 and not alone and http.uds is None:
        found.append(_http_port(http.host, http.port))
    found.sort(key=lambda finding: (ORDER.index(finding.state), finding.check, finding.node))
    state = worst(found)
    if as_json:
        lines = msgspec.to_builtins(found)
        print(json.dumps({"state": state, "seconds": round(time.monotonic() - began, 2), "findings": lines}))
    else:
        for finding in found:
            print(finding.line(doctor.nodes))
        print(f"{state}: {len(found)} findings in {time.monotonic() - began:.1f} s")
    sys.stdout.flush()
    sys.exit(EXIT_BROKEN if state == "broken" else 0)


def examined(
    words: Sequence[str], alone: bool, wait: float, expect_mbit: float = 0.0, **more: Any
) -> tuple[Doctor, ServerConfig]:
    """The doctor for a server with these words. more: fields of it in the place of what is found here."""
    options = serve.command.make_context("serve", list(words)).params
    given = options["model"] or options["model_option"]
    if options["headless"] or options["data_parallel_start_rank"] is not None:
        raise ValueError("the doctor needs --nnodes and --node-rank in the place of --headless")
    http = serving.server_config(options, (), ())
    for name in ("parent", "startup_timeout"):
        options.pop(name)
    hosts, place = take_hosts(options, 1 if given else EMBEDDED_RANKS, None)
    plan, error, fix, directory = None, "", "see the message", None
    try:
        directory = downloaded(given, options["revision"], options["download_dir"])
    except ValueError as missing:
        error, fix = str(missing), f"hf download {given}"
    else:
        plan, error = _plan(options, hosts)
    doctor = Doctor(
        machine=Machine(place.index, plan, variables=interface_variables()),
        model=directory if plan is None else Path(plan.model_path),
        error=error,
        fix=fix,
        hosts=None if alone else hosts,
        nodes=1 if alone else place.nodes,
        patience=wait,
        rows=(0, 0) if plan is None else step_rows(plan),
        expected=expect_mbit * 1e6 / 8,
        **more,
    )
    return doctor, http


def _plan(options: dict[str, Any], hosts: Hosts | None) -> tuple[Plan | None, str]:
    """None and why none can be made: that is a finding like the others."""
    try:
        return make_plan(engine_config(options), hosts=hosts), ""
    except ValueError as error:
        return None, str(error)


def _http_port(host: str, port: int) -> Finding:
    """Where clients are to find the head."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        text = f"cannot listen on {host}:{port}: {error.strerror or error}"
        return Finding("http", 0, "broken", text, f"ss -ltnp sport = :{port}; --port")
    return Finding("http", 0, "ok", f"{host}:{port} is free")
