"""Copies received frames from the window in device memory into decode's block pool, on one thread.

Since this thread is not the engine's, copies begin, end and return their slots while the engine
computes a step, and the speed at which a prompt's KV arrives does not depend on the length of a
step. The thread polls prefill's events and the running copies, and waits for neither.
open_blocks.py decides which blocks may be written and when.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pdserve.engine.handoff.connection import DataLink
from pdserve.engine.handoff.incoming import IncomingHandoff
from pdserve.engine.handoff.open_blocks import BlocksReleased, FrameCopy, OpenBlocks
from pdserve.engine.handoff.protocol import FrameError, FrameHeader, Piece
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.transport import DeviceSource

log = logging.getLogger(__name__)

MIN_PAUSE_S, MAX_PAUSE_S = 0.0001, 0.002  # pauses between polls while nothing moves: first, longest


class ReceivedFrame(NamedTuple):
    """A frame that arrived at decode; `source` is the device slot with its payload, None if the
    payload was on the host."""

    attempt: IncomingHandoff
    link: DataLink
    header: FrameHeader
    source: DeviceSource | None = None


@dataclass(frozen=True, slots=True)
class _RunningCopy:
    """A frame's copy on the device that is running, or whose result has not been read yet."""

    frame: ReceivedFrame
    blocks: OpenBlocks
    frame_copy: FrameCopy


class FrameVerdicts(Protocol):
    """The callbacks by which the Receiver learns what happened to each frame, on any thread. A
    callback that raises FrameError ends the connection."""

    def accepted(self, frame: ReceivedFrame, written: Piece | None, wake: bool = True) -> None:
        """Handle a frame that is verified and in the pool. `written` is what it added; None if its
        blocks were present before. Without `wake`, the engine thread may handle it later."""

    def damaged(self, frame: ReceivedFrame) -> None:
        """Handle a frame whose payload does not match its tag: request it again."""

    def refused(self, frame: ReceivedFrame, error: FrameError) -> None:
        """Handle a frame that does not fit the blocks of its attempt: end the attempt."""

    def late(self, frame: ReceivedFrame) -> None:
        """Handle a frame whose attempt has lost its blocks: drop the frame."""

    def failed(self, frame: ReceivedFrame, error: Exception) -> None:
        """Handle a frame that could not be written because of an unexpected error: end its
        attempt."""


class DeviceFrames:
    """Runs the thread that copies frames into the block pool; threads of connections pass frames to
    `arrived`.

    Returns the slot of every frame exactly once: when its copy is done, or at once if it needs no
    copy. Then it reports the result to `verdicts`.
    """

    def __init__(self, kv: KvCache, verdicts: FrameVerdicts) -> None:
        self._kv = kv
        self._verdicts = verdicts
        self._waiting: deque[ReceivedFrame] = deque()
        self._pending: list[_RunningCopy] = []
        self._woken = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-copy")

    @property
    def busy(self) -> bool:
        return bool(self._pending or self._waiting)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Begin no more copies and wait for the thread to end."""
        self._closed = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()

    def arrived(self, frame: ReceivedFrame) -> None:
        self._waiting.append(frame)
        self._woken.set()

    def _run(self) -> None:
        pause: float | None = None
        while not self._closed:
            self._woken.wait(pause)
            self._woken.clear()
            try:
                moved = self.poll()
            except Exception:
                log.exception("copying received frames on the device failed; the thread continues")
                moved = False
            if not self.busy:
                pause = None
            elif moved or pause is None:
                pause = MIN_PAUSE_S
            else:
                pause = min(2 * pause, MAX_PAUSE_S)

    def poll(self) -> bool:
        """Finish the copies that are done and begin those that can begin; return whether there was
        any."""
        moved = False
        for pending in list(self._pending):
            copy, failure = pending.frame_copy.copy, None
            assert copy is not None
            try:
                if not copy.done():
                    continue
            except Exception as err:
                failure = err  # a failed device never reports that it is done
            self._pending.remove(pending)  # first, so it is credited once even if something raises
            self._finish(pending, failure)
            moved = True
        for _ in range(len(self._waiting)):
            frame = self._waiting.popleft()
            if self._begin(frame):
                moved = True
            else:
                self._waiting.append(frame)
        return moved

    def _begin(self, frame: ReceivedFrame) -> bool:
        """Begin a frame's copy; return False if the frame must wait. True also if it needs no copy
        or is refused."""
        incoming, source, blocks = frame.attempt, frame.source, frame.attempt.blocks
        assert source is not None
        key = incoming.peer_key.copy_key(frame.header.sequence)
        try:
            if blocks is None:
                raise BlocksReleased
            frame_copy = blocks.begin_copy(self._kv, frame.header, source, key)
        except Exception as err:
            frame.link.credit(frame.header)
            self._not_written(frame, err)
            return True
        if frame_copy is None:
            return False
        if frame_copy.copy is None:
            frame.link.credit(frame.header)
            self._report(self._verdicts.accepted, frame, None)
        else:
            self._pending.append(_RunningCopy(frame, blocks, frame_copy))
        return True

    def _finish(self, pending: _RunningCopy, failure: Exception | None) -> None:
        frame, (piece, copy) = pending.frame, pending.frame_copy
        assert copy is not None
        frame.link.credit(frame.header)  # first, since an answer also returns the slot
        num_before = frame.attempt.num_written
        try:
            pending.blocks.end_copy(pending.frame_copy)
        except BlocksReleased as err:
            failure = failure or err
        if failure is not None:
            self._not_written(frame, failure)
        elif not copy.intact:
            self._report(self._verdicts.damaged, frame)
        else:  # wake the engine thread only for a whole chunk
            wake = frame.attempt.num_written > num_before
            self._report(self._verdicts.accepted, frame, piece, wake)

    def _not_written(self, frame: ReceivedFrame, error: Exception) -> None:
        if isinstance(error, BlocksReleased):
            self._report(self._verdicts.late, frame)
        elif isinstance(error, FrameError):
            self._report(self._verdicts.refused, frame, error)
        else:
            self._report(self._verdicts.failed, frame, error)

    def _report(self, verdict: Callable[..., None], frame: ReceivedFrame, *more: Any) -> None:
        try:
            verdict(frame, *more)
        except FrameError as err:  # the inbox of the engine thread is full
            frame.link.end(str(err))
