"""Launches that are scripts of bash: Slurm's, torchrun's, over ssh, and network namespaces on this machine."""

from __future__ import annotations

import shlex

from launch.launchers.plan import LaunchPlan, shell

LEAVE_SECONDS = 30  # beyond a drain
TORCHRUN_SECONDS = 25  # of a drain: torchrun kills what has not left 30 s after a signal
# The exit code of a child, also when a signal has broken off the wait for it.
ENDED = """ended() {
    local code last
    while :; do
        wait "$1" && code=0 || code=$?
        kill -0 "$1" 2>/dev/null || break
    done
    if wait "$1" 2>/dev/null; then code=0; else last=$?; [ "$last" -eq 127 ] || code=$last; fi
    return "$code"
}"""


def slurm(plan: LaunchPlan) -> str:
    """A batch script: one task per node, each of which finds its place in its own environment."""
    gpus = f"#SBATCH --gpus-per-node={plan.gpus}\n" if plan.gpus else ""
    return f"""#!/bin/bash
#SBATCH --job-name={plan.name}
#SBATCH --nodes={plan.nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --signal=TERM@{plan.drain + LEAVE_SECONDS}
#SBATCH --output={plan.name}-%j.log
# Every task reads SLURM_NODEID and SLURM_STEP_NODELIST itself: nothing of it is expanded here, in the batch shell.
# A node that fails ends neither the job (--no-kill) nor the step (--no-kill, --kill-on-bad-exit=0, --wait=0): the
# others serve on, and one that comes back joins them. scancel sends SIGTERM to the step: running requests have
# {plan.drain} s, so slurm.conf's KillWait must be more than that.
set -u
{ENDED}
srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --label \\
    {shell(plan.command("node"), "        ")} &
step=$!
trap : TERM INT  # the tasks have got it too; to srun it would mean to kill them
ended "$step"
"""


def torchrun(plan: LaunchPlan) -> str:
    """A line that is the same on every node, but for the number of the node. ValueError for a drain that torchrun would
    cut short."""
    if plan.drain > TORCHRUN_SECONDS:
        raise ValueError(
            f"--shutdown-timeout must be at most {TORCHRUN_SECONDS} with torchrun, not {plan.drain}: torchrun kills "
            "what has not left 30 s after a signal"
        )
    head = plan.addresses[0] if plan.addresses else "HEAD"
    [python, *module] = plan.program
    port = plan.rpc_port + 4 + sum(plan.ranks)  # the first that the server does not use
    words = [python, "-m", "torch.distributed.run", f"--nnodes={plan.nodes}", "--node-rank=NODE_RANK"]
    words += ["--nproc-per-node=1", f"--master-addr={head}", f"--master-port={port}", "--max-restarts=0"]
    words += [*module, *plan.command("node")[len(plan.program) :]]
    line = shell(words).replace("--node-rank=NODE_RANK", '--node-rank="$NODE_RANK"')
    return f"""#!/bin/bash
# To be run on each of the {plan.nodes} nodes, with NODE_RANK=0 on {head}, 1, 2, ... on the others. One process per
# node: it starts that node's ranks itself. --max-restarts=0, because torchrun starts all nodes again when one has
# failed, and here the others go on: what is killed is started again by `moesaic node`.
set -u
: "${{NODE_RANK:?the number of this node, from 0 on}}"
exec {line}
"""


def ssh(plan: LaunchPlan) -> str:
    """One connection for each node, whose process goes on when it breaks; a signal is passed on to all of them."""
    if not plan.addresses:
        raise ValueError("ssh needs --hosts: the names of the nodes, the head's first, with commas between them")
    starts = []
    for index, address in enumerate(plan.addresses):
        line = shlex.join(plan.command("node", index, plan.addresses[0]))
        starts.append(f"start {index} {shlex.quote(address)} {shlex.quote(line)}")
    pid = f"/tmp/{plan.name}-{plan.rpc_port}"
    return f"""#!/bin/bash
# Starts a process on every node over ssh, prefixes what they say, and ends when all have ended. SIGTERM or SIGINT to
# this script is sent to each of them. $SSH may be another command that takes a host and a line for its shell.
set -u
{ENDED}
SSH="${{SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5}}"
connections=()
hosts=()
start() {{  # index, host, line
    $SSH "$2" "echo \\$\\$ > {pid}-$1.pid; exec $3" < /dev/null > >(sed -u "s/^/node $1: /") 2>&1 &
    connections+=($!)
    hosts+=("$2")
}}
leave() {{
    for index in "${{!hosts[@]}}"; do
        $SSH "${{hosts[$index]}}" "kill -TERM \\$(cat {pid}-$index.pid)" < /dev/null &
    done
}}
trap leave TERM INT
{chr(10).join(starts)}
code=0
for connection in "${{connections[@]}}"; do ended "$connection" || code=$?; done
exit "$code"
"""


def namespaces(plan: LaunchPlan) -> str:
    """Hosts of network namespaces on this machine, whose head answers under an address that this machine reaches."""
    starts = []
    for index in range(plan.nodes):
        line = shlex.join(plan.command("node", index, "10.78.0.1"))
        starts.append(f"start {index} {line}")
    return f"""#!/bin/bash
# {plan.nodes} hosts made of network namespaces on a switch, a part of one server on each; clients of this machine reach
# it at http://10.78.0.1:{plan.port}. Needs root and iproute2. SIGTERM or SIGINT to this script
# drains the server; then everything goes with it.
set -eu
{ENDED}
net="{plan.name}-$$"
switch="moe$$"
agents=()
remove() {{
    for agent in "${{agents[@]}}"; do kill -KILL "$agent" 2>/dev/null || :; done
    for host in $(seq 0 {plan.nodes - 1}); do ip netns delete "$net-$host" 2>/dev/null || :; done
    ip link delete "$switch" 2>/dev/null || :
}}
trap remove EXIT
ip link add name "$switch" type bridge
ip addr add 10.78.0.254/24 dev "$switch"
ip link set "$switch" up
start() {{  # index, words
    host="$net-$1"
    ip netns add "$host"
    ip link add name "$switch.$1" type veth peer name eth0 netns "$host"
    ip link set "$switch.$1" master "$switch" up
    ip -n "$host" addr add "10.78.0.$(($1 + 1))/24" dev eth0
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
    shift
    ip netns exec "$host" setpriv --pdeathsig KILL "$@" < /dev/null &
    agents+=($!)
}}
leave() {{
    for agent in "${{agents[@]}}"; do kill -TERM "$agent" 2>/dev/null || :; done
}}
trap leave TERM INT
{chr(10).join(starts)}
code=0
for agent in "${{agents[@]}}"; do ended "$agent" || code=$?; done
exit "$code"
"""
