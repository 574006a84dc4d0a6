"""Workers of the simulator of prefix routing: an engine in virtual time and its prefix cache.

An engine computes one prompt at a time, the one with the highest response ratio (waiting time over
length) first, one chunk per step, and each step also generates a token for each stream. Between two
events all speeds are constant, so a step costs nothing to simulate. The cache is looked up when a
prompt begins. Blocks of a prompt can be found once all of it is computed; those of an answer, which
a trace does not name, never. Blocks for the whole answer are taken at the start, so nothing is
preempted.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from prefix_trace import BLOCK_TOKENS, TraceRequest, leading

from pdserve.engine.kv import blocks_for


class VirtualClock:
    """Virtual time: callbacks in order of their time, then of creation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), call))

    def run(self) -> None:
        """Run until nothing is due."""
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of an engine: about a 70B model on a few GPUs."""

    base_s: float = 0.020  # per step
    row_s: float = 0.0003  # for each stream in it
    prefill_tokens_s: float = 4_000.0  # in addition
    chunk: int = 512
    blocks: int = 800  # of KV


class BlockCache:
    """KV blocks: those used by requests, and unused named ones, the oldest of which is evicted
    first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._users: Counter[int] = Counter()  # of named blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # named, the next to be evicted first
        self._unnamed = 0
        self.added: list[int] = []  # changes; the reporter clears them
        self.removed: list[int] = []

    def __contains__(self, block: int) -> bool:
        return block in self._users or block in self._idle

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_free(self) -> int:
        return self._capacity - len(self._idle) - len(self._users) - self._unnamed

    def take(self, named: Sequence[int], unnamed: int) -> bool:
        """Take cached blocks and `unnamed` others; False if there is no room."""
        idle = sum(block in self._idle for block in named)
        if self.num_free + self.num_idle - idle < unnamed:
            return False
        self._use(named)
        self._unnamed += unnamed
        while self.num_free < 0:
            block, _ = self._idle.popitem(last=False)
            self.removed.append(block)
        return True

    def name(self, blocks: Sequence[int]) -> None:
        """Give these names to as many unnamed blocks, or free blocks whose names already exist."""
        self._unnamed -= len(blocks)
        self.added += [block for block in blocks if block not in self]
        self._use(blocks)

    def free(self, named: Sequence[int], unnamed: int) -> None:
        """Release one use of the blocks; a prompt's last blocks are evicted first."""
        self._unnamed -= unnamed
        for block in reversed(named):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._idle[block] = None

    def _use(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._idle.pop(block, None)
            self._users[block] += 1


@dataclass(eq=False, slots=True)
class Job:
    """A request at one worker."""

    request: TraceRequest
    output_len: int  # 0: only the prompt is wanted here
    since: float  # arrival time
    computed: Callable[[], None]
    finished: Callable[[], None] = lambda: None
    begun: Callable[[], None] = lambda: None
    has_kv: bool = False  # it arrived by a hand-off, so only room is needed
    found: int = 0  # leading blocks that were cached when it began
    unnamed: int = 0  # blocks in addition to those of its prompt
    left: float = 0.0  # prompt tokens to compute

    @property
    def size(self) -> int:
        return 0 if self.has_kv else self.request.num_tokens


@dataclass(slots=True)
class Work:
    """Work done by a worker so far."""

    prompt_tokens: int = 0  # computed
    seconds: float = 0.0  # of its engine, without the base of steps
    windows: list[float] = field(default_factory=list)  # seconds, by the window in which they fell


class SimulatedWorker:
    """One engine. `changed` is called after any change of its load or its cache."""

    def __init__(self, number: int, clock: VirtualClock, speed: Speed, window_s: float) -> None:
        self.number = number
        self.cache = BlockCache(speed.blocks)
        self.work = Work()
        # requests that wait for KV from elsewhere; counted by decode's admission
        self.num_claims = 0
        self.changed: Callable[[], None] = lambda: None
        self._clock = clock
        self.speed = speed
        self._window_s = window_s
        self._coming: Counter[int] = Counter()  # blocks of prompts that are on their way here
        self._queue: list[Job] = []
        self._current: Job | None = None
        self._rows: list[tuple[float, int, Job]] = []  # by the step that is their last
        self._order = count()
        self._steps = 0.0
        self._at = 0.0  # simulated up to this time
        self._version = 0

    # --- the state as others see it

    @property
    def num_running(self) -> int:
        return len(self._rows) + (self._current is not None)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting + self.num_claims

    def num_expected(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are in the cache, or will be once the prompts that have arrived are
        computed."""
        known = (block in self.cache or self._coming[block] for block in blocks)
        return next((n for n, there in enumerate(known) if not there), len(blocks))

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens to compute, counting queued prompts without a cache lookup."""
        self._advance()
        left = 0.0 if self._current is None else self._current.left
        return sum(job.size for job in self._queue) + round(left)

    @property
    def true_backlog(self) -> int:
        """Prompt tokens to compute, without those that will be found in the cache by then."""
        self._advance()
        missing = 0.0 if self._current is None else self._current.left
        for job in self._queue:
            blocks = job.request.full_blocks
            known = sum(b in self.cache or self._coming[b] > 1 for b in blocks)
            missing += max(0, job.size - known * BLOCK_TOKENS)
        return round(missing)

    # --- requests

    def submit(self, job: Job) -> None:
        """Compute its prompt and generate its answer."""
        self._advance()
        self._queue.append(job)
        if not job.has_kv:
            self.expect(job.request)
        self._next()

    def expect(self, request: TraceRequest) -> None:
        """Announce KV that will arrive here."""
        self._coming.update(request.full_blocks)

    def came(self, request: TraceRequest) -> None:
        """Mark announced KV as arrived."""
        for block in request.full_blocks:
            self._coming[block] -= 1
            if not self._coming[block]:
                del self._coming[block]

    def release(self, job: Job) -> None:
        """Release a prompt that was computed for a hand-off."""
        self._advance()
        self.cache.free(job.request.full_blocks, job.unnamed)
        self._next()

    def _next(self) -> None:
        """Start what can start, and schedule the next event."""
        while self._begin_one():
            pass
        self._version += 1
        if self._current is not None or self._rows:
            seconds = self._until_next()
            version = self._version
            self._clock.after(seconds, lambda: self._wake(version))
        self.changed()

    def _begin_one(self) -> bool:
        now = self._clock.now
        ready = [job for job in self._queue if job.has_kv or self._current is None]
        if not ready:
            return False
        job = max(ready, key=lambda job: (now - job.since) / max(1, job.size))
        blocks = job.request.full_blocks
        found = leading(blocks, self.cache)
        own = blocks_for(job.request.num_tokens + job.output_len, BLOCK_TOKENS) - found
        if not self.cache.take(blocks[:found], own):
            return False
        self._queue.remove(job)
        job.found, job.unnamed = found, own - (len(blocks) - found)
        job.begun()
        if job.has_kv:
            self._prompt_done(job)
        else:
            job.left = max(1, job.request.num_tokens - found * BLOCK_TOKENS)
            self.work.prompt_tokens += round(job.left)
            self._current = job
        return True

    def _prompt_done(self, job: Job) -> None:
        self.cache.name(job.request.full_blocks[job.found :])
        if not job.has_kv:
            self.came(job.request)
        if job.output_len > 1:
            entry = self._steps + job.output_len - 1, next(self._order), job
            heapq.heappush(self._rows, entry)
        job.computed()
        if job.output_len == 1:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        self.cache.free(job.request.full_blocks, job.unnamed)
        job.finished()

    # --- time

    def _step_s(self) -> float:
        speed = self.speed
        chunk = 0 if self._current is None else speed.chunk / speed.prefill_tokens_s
        return speed.base_s + speed.row_s * len(self._rows) + chunk

    def _until_next(self) -> float:
        steps = []
        if self._current is not None:
            steps.append(self._current.left / self.speed.chunk)
        if self._rows:
            steps.append(self._rows[0][0] - self._steps)
        return max(0.0, min(steps)) * self._step_s()

    def _advance(self) -> None:
        """Do the work of the time since the last event."""
        seconds, self._at = self._clock.now - self._at, self._clock.now
        if seconds <= 0 or (self._current is None and not self._rows):
            return
        step_s = self._step_s()
        steps = seconds / step_s
        self._steps += steps
        if self._current is not None:
            self._current.left = max(0.0, self._current.left - steps * self.speed.chunk)
        self._count(steps * (step_s - self.speed.base_s))

    def _count(self, seconds: float) -> None:
        """Count time in the current window, although a few seconds may belong to the previous."""
        self.work.seconds += seconds
        window, windows = int(self._clock.now / self._window_s), self.work.windows
        windows += [0.0] * (window + 1 - len(windows))
        windows[window] += seconds

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        current = self._current
        if current is not None and current.left < 1e-6:
            self._current = None
            self._prompt_done(current)
        while self._rows and self._rows[0][0] - self._steps < 1e-6:
            self._finish(heapq.heappop(self._rows)[2])
        self._next()
