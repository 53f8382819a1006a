"""What the facts of all nodes say together."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from launch.doctor.findings import Finding
from launch.doctor.wire import Facts, Path
from launch.identity import differences, other_weights

SKEW_SLOW, SKEW_BROKEN = 0.5, 30.0  # seconds: logs of several machines cannot be read together; certificates fail
STEP_SECONDS = 0.05  # a step's exchanges over a link may take so long: 20 tokens per second of a stream
UNEQUAL = 4.0  # times slower than the median of the others


def compare(facts: Sequence[Facts]) -> list[Finding]:
    """Versions, choices, checkpoint and CPU of each node against those of the head."""
    head = facts[0]
    found = []
    for other in facts[1:]:
        node = other.node
        unlike = [
            f"{name} is {other.versions.get(name, 'missing')} here and {ours} on the head"
            for name, ours in head.versions.items()
            if other.versions.get(name) != ours
        ]
        fix = f"pip install {' '.join(f'{name}=={version}' for name, version in head.versions.items())}"
        found.append(_said("versions", node, unlike, ", ".join(f"{k} {v}" for k, v in head.versions.items()), fix))
        if head.plan is None or other.plan is None:
            continue
        unlike = [text.replace(" there and ", " here and ") for text in differences(other.plan, head.plan)]
        found.append(_said("flags", node, unlike, "as on the head", "give every node the same options"))
        unlike = [text] if (text := other_weights(other.plan, head.plan)) else []
        fix = f"rsync -a --checksum HEAD:{head.plan.model_path}/ {other.plan.model_path}/"
        found.append(_said("model", node, unlike, "the same files as on the head", fix))
        found.append(_cpu(head, other))
    return found


def _said(check: str, node: int, unlike: list[str], well: str, fix: str) -> Finding:
    if unlike:
        return Finding(check, node, "broken", "; ".join(unlike), fix)
    return Finding(check, node, "ok", well)


def _cpu(head: Facts, other: Facts) -> Finding:
    assert head.plan is not None and other.plan is not None
    here, there = other.plan.native_kernels, head.plan.native_kernels
    if here != there:
        levels = ["none", "avx2", "avx512", "avx512_bf16", "amx"]
        least = min(here, there, key=lambda level: levels.index(level) if level in levels else 0)
        text = f"kernels use {here} here and {there} on the head: steps wait for the slower, and bits differ"
        return Finding("cpu", other.node, "slow", text, f"export MOESAIC_ISA={least} on every node")
    missing = sorted(set(head.features) ^ set(other.features))
    if missing:
        return Finding(
            "cpu", other.node, "ok", f"kernels use {here} on both; features differ: {', '.join(missing[:6])}"
        )
    return Finding("cpu", other.node, "ok", "the same features as on the head")


def clocks(paths: Sequence[Path]) -> list[Finding]:
    """Of the other nodes, as the head sees them."""
    found = []
    for path in paths:
        if path.source != 0 or not path.seconds:
            continue
        skew = abs(path.ahead)
        state = "broken" if skew > SKEW_BROKEN else "slow" if skew > SKEW_SLOW else "ok"
        text = (
            f"{path.ahead:+.3f} s against the head" if state != "ok" else f"within {max(skew, 0.001):.3f} s of the head"
        )
        fix = "timedatectl set-ntp true; chronyc makestep" if state != "ok" else ""
        found.append(Finding("clock", path.target, state, text, fix))  # type: ignore[arg-type]
    return found


def reach(paths: Sequence[Path], facts: Sequence[Facts]) -> list[Finding]:
    """Ports in both directions."""
    addresses = {one.node: one.address for one in facts}
    found = []
    for path in paths:
        way = f"to node {path.target} ({addresses[path.target]})"
        if path.refused:
            ports = ", ".join(f"{port} ({why})" for port, why in path.refused.items())
            rule = f"iptables -I INPUT -p tcp -s {addresses[path.source]} -j ACCEPT on node {path.target}"
            found.append(Finding("ports", path.source, "broken", f"{way}: port {ports}", rule))
        else:
            found.append(
                Finding("ports", path.source, "ok", f"{way}: all open, {1e6 * path.seconds:.0f} us there and back")
            )
    return found


def links(
    looked: Sequence[Path], sent: Sequence[Path], facts: Sequence[Facts], rows: tuple[int, int], expected: float
) -> list[Finding]:
    """Is a link fast enough? looked: small messages; sent: large ones; rows: bytes that a decode step of a rank sends
    in a layer, and the layers; expected: bytes per second, 0 where nothing is."""
    ranks = {one.node: 1 if one.plan is None else max(1, one.plan.data_parallel_size_local) for one in facts}
    small = {(path.source, path.target): path.seconds for path in looked}
    measured = [path for path in sent if path.rate]
    found = [
        Finding(
            "link", path.source, "broken", f"to node {path.target}: {why}", f"ping -M do -s 1400 node {path.target}"
        )
        for path in sent
        for why in path.refused.values()
    ]
    for path in measured:
        others = [other.rate for other in measured if other is not path]
        # Each row goes there and comes back; of the ranks of one node, all at once.
        size = 2 * rows[0] * rows[1] * ranks[path.source]
        step = size / path.rate + 2 * rows[1] * small.get((path.source, path.target), 0.0)
        text = (
            f"to node {path.target}: {8e-6 * path.rate:.0f} Mbit/s; a full step's exchanges take {1000 * step:.1f} ms"
        )
        fix = f"ethtool the interfaces of node {path.source} and node {path.target}; iperf3 between them"
        if expected and path.rate < 0.8 * expected:
            why = f", {8e-6 * expected:.0f} Mbit/s are expected"
        elif len(others) > 1 and path.rate * UNEQUAL < median(others) and step > STEP_SECONDS / 10:
            why = f", the other links have {8e-6 * median(others):.0f} Mbit/s"
        elif rows[1] and step > STEP_SECONDS:
            why = f", more than {1000 * STEP_SECONDS:.0f} ms"
        else:
            why = ""
        found.append(Finding("link", path.source, "slow" if why else "ok", text + why, fix if why else ""))
    return found
