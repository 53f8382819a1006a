"""What carries messages and exchanges in fake time: sockets, doorbells, meetings of ranks, and their groups.

Messages of one socket stay in order; those of two sockets do not. What a process had sent and what had not left it yet
when it is killed or stopped is lost or late, from some point on that chance chooses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.team import Groups
from ep.protocol import PeerLost, Ready
from tests.simulation.world import Violation, World

NOTICE = (0.0002, 0.004)  # seconds until a rank sees that another one has ended or left


@dataclass
class Delays:
    """Seconds, from and to. The chances are chosen once for a schedule."""

    message: tuple[float, float] = (0.0001, 0.002)
    late_message: tuple[float, float] = (0.01, 0.3)
    late_chance: float = 0.0
    exchange: tuple[float, float] = (0.00002, 0.0005)
    step: tuple[float, float] = (0.0005, 0.004)
    load: tuple[float, float] = (0.2, 1.2)
    read: tuple[float, float] = (0.00001, 0.0005)  # of one expert

    def of_message(self, world: World) -> float:
        late = self.late_chance and world.random.random() < self.late_chance
        return world.between(*(self.late_message if late else self.message))


class Channel:
    """One direction of one socket."""

    def __init__(self, world: World, delays: Delays, deliver: Callable[[Any], None]) -> None:
        self._world = world
        self._delays = delays
        self._deliver = deliver
        self._under_way: deque[list[Any]] = deque()  # [message or None]
        self._held: list[Any] = []  # in the memory of a process that is stopped
        self._stopped = False
        self._last = 0.0
        self.closed = False

    def send(self, message: Any) -> None:
        if self.closed:
            return
        world = self._world
        self._last = max(self._last, world.now + self._delays.of_message(world))
        entry = [message]
        self._under_way.append(entry)
        world.at(self._last, self._arrive, entry)

    def _arrive(self, entry: list[Any]) -> None:
        if entry and not self.closed:
            self._under_way.popleft()
            self._deliver(entry[0])

    def cut(self, keep: bool = False) -> None:
        """The sender is killed, or stopped (`keep`: it may go on): what is under way stays with it from some point on."""
        entries = list(self._under_way)
        for entry in entries[self._world.random.randint(0, len(entries)) :]:
            self._under_way.remove(entry)
            if keep:
                self._held.append(entry[0])
            entry.clear()

    def go_on(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self.send(message)


class Process(Protocol):
    """What groups need to know of a rank's process."""

    waits_for: Exchange | None

    def wake(self, when: float) -> None: ...


INFINITE = float("inf")


class Net:
    """What the ranks of one epoch exchange through one group. Posts become visible to each receiver in their own time."""

    def __init__(self, world: World, delays: Delays, members: Sequence[Process]) -> None:
        self.world = world
        self.members = list(members)
        self.size = len(members)
        self.posts: dict[int, _Posts] = {}
        self.gone: dict[int, float] = {}  # member -> when it ended or left
        self.cut: set[int] = set()  # members from whom nothing more arrives, though they live
        self._low, high = delays.exchange
        self._width = high - self._low

    def post(self, sender: int, number: int, parcels: Sequence[Any]) -> _Posts:
        if sender in self.gone:
            raise PeerLost((), f"rank {sender} has left its group")
        posts = self.posts.get(number)
        if posts is None:
            posts = self.posts[number] = _Posts(self.size)
        assert posts.parcels[sender] is None, "an exchange is used twice"
        posts.parcels[sender] = parcels
        chance, base, width = self.world.random.random, self.world.now + self._low, self._width
        arrivals = posts.arrivals
        for receiver in range(self.size):
            if receiver != sender:
                arrivals[receiver][sender] = INFINITE if sender in self.cut else base + width * chance()
        arrivals[sender][sender] = self.world.now
        posts.num_posted += 1
        if posts.num_posted == self.size:
            for exchange in posts.waiting:
                self.members[exchange.receiver].wake(max(arrivals[exchange.receiver]))
        return posts

    def leave(self, member: int) -> None:
        """What it has posted can still be taken."""
        if member not in self.gone:
            self.gone[member] = self.world.now
            self._wake_all()

    def die(self, member: int) -> None:
        """Of what was under way, each piece reaches its receiver or is lost."""
        now = self.world.now
        for posts in self.posts.values():
            for receiver, arrivals in enumerate(posts.arrivals):
                if now < arrivals[member] < INFINITE and receiver != member and self.world.random.random() < 0.5:
                    arrivals[member] = INFINITE
        self.gone.setdefault(member, now)
        self._wake_all()

    def _wake_all(self) -> None:
        for posts in self.posts.values():
            for exchange in posts.waiting:
                exchange.expect()


