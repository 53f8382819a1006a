"""POST /start_profile and /stop_profile, on a fake of the ranks' transport; tests/engine/test_trace.py has the real ranks."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from server_parts import FakeRanks, server

from configs.server import ServerConfig
from ep.recorder import Kind, Recorder
from front.messages import FrontToRank, ProfileCommand, ProfilePart, RankLost
from server.middleware import digest

BOSS = {"authorization": "Bearer boss"}


class ProfiledRanks(FakeRanks):
    """`mute`: those that never send their part."""

    def __init__(self) -> None:
        super().__init__(2)
        self.commands: list[tuple[int, ProfileCommand]] = []
        self.mute: set[int] = set()

    def send(self, rank: int, message: FrontToRank) -> None:
        if not isinstance(message, ProfileCommand):
            super().send(rank, message)
            return
        self.commands.append((rank, message))
        if message.kind == "stop" and rank not in self.mute:
            recorder = Recorder(4)
            recorder.add(Kind.SCHEDULING, 10, 20, 1)
            events, dropped = recorder.finish()
            part = ProfilePart(
                profile_id=message.profile_id, rank=rank, started=True, events=events, num_dropped=dropped
            )
            self.say(part)


def profiled(tmp_path: Path | None, **changes: Any) -> Any:
    directory = None if tmp_path is None else str(tmp_path)
    config = ServerConfig(admin_key_digests=(digest("boss"),), profile_dir=directory, **changes)
    return server(config, ranks=ProfiledRanks())


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_start_and_stop(tmp_path: Path) -> None:
    async def main() -> None:
        async with profiled(tmp_path) as it:
            started = await it.post("/start_profile", {"name": "one.json", "events": 500}, headers=BOSS)
            assert started.status_code == 200, started.text
            file = tmp_path / "one.json"
            assert started.json() == {"status": "started", "file": str(file), "ranks": [0, 1]}
            again = await it.post("/start_profile", {}, headers=BOSS)
            assert again.status_code == 409 and "taken already" in again.json()["error"]["message"]
            assert str(file) in again.json()["error"]["message"]
            await it.complete()
            stopped = await it.http.post("/stop_profile", headers=BOSS)
            assert stopped.status_code == 200, stopped.text
            answer = stopped.json()
            assert answer.pop("seconds") >= 0
            assert answer == {
                "status": "stopped", "file": str(file), "ranks": [0, 1], "lost": [], "events": 2, "dropped": 0,
            }  # fmt: skip
            assert len(json.loads(file.read_bytes())["traceEvents"]) > 2
            assert [(rank, command.kind, command.capacity) for rank, command in it.ranks.commands] == [
                (0, "start", 500),
                (1, "start", 500),
                (0, "stop", 0),
                (1, "stop", 0),
            ]
            over = await it.http.post("/stop_profile", headers=BOSS)
            assert over.status_code == 409 and over.json()["error"]["code"] == "not_profiling"
            taken = await it.post("/start_profile", {"name": "one.json"}, headers=BOSS)
            assert taken.status_code == 400 and "exists already" in taken.json()["error"]["message"]

    run(main())


def test_without_a_body_the_name_is_ours(tmp_path: Path) -> None:
    async def main() -> None:
        async with profiled(tmp_path) as it:
            files = set()
            for _ in range(2):
                started = await it.http.post("/start_profile", headers=BOSS)
                assert started.status_code == 200, started.text
                assert (await it.http.post("/stop_profile", headers=BOSS)).status_code == 200
                files.add(started.json()["file"])
            assert {str(path) for path in tmp_path.iterdir()} == files and len(files) == 2
            for path in tmp_path.iterdir():
                assert json.loads(gzip.decompress(path.read_bytes()))["otherData"]["ranks"] == [0, 1]

    run(main())


def test_a_lost_rank_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with profiled(tmp_path) as it:
            it.ranks.mute.add(1)
            await it.post("/start_profile", {"name": "a.json"}, headers=BOSS)
            stopping = asyncio.create_task(it.http.post("/stop_profile", headers=BOSS))
            while len(it.ranks.commands) < 4:
                await asyncio.sleep(0.005)
            busy = await it.http.post("/stop_profile", headers=BOSS)
            assert busy.status_code == 409 and "being stopped" in busy.json()["error"]["message"]
            pid = it.service.engine.ready[1].process
            it.ranks.say(RankLost(1, "killed", time.monotonic(), pid))
            answer = (await stopping).json()
            assert (answer["ranks"], answer["lost"]) == ([0], [1])

    run(main())


def test_a_stop_that_is_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with profiled(tmp_path) as it:
            engine = it.service.engine
            it.ranks.mute.update((0, 1))
            engine.start_profile(tmp_path / "a.json")
            stopping = asyncio.create_task(engine.stop_profile())
            await asyncio.sleep(0)
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            assert stopping.cancelled()
            it.ranks.mute.clear()
            engine.start_profile(tmp_path / "b.json")
            assert (await engine.stop_profile()).ranks == [0, 1]

    run(main())


def test_refusals(tmp_path: Path) -> None:
    async def main() -> None:
        async with profiled(None) as it:
            for path in ("/start_profile", "/stop_profile"):
                assert (await it.http.post(path)).status_code == 401
                assert (await it.http.post(path, headers={"authorization": "Bearer other"})).status_code == 403
            nowhere = await it.http.post("/start_profile", headers=BOSS)
            assert nowhere.status_code == 403 and "--profile-dir" in nowhere.json()["error"]["message"]
        (tmp_path / "link.json").symlink_to(tmp_path / "elsewhere.json")
        bad: list[tuple[dict[str, Any], str]] = [
            ({"name": "../a.json"}, "name"),
            ({"name": "a.txt"}, "name"),
            ({"name": ""}, "name"),
            ({"name": "link.json"}, "name"),
            ({"name": 5}, "name"),
            ({"events": 0}, "events"),
            ({"events": 1 << 30}, "events"),
        ]
        async with profiled(tmp_path) as it:
            for body, field in bad:
                answer = await it.post("/start_profile", body, headers=BOSS)
                assert answer.status_code == 400 and field in answer.json()["error"]["message"], answer.text
            assert [path.name for path in tmp_path.iterdir()] == ["link.json"]
            assert it.ranks.commands == []

    run(main())
