"""The balancer's routes, metrics, notes and log lines, on a fake of the ranks' transport."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_parts import FakeRanks, Server, server, until

from configs.eplb import EplbConfig
from configs.server import ServerConfig
from front.balancing import BalancerSilent
from front.messages import BalanceCommand, BalanceReply, BalanceReport, BalanceStatus, FrontToRank
from server import logs
from server.middleware import digest

BOSS = {"authorization": "Bearer boss"}
STATUS = BalanceStatus(
    rank=0,
    epoch=1,
    steps=40,
    window_balance=[0.9, 0.8],
    step_balance=[0.7, 0.6],
    lower_bound=[1.0, 0.95],
    age_steps=12,
    reweights=8,
    moves=3,
    bytes_moved=4096,
    moving=2,
)


class BalancedRanks(FakeRanks):
    """Ranks that also answer for a balancer. `mute`: those that do not; `follows`: those that say they do not lead.
    `refusal`: the error of every answer."""

    def __init__(self) -> None:
        super().__init__(2)
        self.asked: list[tuple[int, BalanceCommand]] = []
        self.mute: set[int] = set()
        self.follows: set[int] = set()
        self.refusal = ""
        self.status = STATUS

    def send(self, rank: int, message: FrontToRank) -> None:
        if not isinstance(message, BalanceCommand):
            super().send(rank, message)
            return
        self.asked.append((rank, message))
        if rank not in self.mute:
            body = {"kind": message.kind, "path": message.path, "rank": rank}
            encoded = msgspec.json.encode(self.status if message.kind == "status" else body)
            again = rank in self.follows
            error = "does not lead" if again else self.refusal
            self._queue.append(BalanceReply(command_id=message.command_id, body=encoded, error=error, again=again))
            self.knock()

    def report(self, status: BalanceStatus) -> None:
        self._queue.append(BalanceReport(status))
        self.knock()


def balanced(config: ServerConfig | None = None, **changes: Any) -> Any:
    config = config or ServerConfig(admin_key_digests=(digest("boss"),))
    values = {"num_experts": 4, "slots_per_rank": 4, "eplb": EplbConfig(log_balancedness=True), **changes}
    return server(config, ranks=BalancedRanks(), **values)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_asks_the_lowest_rank_and_passes_its_answer_on(tmp_path: Path) -> None:
    async def main() -> None:
        config = ServerConfig(admin_key_digests=(digest("boss"),), eplb_record_dir=str(tmp_path))
        async with balanced(config) as s:
            for kind in ("placement", "load"):
                answer = await s.http.get(f"/eplb/{kind}")
                assert answer.json() == {"kind": kind, "path": None, "rank": 0}
                assert answer.headers["content-type"] == "application/json"
            for kind in ("plan", "rebalance"):
                answer = await s.http.post(f"/eplb/{kind}", headers=BOSS)
                assert answer.json() == {"kind": kind, "path": None, "rank": 0}
            answer = await s.post("/eplb/record", {"path": "loads-1.jsonl"}, headers=BOSS)
            assert answer.json()["path"] == str(tmp_path / "loads-1.jsonl")
            assert (await s.post("/eplb/record", {"path": None}, headers=BOSS)).json()["path"] is None
            status = (await s.http.get("/eplb/status")).json()
            assert status == {"enabled": True, **msgspec.structs.asdict(STATUS)} and status["recording"] == ""

    run(main())


def test_only_an_administrator_may_command() -> None:
    async def main() -> None:
        async with balanced() as s:
            for path in ("plan", "rebalance", "record"):
                assert (await s.http.post(f"/eplb/{path}")).status_code == 401
                assert (await s.http.post(f"/eplb/{path}", headers={"x-api-key": "other"})).status_code == 403
                assert (await s.http.get(f"/eplb/{path}", headers=BOSS)).status_code == 405
            assert s.ranks.asked == []
        async with balanced(ServerConfig()) as s:
            answer = await s.http.post("/eplb/rebalance", headers=BOSS)
            assert answer.status_code == 403 and "--admin-api-key" in answer.json()["error"]["message"]

    run(main())


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ("{", 400, "truncated"),
        ("{}", 400, "path"),
        ('{"path": 3}', 400, "path"),
        ('{"path": "/etc/passwd"}', 400, "--eplb-record-dir"),
        ('{"path": "../x.jsonl"}', 400, "--eplb-record-dir"),
        ('{"path": "a/x.jsonl"}', 400, "--eplb-record-dir"),
        ('{"path": ".x.jsonl"}', 400, "--eplb-record-dir"),
        ('{"path": "x.txt"}', 400, ".jsonl"),
        ('{"path": "' + "x" * 200 + '.jsonl"}', 400, "126"),
        ('{"path": "old.jsonl"}', 400, "exists"),
        ('{"path": "link.jsonl"}', 400, "exists"),
    ],
)
def test_a_recording_is_a_new_file_in_its_directory(tmp_path: Path, body: str, status: int, says: str) -> None:
    (tmp_path / "old.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("/nowhere")

    async def main() -> None:
        config = ServerConfig(admin_key_digests=(digest("boss"),), eplb_record_dir=str(tmp_path))
        headers = {**BOSS, "content-type": "application/json"}
        async with balanced(config) as s:
            answer = await s.http.post("/eplb/record", content=body, headers=headers)
            assert answer.status_code == status and says in answer.json()["error"]["message"]
            assert s.ranks.asked == []

    run(main())


def test_without_a_directory_nothing_is_recorded() -> None:
    async def main() -> None:
        async with balanced() as s:
            answer = await s.post("/eplb/record", {"path": "x.jsonl"}, headers=BOSS)
            assert answer.status_code == 403 and "--eplb-record-dir" in answer.json()["error"]["message"]

    run(main())


def test_off_says_why() -> None:
    async def main() -> None:
        reasons = {"eplb": "off unless asked for (--enable-eplb)"}
        async with balanced(eplb=None, reasons=reasons) as s:
            assert (await s.http.get("/eplb/status")).json() == {"enabled": False, "reason": reasons["eplb"]}
            for answer in (await s.http.get("/eplb/load"), await s.http.post("/eplb/plan", headers=BOSS)):
                assert answer.status_code == 404 and "--enable-eplb" in answer.json()["error"]["message"]
            assert "moesaic:eplb" not in (await s.http.get("/metrics")).text
            assert s.ranks.asked == []

    run(main())


def test_a_refusal_is_told() -> None:
    async def main() -> None:
        async with balanced() as s:
            s.ranks.refusal = "a rebalance is under way"
            answer = await s.http.post("/eplb/rebalance", headers=BOSS)
            error = answer.json()["error"]
            assert answer.status_code == 409 and error["type"] == "ConflictError"
            assert error["message"] == "rebalance: a rebalance is under way"

    run(main())


def test_the_next_rank_answers_when_the_leader_is_lost() -> None:
    async def main() -> None:
        async with balanced() as s:
            s.ranks.mute = {0}
            asking = asyncio.create_task(s.http.get("/eplb/load"))
            await until(lambda: s.ranks.asked, "rank 0 is asked")
            s.ranks.fail(0, "rank 0: gone")
            assert (await asking).json()["rank"] == 1
            ids = {command.command_id for _, command in s.ranks.asked}
            assert [rank for rank, _ in s.ranks.asked] == [0, 1] and len(ids) == 1

    run(main())


def test_a_rank_that_does_not_lead_yet_is_asked_again() -> None:
    async def main() -> None:
        async with balanced() as s:
            s.ranks.follows = {0}
            asking = asyncio.create_task(s.http.get("/eplb/load"))
            await until(lambda: len(s.ranks.asked) > 1, "rank 0 is asked again")
            s.ranks.follows.clear()
            assert (await asking).json()["rank"] == 0

    run(main())


def test_silence_is_bounded_and_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with balanced() as s:
            s.ranks.mute = {0, 1}
            with pytest.raises(BalancerSilent, match=r"rank 0 has not answered within 0\.05 s"):
                await s.service.engine.balancing.ask("load", seconds=0.05)
            monkeypatch.setattr(s.service.engine.balancing, "ask", _soon(s))
            answer = await s.http.get("/eplb/placement")
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert (await s.http.get("/metrics")).status_code == 200

    run(main())


def _soon(s: Server) -> Any:
    """The same question, with less patience."""
    ask = s.service.engine.balancing.ask

    async def hasty(kind: Any, path: str | None = None, seconds: float = 0.0) -> bytes:
        return await ask(kind, path, 0.05)

    return hasty


def test_not_ready_is_a_503() -> None:
    async def main() -> None:
        async with server(ranks=FakeRanks(ready=False), ready=False, eplb=EplbConfig(), num_experts=4) as s:
            assert (await s.http.get("/eplb/load")).status_code == 503
            assert (await s.http.get("/metrics")).status_code == 200

    run(main())


def test_metrics_are_fresh() -> None:
    async def main() -> None:
        async with balanced() as s:
            values = await _metrics(s.http)
            assert values["moesaic:eplb_window_balancedness", "1"] == 0.8
            assert values["moesaic:eplb_step_balancedness", "0"] == 0.7
            assert values["moesaic:eplb_balancedness_bound", "1"] == 0.95
            assert values["moesaic:eplb_moved_bytes_total", ""] == 4096
            assert values["moesaic:eplb_failing", ""] == 0
            s.ranks.status = msgspec.structs.replace(STATUS, moves=4, failures=1, last_error="boom")
            values = await _metrics(s.http)
            assert values["moesaic:eplb_moves_total", ""] == 4 and values["moesaic:eplb_failing", ""] == 1
            assert values["moesaic:eplb_failures_total", ""] == 1
            s.ranks.mute = {0}  # what was said last stays
            assert (await _metrics(s.http))["moesaic:eplb_moves_total", ""] == 4

    run(main())


async def _metrics(http: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    text = (await http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return {(sample.name, sample.labels.get("layer", "")): sample.value for item in families for sample in item.samples}


def test_reports_are_logged_and_a_failure_shows() -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    logs.configure("text", True, stream)

    async def main() -> None:
        async with balanced() as s:
            s.ranks.report(STATUS)
            await until(lambda: "event=eplb" in stream.getvalue(), "a log line")
            line = stream.getvalue().splitlines()[-1]
            assert "INFO" in line and "window_balance=0.8500 step_balance=0.6500 lower_bound=0.9750" in line
            assert (await s.http.get("/health")).json() == {"status": "alive"}
            s.ranks.report(msgspec.structs.replace(STATUS, failures=1, last_error="no room\nfor weights"))
            await until(lambda: "no room" in stream.getvalue(), "a log line of the failure")
            line = stream.getvalue().splitlines()[-1]
            assert "WARNING" in line and r"error='no room\nfor weights'" in line
            for path in ("/health", "/ready"):
                answer = await s.http.get(path)
                assert answer.status_code == 200
                note = {"eplb": "failing", "eplb_error": "no room\nfor weights", "eplb_failures": 1}
                assert note.items() <= answer.json().items()
            s.ranks.report(STATUS)
            await until(lambda: not s.service.engine.front.balance.failures, "well again")
            assert (await s.http.get("/health")).json() == {"status": "alive"}

    try:
        run(main())
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.getLogger("uvicorn").setLevel(logging.NOTSET)