class _Posts:
    """Of one exchange. arrivals: by receiver and sender; INFINITE: not posted, or lost."""

    __slots__ = ("arrivals", "num_posted", "num_taken", "parcels", "waiting")

    def __init__(self, size: int) -> None:
        self.parcels: list[Sequence[Any] | None] = [None] * size
        self.arrivals = [[INFINITE] * size for _ in range(size)]
        self.num_posted = 0
        self.num_taken = 0
        self.waiting: list[Exchange] = []


class Exchange:
    """A Pending of this transport. Whoever yields with one under way is resumed when `over`."""

    __slots__ = ("_lost", "_posts", "group", "net", "number", "receiver", "since")

    def __init__(self, group: SimGroup, number: int, posts: _Posts) -> None:
        self.group = group
        self.net = group.net
        self.number = number
        self.receiver = group.rank
        self.since = group.net.world.now
        self._posts = posts
        self._lost: list[int] | None = None  # known once it is over
        group.net.members[group.rank].waits_for = self

    def over(self) -> bool:
        """`wait` may be called. If not, the process is woken when it is worth another look."""
        net, posts = self.net, self._posts
        if self._lost is not None:
            return True
        if posts.num_posted == net.size and max(posts.arrivals[self.receiver]) <= net.world.now:
            self._lost = []
            return True
        if net.gone:
            now = net.world.now
            arrivals = posts.arrivals[self.receiver]
            lost = [i for i, arrival in enumerate(arrivals) if arrival > now and net.gone.get(i, now) < now]
            if lost or self.receiver in net.gone:
                self._lost = lost or [self.receiver]
                return True
        if self not in posts.waiting:
            posts.waiting.append(self)
        self.expect()
        return False

    def give_up(self) -> None:
        """The bound of the wait has come, as every wait of ep has one."""
        now, arrivals = self.net.world.now, self._posts.arrivals[self.receiver]
        self._lost = self._lost or [rank for rank, arrival in enumerate(arrivals) if arrival > now]
        self.net.members[self.receiver].wake(now)

    def expect(self) -> None:
        """Wake whoever waits when something can have come of it."""
        net, posts = self.net, self._posts
        now = net.world.now
        latest = max(posts.arrivals[self.receiver])
        if latest == INFINITE:
            arrivals = posts.arrivals[self.receiver]
            ends = [when for rank, when in net.gone.items() if arrivals[rank] == INFINITE]
            if not ends:
                return
            latest = max(min(ends), now) + net.world.between(*NOTICE)
        net.members[self.receiver].wake(max(latest, now))

    def wait(self) -> list[Any]:
        net, posts = self.net, self._posts
        net.members[self.receiver].waits_for = None
        if self._lost is None:
            raise Violation(f"a rank waits for exchange {self.number} without having yielded")
        if self in posts.waiting:
            posts.waiting.remove(self)
        if self._lost:
            self.group.close()
            raise PeerLost(tuple(self._lost), "they have ended or left")
        posts.num_taken += 1
        if posts.num_taken == net.size:
            del net.posts[self.number]
        return [parcels[self.receiver] for parcels in posts.parcels if parcels is not None]


