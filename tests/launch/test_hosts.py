"""A server on two hosts: it says what one machine says, and goes on when a rank or a whole host is lost."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from host_servers import PORT, HostServers, host_servers, prompt_of
from served import until

from moesaic import LLM, SamplingParams

STREAMS, TOKENS = 6, 60


def two_hosts(servers: HostServers) -> None:
    servers.start(0, "-dpl", "2")
    servers.start(1, "--headless", "-dpr", "2")
    servers.ready()


def during(servers: HostServers, event: object) -> list[list[int]]:
    """What streams say while something happens."""
    found: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: found.append(servers.streams(STREAMS, 3 * TOKENS)))
    thread.start()
    event()  # type: ignore[operator]
    thread.join()
    return found[0]


def alone() -> list[list[int]]:
    """What one rank on one machine says to the greedy ones of HostServers.streams."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(dtype="float32") as llm:
        outputs = llm.generate([prompt_of(number) for number in range(1, STREAMS, 2)], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_two_hosts_say_what_one_machine_says(tmp_path: Path) -> None:
    with host_servers(tmp_path, "-dp", "2", "--dtype", "float32") as servers:
        servers.start(0, "-dpl", "1")
        wrong = servers.start(1, "--headless", "-dpr", "1", "--block-size", "8")
        assert wrong.wait(60) == 2
        said = "moesaic: error: the head refuses: block_size is 8 there and 16 on the head\n"
        assert said in servers.log(1) and "event=host_refused" in servers.log(0)
        servers.start(1, "--headless", "-dpr", "1")
        servers.ready()
        assert servers.streams(STREAMS, TOKENS)[1::2] == alone()
        with pytest.raises(RuntimeError, match="of ranks cannot be changed while they are on several machines"):
            servers.resize(1)
        assert servers.stop() == [0, 0]
        assert "Traceback" not in servers.logs()


@pytest.mark.slow
def test_two_hosts_lose_a_rank_and_then_a_host(tmp_path: Path) -> None:
    with host_servers(tmp_path, "-dp", "4", "--dtype", "float32", "--num-redundant-experts", "16") as servers:
        two_hosts(servers)
        expected = servers.streams(STREAMS, 3 * TOKENS)
        assert servers.ask("/ready") == {"status": "ready", "mode": "full", "ranks": ["up"] * 4}

        def lose_a_rank() -> None:
            os.kill(servers.ranks(1)[3], signal.SIGKILL)
            until(lambda: servers.mode() == "degraded", 20, "the loss is noticed")

        assert during(servers, lose_a_rank) == expected
        until(lambda: servers.mode() == "full", 60, "it is back")
        assert servers.streams(STREAMS, 3 * TOKENS) == expected

        def cut() -> None:
            servers.hosts.cut(1)
            until(lambda: "event=host_lost" in servers.log(0), 20, "the host is missed")

        assert during(servers, cut) == expected
        assert servers.mode() == "degraded" and not servers.ranks(1)  # they have ended by themselves
        servers.hosts.mend(1)
        until(lambda: servers.mode() == "full", 90, "the host is back")
        assert servers.streams(STREAMS, 3 * TOKENS) == expected

        servers.hosts.kill(1)
        until(lambda: servers.log(0).count("event=host_lost") == 2, 20, "the host is missed at once")
        assert servers.streams(STREAMS, 3 * TOKENS) == expected
        servers.processes[1].wait(10)
        servers.start(1, "--headless", "-dpr", "2")
        until(lambda: servers.mode() == "full", 90, "the host is back")
        assert servers.streams(STREAMS, 3 * TOKENS) == expected
        assert servers.stop() == [0, 0]
        assert "Traceback" not in servers.logs()


@pytest.mark.slow
def test_a_host_leaves_and_another_head_takes_it_in(tmp_path: Path) -> None:
    arguments = ("-dp", "3", "--dtype", "float32", "--num-redundant-experts", "32", "-dpl", "1")
    with host_servers(tmp_path, *arguments, num_hosts=3) as servers:
        servers.start(0)
        servers.start(1, "--headless", "-dpr", "1")
        servers.start(2, "--headless", "-dpr", "2")
        servers.ready()
        expected = servers.streams(STREAMS, TOKENS)
        leaver = servers.processes[2]

        def leave() -> None:
            leaver.send_signal(signal.SIGTERM)
            assert leaver.wait(10) == 0
            until(lambda: servers.mode() == "degraded", 10, "it is missed")

        assert during(servers, leave) == servers.streams(STREAMS, 3 * TOKENS)
        assert "it was told to leave" in servers.log(0)
        servers.start(2, "--headless", "-dpr", "2")
        until(lambda: servers.mode() == "full", 60, "it is back")

        [broken] = servers.ranks(1).values()
        servers.hosts.run(1, ["ss", "-K", "dst", servers.hosts.addresses[0], "dport", "=", str(PORT + 1)])
        until(lambda: servers.ranks(1) and broken not in servers.ranks(1).values(), 20, "a new rank without a gap")
        assert "the connection with the front has broken" in servers.log(1)
        until(lambda: servers.mode() == "full", 60, "it is back")
        assert servers.streams(STREAMS, TOKENS) == expected

        servers.processes[0].kill()
        until(lambda: not servers.ranks(1) and not servers.ranks(2), 5, "their ranks have ended")
        servers.processes[0].wait(5)
        servers.log_path(0).unlink()
        servers.start(0)
        servers.ready()
        assert servers.streams(STREAMS, TOKENS) == expected
        assert servers.stop() == [0, 0, 0]


def test_a_head_that_does_not_come_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with host_servers(tmp_path, "-dp", "2", "--startup-timeout", "1") as servers:
        assert servers.start(1, "--headless", "-dpr", "1").wait(30) == 3
        assert f"the head at {servers.hosts.addresses[0]}:{PORT} was not found within 1 s" in servers.log(1)
        assert servers.start(0, "-dpl", "1").wait(30) == 1
        assert "not ready after 1 s (--startup-timeout)" in servers.log(0)
