"""Lanes whose work happens as late, and in as odd an order, as a device may take."""

import random


class World:
    """All lanes of one device: what happens next is drawn, and a wait has happen what it needs."""

    def __init__(self, seed):
        self._rng = random.Random(seed)
        self._pace = seed % 4  # 0: nothing happens before somebody waits for it
        self.lanes = []
        self.waits = 0

    def lane(self):
        self.lanes.append(LazyLane(self, speed=self._rng.choice((1, 1, 20))))
        return self.lanes[-1]

    def drift(self):
        """Some of what is queued happens while the host does something else."""
        for _ in range(self._rng.randrange(2 * self._pace + 1)):
            self._advance()

    def until(self, mark):
        while not mark.passed:
            assert self._advance(), "the host waits for what nothing queued can bring about"

    def finish(self):
        while self._advance():
            pass
        assert not any(lane.queue for lane in self.lanes), "lanes wait for each other"

    def _advance(self):
        ready = [lane for lane in self.lanes if lane.ready]
        if ready:
            (lane,) = self._rng.choices(ready, [lane.speed for lane in ready])
            lane.queue.pop(0)[1]()
        return bool(ready)


class LazyLane:
    def __init__(self, world, *, speed):
        self._world = world
        self.speed = speed
        self.queue = []  # (what it waits for, or None; what then happens)

    @property
    def ready(self):
        return bool(self.queue) and (self.queue[0][0] is None or self.queue[0][0].passed)

    def do(self, work):
        self.queue.append((None, work))
        self._world.drift()

    def copy(self, place, source):
        self.do(lambda: place.copy_(source))

    def mark(self):
        mark = LazyMark(self._world)
        self.do(mark.reach)
        return mark

    def follow(self, mark):
        self.queue.append((mark, lambda: None))


class LazyMark:
    def __init__(self, world):
        self._world = world
        self.passed = False

    def reach(self):
        self.passed = True

    def wait(self):
        self._world.waits += not self.passed
        self._world.until(self)