class SimGroup:
    """ep.transport.group.Group, and the lane of the experts."""

    def __init__(self, net: Net, rank: int) -> None:
        self.net = net
        self.rank = rank
        self.size = net.size
        self._count = 0

    def all_gather_ints(self, values: Sequence[int]) -> Exchange:
        return self.exchange([list(values)] * self.size)

    def exchange(self, parcels: Sequence[Any]) -> Exchange:
        """parcels: one for each rank; wait() gives one of each."""
        number, self._count = self._count, self._count + 1
        return Exchange(self, number, self.net.post(self.rank, number, parcels))

    def close(self) -> None:
        self.net.leave(self.rank)


class LocalLane:
    """One rank alone."""

    size = 1

    def exchange(self, parcels: Sequence[Any]) -> Ready[list[Any]]:
        return Ready(list(parcels))


@dataclass
class Meeting:
    """Of one epoch. Ranks sign in, see each other a little later, and then say so; who has heard it of all has groups."""

    world: World
    delays: Delays
    size: int
    openings: dict[int, Opening] = field(default_factory=dict)

    def sign_in(self, opening: Opening) -> None:
        if opening.index in self.openings:
            raise Violation(f"two ranks meet as number {opening.index} of an epoch")
        self.openings[opening.index] = opening
        for one in self.openings.values():
            if one.died:
                self._fail_others(one, f"rank {one.index} had signed in and ended")
        if len(self.openings) < self.size:
            return
        world = self.world
        openings = [self.openings[index] for index in range(self.size)]
        for one in openings:
            one.sees = world.now + world.between(0.0002, 0.015)
        all_see = max(one.sees for one in openings)
        nets = [Net(world, self.delays, [one.process for one in openings]) for _ in range(2)]
        for one in openings:
            one.nets = nets
            world.at(all_see + world.between(0.0001, 0.002), self._open, one)
        for one in openings:
            if one.gone:
                self._fail_others(one, f"rank {one.index} had gone again")

    def _open(self, one: Opening) -> None:
        for other in self.openings.values():
            if other.process.stopped and not other.has_seen:
                other.process.frozen.append((self._open, (one,)))
                return
        if one.result is None and not one.gone:
            one.resolve(Groups(*(SimGroup(net, one.index) for net in one.nets)))

    def go(self, one: Opening, died: bool) -> None:
        """It ends, or does not want this epoch any more."""
        if one.gone:
            return
        one.gone, one.died = True, died
        for net in one.nets:
            net.die(one.index) if died else net.leave(one.index)
        if one.has_seen:
            return  # the others have heard all that they need
        if died or one.nets:
            self._fail_others(one, f"rank {one.index} has gone")

    def _fail_others(self, one: Opening, reason: str) -> None:
        for other in self.openings.values():
            if other is not one and other.result is None and not other.gone:
                self.world.at(
                    self.world.now + self.world.between(*NOTICE), other.resolve, PeerLost((one.index,), reason)
                )


class Opening:
    """engine.team.Opening."""

    def __init__(self, meeting: Meeting, index: int, process: Any) -> None:
        self.meeting = meeting
        self.index = index
        self.process = process
        self.since = meeting.world.now
        self.sees = INFINITE
        self.nets: list[Net] = []
        self.gone = self.died = False
        self.result: Groups | PeerLost | None = None
        process.openings.append(self)
        world = meeting.world
        world.at(world.now + world.between(0.0001, 0.003), self._sign_in)

    @property
    def has_seen(self) -> bool:
        """It has seen all the others, and said so to them."""
        now = self.process.stopped_since if self.process.stopped else self.meeting.world.now
        return bool(self.nets) and now >= self.sees

    def _sign_in(self) -> None:
        if self.process.stopped:
            self.process.frozen.append((self._sign_in, ()))
        elif not self.gone:
            self.meeting.sign_in(self)

    def resolve(self, result: Groups | PeerLost) -> None:
        if self.result is None and not self.gone:
            self.result = result
            self.process.on_opened(self)

    def done(self) -> bool:
        return self.result is not None

    def take(self) -> Groups:
        assert self.result is not None
        if isinstance(self.result, PeerLost):
            raise self.result
        return self.result

    def drop(self) -> None:
        if isinstance(self.result, Groups):
            self.result.close()
        self.meeting.go(self, died=False)
