"""What is said of ranks that wait, from signs of life as dbo/alive.py lays them out."""

from __future__ import annotations

import struct
from typing import Any

from dbo import alive
from engine.process.heartbeat import Sign, read_sign
from ep.recorder import Kind
from front.accusations import WaitBook
from front.messages import Wait, Waits
from launch.waits import WaitWatch

NOW = 1000.0


class Said:
    def __init__(self, threshold: float = 2.0, state: str = "") -> None:
        self.now = NOW
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.watch = WaitWatch(threshold, lambda rank: state, lambda: self.now, self._say)

    def _say(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    def look(self, *signs: Sign, front: float | None = None) -> None:
        self.watch.look(dict(enumerate(signs)), front, "T")


def word(step: int, kind: Kind, layer: int = 0) -> int:
    return step + 1 << alive.STEP_BITS | layer << alive.LAYER_BITS | kind


def sign(
    agreeing: tuple[int, float, int], computing: tuple[int, float, int], when: float = NOW, epoch: int = 0, num: int = 3
) -> Sign:
    words = struct.pack("=d2q" + 2 * "qdq", when, epoch, (1 << num) - 1, *agreeing, *computing)
    found = read_sign(words)
    assert found is not None
    return found


def computes(
    layer: int, kind: Kind, since: float = 0.0, ranks: int = 0, step: int = 7, when: float = NOW, num: int = 3
) -> Sign:
    return sign((word(step, Kind.AGREEMENT), 0.0, 0), (word(step, kind, layer), since, ranks), when, num=num)


def test_the_line_says_who_waits_for_whom_and_where() -> None:
    said = Said(state="T")
    waiting = computes(17, Kind.DISPATCH, NOW - 1.9)
    hung = computes(16, Kind.COMBINE, when=NOW - 1.2)
    said.look(waiting, computes(17, Kind.DISPATCH, NOW - 1.5), hung)
    assert not said.lines and said.watch.report() is None
    said.now += 0.2
    said.look(waiting, computes(17, Kind.DISPATCH, NOW - 1.5), hung)
    said.look(waiting, computes(17, Kind.DISPATCH, NOW - 1.5), hung)
    [(event, fields)] = said.lines
    assert event == "wait" and fields["ranks"] == "0,1"
    assert fields["text"] == repr(
        "rank 0 (as rank 1), step 7, layer 17 dispatch, waits 2.1 s for rank 2: "
        "last seen 1.4 s ago in step 7, layer 16 combine, its process is stopped"
    )
    report = said.watch.report()
    assert report is not None and [wait.rank for wait in report.waits] == [0, 1]
    said.look(computes(17, Kind.COMBINE), computes(17, Kind.COMBINE), computes(17, Kind.COMBINE))
    assert [event for event, _ in said.lines] == ["wait", "wait_over"]
    assert said.watch.report() == Waits([])


def test_a_transport_that_knows_is_believed() -> None:
    said = Said()
    said.look(
        computes(3, Kind.DISPATCH, NOW - 3, 0b010), computes(2, Kind.COMBINE, when=NOW - 3), computes(3, Kind.DISPATCH)
    )
    assert "for rank 1: last seen 3.0 s ago in step 7, layer 2 combine" in said.lines[0][1]["text"]


def test_what_was_sent_and_does_not_come_is_a_connection() -> None:
    said = Said()
    said.look(computes(3, Kind.DISPATCH, NOW - 3, num=2), computes(3, Kind.COMBINE, NOW - 2.9, num=2))
    texts = [fields["text"] for _, fields in said.lines]
    assert "rank 0, step 7, layer 3 dispatch, waits 3.0 s for rank 1" in texts[0]
    assert "layer 3 combine, and what it sends does not come" in texts[0]


def test_a_wait_for_one_that_waits_itself_is_left_out() -> None:
    """Rank 2 has left out the pass of step 7, and is at the agreement of the next step."""
    ahead = sign((word(8, Kind.AGREEMENT), NOW - 3, 0b011), (word(6, Kind.SAMPLING), 0.0, 0))
    said = Said()
    said.look(*[computes(1, Kind.DISPATCH, NOW - 3, 0b100) for _ in range(2)], ahead)
    [(_, fields)] = said.lines
    assert fields["ranks"] == "0,1"
    assert (
        "for rank 2: last seen 0.0 s ago in step 6, sampling (and waits itself in step 8, agreement)" in fields["text"]
    )


def test_meetings_and_lost_ranks() -> None:
    said = Said()
    away = sign((word(-1, Kind.MEETING), NOW - 2.5, 0b110), (word(-1, Kind.MEETING), 0.0, 0), epoch=4)
    said.look(away, computes(1, Kind.DISPATCH))
    assert (
        "rank 0, epoch 4, meeting, waits 2.5 s for rank 1, 2: rank 1 last seen 0.0 s ago in epoch 0"
        in said.lines[0][1]["text"]
    )
    assert "rank 2 no sign of it" in said.lines[0][1]["text"]


def test_a_rank_that_is_killed_is_told_before() -> None:
    said = Said(threshold=10.0)
    said.look(computes(1, Kind.DISPATCH, NOW - 2), computes(0, Kind.COMBINE, when=NOW - 2.1))
    said.watch.tell(0)
    assert not said.lines
    said.watch.tell(1)
    said.watch.tell(1)
    assert len(said.lines) == 1


def test_the_front_stands_still() -> None:
    said = Said()
    said.look(front=NOW - 1)
    assert not said.lines
    said.look(front=NOW - 2.1)
    assert said.lines[0][1]["text"] == repr("the front's loop stands still, its process is stopped for 2.1 s")
    off = Said(threshold=0.0)
    off.look(computes(3, Kind.DISPATCH, 1.0), front=1.0)
    assert not off.lines and off.watch.report() is None


def test_the_front_keeps_what_is_over() -> None:
    book = WaitBook(lambda: 5.0)
    one, longer = (Wait(0, 1, 7, 2, "dispatch", seconds, "", []) for seconds in (2.0, 3.0))
    book.take(Waits([one]))
    book.take(Waits([longer]))
    assert book.now == [longer] and not book.past and book.total == 1
    book.take(Waits([]))
    assert not book.now and [past.wait for past in book.past] == [longer] and book.past[0].ended == 5.0


def test_a_sign_is_read_as_it_is_shown() -> None:
    shown = bytearray(alive.BYTES)
    view = memoryview(shown)
    alive.show(view)
    alive.meets(3, (0, 2, 5), Kind.MEETING)
    alive.place(alive.AGREEING, 9, Kind.AGREEMENT)
    alive.place(alive.COMPUTING, 8, Kind.PREPARING)
    alive.at(Kind.COMBINE, 61)
    alive.waits(alive.COMPUTING, 12.5, 0b100)
    found = read_sign(bytes(shown), ahead=2.5)
    alive.goes_on(alive.COMPUTING)
    again = read_sign(bytes(shown))
    alive.hide(view)
    alive.at(Kind.DISPATCH, 1)  # no process looks
    assert found is not None and again is not None
    assert (found.epoch, found.live) == (3, (0, 2, 5)) and found.agreeing.text == "step 9, agreement"
    assert found.computing == (8, 61, Kind.COMBINE, 10.0, (5,)) and found.computing.text == "step 8, layer 61 combine"
    assert again.computing.since == 0.0 and read_sign(bytes(shown)) == again
    assert read_sign(b"") is None and read_sign(bytes(alive.BYTES)) is None
