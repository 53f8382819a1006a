"""Launches that are files for a system on each machine: containers of compose, and units of systemd."""

from __future__ import annotations

import re
import shlex

import yaml

from launch.launchers.plan import LaunchPlan

LEAVE_SECONDS = 20  # beyond the drain
# An answer other than 200 is an error; whatever proxy the machine has is not asked.
CHECK = "import urllib.request as r; r.build_opener(r.ProxyHandler({{}})).open('http://127.0.0.1:{port}/ready')"


def compose(plan: LaunchPlan) -> str:
    """Nodes are containers of one machine, on a network of their own; the head's port is open to this machine."""
    services = {}
    for index in range(plan.nodes):
        service: dict[str, object] = {
            "image": plan.image,
            "hostname": f"node{index}",
            "command": plan.command("serve", index, "node0"),
            "restart": "on-failure",
            "stop_grace_period": f"{plan.drain + LEAVE_SECONDS}s",
            "shm_size": "2gb",
            "ulimits": {"memlock": -1, "nofile": 65536},
            "environment": ["MOESAIC_API_KEY", "MOESAIC_ADMIN_KEY"],
        }
        if plan.model is not None:
            service["volumes"] = [f"{plan.model}:{plan.model}:ro"]
        if plan.memory:
            service["mem_limit"] = plan.memory
        if plan.gpus:
            numbers = [str(index * plan.gpus + gpu) for gpu in range(plan.gpus)]
            device = {"driver": "nvidia", "device_ids": numbers, "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        if index == 0:
            service["ports"] = [f"127.0.0.1:{plan.port}:{plan.port}"]
            check = ["CMD", "python3", "-c", CHECK.format(port=plan.port)]
            service["healthcheck"] = {
                "test": check,
                "interval": "5s",
                "timeout": "5s",
                "retries": 1,
                "start_period": f"{plan.startup}s",
            }
        services[f"node{index}"] = service
    text = yaml.safe_dump({"name": plan.name, "services": services}, sort_keys=False, width=120)
    return f"# A node that ends by a fault comes back by itself, and joins the others, which serve on.\n{text}"


def systemd(plan: LaunchPlan) -> str:
    """One template unit for all machines, and the line that starts it on each."""
    if not plan.addresses:
        raise ValueError("systemd needs --hosts: the names of the nodes, the head's first, with commas between them")
    words = plan.command("serve", "%i", plan.addresses[0])
    line = " ".join(_word(word) for word in words)
    starts = "\n".join(
        f"#   on {address}: systemctl enable --now {plan.name}@{index}" for index, address in enumerate(plan.addresses)
    )
    return f"""# /etc/systemd/system/{plan.name}@.service on every node; the number of the node is the instance:
{starts}
[Unit]
Description=Moesaic, node %i of {plan.nodes}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={line}
EnvironmentFile=-/etc/{plan.name}.env
# A part that was killed comes back and joins the others; bad input (2) does not get better by trying.
Restart=on-failure
RestartPreventExitStatus=2
RestartSec=2
# The server passes the signal on to its processes itself, in order.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={plan.drain + LEAVE_SECONDS}
LimitNOFILE=65536
LimitMEMLOCK=infinity

[Install]
WantedBy=multi-user.target
"""


def _word(word: str) -> str:
    """As systemd reads it: % is written twice, $ too; the instance (%i) stays."""
    if word == "%i":
        return word
    word = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"' if "'" in word else shlex.quote(word)
