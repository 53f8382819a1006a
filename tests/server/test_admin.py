"""Administration of the ranks over HTTP, on a fake of the rank side. tests/launch/test_resizing.py has real ones."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from server_parts import MODEL, STORY, FakeRanks, Server, rank_ready, server, small_tokenizer, until

from configs.server import ServerConfig
from front.messages import Membership
from server.middleware import digest

CONFIG = ServerConfig(admin_key_digests=(digest("boss"),), api_key_digests=(digest("one"),))
BOSS = {"x-api-key": "boss"}
ONE = {"x-api-key": "one"}


async def resize(s: Server, body: Any) -> httpx.Response:
    return await s.post("/admin/ranks", body, headers=BOSS)


async def refused(s: Server, count: Any, status: int) -> dict[str, Any]:
    answer = await resize(s, {"count": count})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_only_an_administrator_may() -> None:
    async def run() -> None:
        async with server(CONFIG) as s:
            assert (await s.http.get("/admin/ranks")).status_code == 401
            assert (await s.http.get("/admin/ranks", headers=ONE)).status_code == 403
            assert (await s.post("/admin/ranks", {"count": 2}, headers=ONE)).status_code == 403
        async with server() as s:
            answer = await s.post("/admin/ranks", {"count": 2})
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "no_admin_key"

    asyncio.run(run())


def test_shrinking_and_growing() -> None:
    async def run() -> None:
        ranks = FakeRanks(3)
        ranks.pause_at = 3
        async with server(CONFIG, ranks=ranks, data_parallel_size=3) as s:
            streams = [asyncio.create_task(complete(s)) for _ in range(3)]
            await until(lambda: ranks.steps == 3 and len(ranks.running) == 3, "some tokens on every rank")
            answer = await resize(s, {"count": 2})
            table = answer.json()
            assert answer.status_code == 202 and (table["count"], table["mode"], table["epoch"]) == (2, "full", 1)
            told = [message for message in ranks.sent if isinstance(message, Membership)]
            assert [(one.epoch, one.alive) for one in told] == [(1, [True, True, False])] * 3
            assert ranks.resizes == [2] and {rank for rank, _, _ in ranks.running.values()} == {0, 1, 2}
            ranks.drop(2)
            ranks.resume()
            for stream in streams:
                assert await stream == STORY
            table = (await resize(s, {"count": 4})).json()
            assert [row["state"] for row in table["ranks"]] == ["up", "up", "starting", "starting"]
            assert (table["mode"], table["fewest"], table["ranks"][3]["pid"]) == ("growing", 1, None)
            assert (await s.http.get("/ready")).json()["ranks"] == ["up", "up", "starting", "starting"]
            ranks.say(rank_ready(3, small_tokenizer().vocab_size))
            await until(lambda: s.service.engine.members.epoch == 2, "rank 3 has come")
            table = (await s.http.get("/admin/ranks", headers=BOSS)).json()
            assert [row["state"] for row in table["ranks"]] == ["up", "up", "starting", "up"]
            assert table["ranks"][3]["pid"] is not None and ranks.resizes == [2, 4]
            metrics = (await s.http.get("/metrics")).text
            assert f'moesaic:rank_up{{engine="3",model_name="{MODEL}"}} 1.0' in metrics
            assert f'moesaic:ranks{{model_name="{MODEL}"}} 4.0' in metrics
            assert f'moesaic:requests_replayed_total{{model_name="{MODEL}"}} 1.0' in metrics
            assert await complete(s) == STORY

    asyncio.run(run())


async def complete(s: Server) -> str:
    answer = await s.post("/v1/completions", {"prompt": "Once", "max_tokens": 400}, headers=ONE)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("body", [{}, {"count": "2"}, {"count": 2.5}, {"count": None}, {"count": True}, [2]])
def test_a_body_that_is_no_count(body: Any) -> None:
    async def run() -> None:
        async with server(CONFIG) as s:
            assert (await resize(s, body)).status_code == 400
            assert not s.ranks.resizes

    asyncio.run(run())


def test_limits_are_named() -> None:
    async def run() -> None:
        changes = {
            "num_experts": 8,
            "slots_per_rank": 3,
            "data_parallel_size": 4,
            "max_ranks": 6,
            "rank_bytes": 1 << 20,
        }
        async with server(CONFIG, **changes) as s:
            assert "at least 1, not 0" in (await refused(s, 0, 400))["message"]
            error = await refused(s, 2, 400)
            assert "at least 3: 2 rank(s) of 3 slots have room for 6 of 8 experts" in error["message"]
            assert error["param"] == "count"
            assert "at most 6, not 7" in (await refused(s, 7, 400))["message"]
            s.ranks.fail(0, "out of luck")
            await until(lambda: s.service.engine.members.mode == "degraded", "rank 0 is lost")
            error = await refused(s, 3, 409)
            assert error["code"] == "not_now" and "wait for rank 0" in error["message"]
            assert not s.ranks.resizes
        async with server(CONFIG, rank_bytes=1 << 50) as s:
            error = await refused(s, 3, 409)
            assert error["code"] == "no_memory" and "1 more rank(s) of 1073741824 MiB take" in error["message"]
            assert (await resize(s, {"count": 1})).status_code == 202
            s.service.engine._draining = True
            assert (await refused(s, 2, 503))["code"] == "draining"
        async with server(CONFIG, ready=False) as s:
            assert (await refused(s, 3, 503))["code"] == "loading"

    asyncio.run(run())
