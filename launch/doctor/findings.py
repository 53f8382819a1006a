"""What a check says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

State = Literal["ok", "slow", "broken"]
ORDER: tuple[State, ...] = ("broken", "slow", "ok")


class Finding(msgspec.Struct, frozen=True):
    """slow: it would serve, but not as it could; broken: it would not start or would fail. fix: what to type."""

    check: str
    node: int
    state: State
    text: str
    fix: str = ""

    def line(self, nodes: int) -> str:
        where = f"node {self.node}: " if nodes > 1 else ""
        fix = f"\n{'':15}-> {self.fix}" if self.fix else ""
        return f"{self.state:7}{self.check:11} {where}{self.text}{fix}"


def worst(findings: Iterable[Finding]) -> State:
    return min((finding.state for finding in findings), key=ORDER.index, default="ok")
