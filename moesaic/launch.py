"""`moesaic launch`: what another system needs to start a server on several nodes, printed or handed to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any, get_args

import click

from launch.launchers.manifests import Kind, manifests
from launch.launchers.plan import CONTAINER, LaunchPlan, shell
from launch.launchers.shells import namespaces, slurm, ssh, torchrun
from launch.launchers.units import compose, systemd
from moesaic import serve
from moesaic.host_options import Counts

HERE = (sys.executable, "-m", "moesaic")
# System -> what takes the text on its standard input; None: a person does.
RUNS: dict[str, list[str] | None] = {
    "slurm": ["sbatch"],
    "k8s": ["kubectl", "apply", "-f", "-"],
    "ray": ["bash", "-s"],
    "torchrun": ["bash", "-s"],
    "ssh": ["bash", "-s"],
    "compose": ["docker", "compose", "-f", "-", "up"],
    "systemd": None,
    "netns": ["bash", "-s"],
}
# Options of serve that follow from this command's own.
OWN = {"nnodes", "node_rank", "headless", "host", "port", "uds", "shutdown_timeout", "startup_timeout"} | {
    f"data_parallel_{name}" for name in ("size", "size_local", "address", "rpc_port", "start_rank")
}


@click.command("launch")
@click.argument("system", type=click.Choice(list(RUNS)))
@click.option("--print", "only_print", is_flag=True, help="Print it, and start nothing.")
@click.option("--nodes", type=int, default=2, show_default=True, help="Machines, or parts of them.")
@click.option("--ranks-per-node", type=Counts(), metavar="N[,N...]", help="Default: one for each GPU, or one.")
@click.option("--gpus-per-node", type=click.IntRange(0), default=0, show_default=True, help="0: ranks on CPUs.")
@click.option("--cpus-per-node", type=click.IntRange(0), default=0, help="Asked of Ray, or a container's limit.")
@click.option("--memory-per-node", default="", help="A container's limit, e.g. 256Gi.")
@click.option("--hosts", default="", metavar="HOST,...", help="Names of the nodes, the head's first (ssh, systemd).")
@click.option("--host", help="Where the head answers HTTP; default: 127.0.0.1, in containers 0.0.0.0.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Its port.")
@click.option("--rpc-port", type=click.IntRange(1, 65000), default=29550, show_default=True, help="First of the ports.")
@click.option("--shutdown-timeout", type=click.IntRange(1), default=20, show_default=True, help="Seconds of a drain.")
@click.option("--startup-timeout", type=click.IntRange(1), default=2700, show_default=True, help="Seconds.")
@click.option("--image", default="moesaic:latest", show_default=True, help="Of containers.")
@click.option("--name", default="moesaic", show_default=True, help="Of the job, service or containers.")
@click.option("--kind", type=click.Choice(get_args(Kind)), default="statefulset", show_default=True, help="Of k8s.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL] [-- OPTIONS OF serve]")
def command(system: str, only_print: bool, words: tuple[str, ...], **options: Any) -> None:
    """Start a server on several nodes by SYSTEM, or print what it needs for that.

    Every node runs the same words and finds its place in the environment that SYSTEM makes (docs/launch.md).
    """
    plan = _plan(system, words, **options)
    text = _text(system, plan, options["kind"])
    if only_print:
        click.echo(text, nl=False)
        return
    runs = RUNS[system]
    if runs is None:
        raise ValueError(f"{system} needs --print: what it prints is to be installed on each machine")
    sys.exit(_run(runs, text))


def _plan(system: str, words: tuple[str, ...], **given: Any) -> LaunchPlan:
    contained = system in ("k8s", "compose")
    model = words[0] if words and not words[0].startswith("-") else None
    more = words if model is None else words[1:]
    _check(more)
    counts = given["ranks_per_node"] or (given["gpus_per_node"] or 1,)
    usual_host = "0.0.0.0" if contained else "10.78.0.1" if system == "netns" else "127.0.0.1"
    if given["kind"] != "statefulset" and system != "k8s":
        raise ValueError(f"--kind {given['kind']} is for k8s, not for {system}")
    return LaunchPlan(
        model=model,
        nodes=given["nodes"],
        ranks=counts * given["nodes"] if len(counts) == 1 else counts,
        gpus=given["gpus_per_node"],
        name=given["name"],
        program=CONTAINER if contained else HERE,
        options=more,
        host=given["host"] or usual_host,
        port=given["port"],
        rpc_port=given["rpc_port"],
        drain=given["shutdown_timeout"],
        startup=given["startup_timeout"],
        image=given["image"],
        memory=given["memory_per_node"],
        cpus=given["cpus_per_node"],
        addresses=tuple(name.strip() for name in given["hosts"].split(",") if name.strip()),
    )


def _check(words: tuple[str, ...]) -> None:
    """The names of serve's options, before a job waits in a queue with a wrong one. Files may be on the nodes only."""
    context = click.Context(serve.command, info_name="serve")
    values, rest, _ = serve.command.make_parser(context).parse_args(list(words))
    taken = sorted(OWN & values.keys())
    if taken:
        raise ValueError(f"--{taken[0].replace('_', '-')} is decided by launch: give it launch's own options")
    stray = [values["model"]] if isinstance(values.get("model"), str) else rest
    if stray:
        raise ValueError(f"unexpected word {stray[0]!r} among the options of serve")


def _text(system: str, plan: LaunchPlan, kind: Kind) -> str:
    if system == "k8s":
        return manifests(plan, kind)
    if system == "ray":
        return ray(plan)
    texts = {
        "slurm": slurm,
        "torchrun": torchrun,
        "ssh": ssh,
        "compose": compose,
        "systemd": systemd,
        "netns": namespaces,
    }
    return texts[system](plan)


def ray(plan: LaunchPlan) -> str:
    """A line for one machine of a Ray cluster."""
    words = plan.words(0, "x")
    place = words.index("--nnodes")
    words = words[:place] + words[place + 6 :]  # each actor is told its own
    command = [sys.executable, "-m", "launch.launchers.ray_nodes", "--nodes", str(plan.nodes)]
    command += ["--gpus", str(plan.gpus), "--cpus", str(plan.cpus or 1), "--drain", str(plan.drain), "--", *words]
    return f"#!/bin/bash\n# On any machine of a Ray cluster that has {plan.nodes} nodes.\nexec {shell(command)}\n"


def _run(command: list[str], text: str) -> int:
    """Its exit code; a signal is passed on to it, once."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
    except OSError as error:
        raise ValueError(
            f"{command[0]} cannot be started: {error.strerror}; --print shows what it would be given"
        ) from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(process.pid, number))
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(text)
    code = process.wait()
    return code if code >= 0 else 128 - code
