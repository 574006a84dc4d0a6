"""A pair of engines whose hand-offs arrive in any order, pieces twice; every byte is compared.

Prefill keeps a prompt's frames until the last chunk is computed, then sends them shuffled, a part
of them twice (each time as a separate frame, like a resend). At the commit decode's blocks are
compared with prefill's, which are held until then, and the writes of each block are counted.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builders.engine_kit import fake_engine

from pdserve.engine.handoff.outgoing import OutgoingHandoff
from pdserve.engine.handoff.protocol import Action, Piece
from systems.handoff_pair import Pair, local, request
from systems.no_timeouts import no_timeouts

BLOCK = 4


class ShuffledPair:
    """Use in a `with`. `duplicates`, `reordered`, `num_frames` count what happened."""

    def __init__(self, transport: str, folder: Path, seed: int, window: int = 0) -> None:
        options: dict[str, Any] = {"num_blocks": 256, "block_size": BLOCK, "window": window}
        options |= {"prefix_cache": False, "chunk_size": 16}
        self.options = options
        self.rng = random.Random(seed)
        self.pair = Pair(fake_engine(**options), fake_engine(**options), transport, folder)
        self.num_frames = self.duplicates = self.reordered = self.commits = 0
        self._kept: list[tuple[Any, ...]] = []
        self._writes: Counter[tuple[int, int, int]] = Counter()  # (group, layer, block of the pool)
        self._wrong: list[str] = []
        sender, kv = self.pair.sender, self.pair.decode.kv
        push_computed, write = sender._push_computed, kv.write
        commit = self.pair.receiver.actions[Action.COMMIT]

        def keep_then_push(outgoing: OutgoingHandoff) -> None:
            push_computed(outgoing)
            if outgoing.done and outgoing.next_blocks and self._kept:
                self._send(outgoing)

        def counted(group: int, layers: range, blocks: list[int], payload: memoryview) -> None:
            self._writes.update((group, layer, block) for layer in layers for block in blocks)
            write(group, layers, blocks, payload)

        def compared(incoming: Any) -> None:
            self._compare(incoming)
            commit(incoming)

        sender._push_computed = keep_then_push  # type: ignore[method-assign]
        sender.actions[Action.SEND_FRAMES] = keep_then_push
        kv.write = counted  # type: ignore[method-assign]
        self.pair.receiver.actions[Action.COMMIT] = compared
        self._push = OutgoingHandoff.push

    def __enter__(self) -> "ShuffledPair":
        kept = self._kept
        self._timeouts = no_timeouts()
        self._timeouts.__enter__()
        OutgoingHandoff.push = (  # type: ignore[method-assign]
            lambda outgoing, kv, pieces, table, resends: kept.extend(
                (kv, piece, table, resends) for piece in pieces
            )
        )
        return self

    def __exit__(self, *raised: Any) -> None:
        OutgoingHandoff.push = self._push  # type: ignore[method-assign]
        self.pair.close()
        self._timeouts.__exit__(*raised)

    def transfer(self, number: int) -> None:
        """Make one hand-off; raises AssertionError if a byte, a token or a count is wrong."""
        self._writes.clear()
        job = request(self.rng.randrange(2, 130), seed=number, max_tokens=3)
        attempt = self.pair.hand_off(job)
        answer = self.pair.answer(job)
        expected = local(job, **self.options)
        assert answer == expected, (answer, expected)
        self.pair.wait(lambda: attempt in self.pair.sent)
        assert self.pair.sent[attempt].reason == ""
        assert not self._wrong, self._wrong

    def _send(self, outgoing: OutgoingHandoff) -> None:
        pieces = [part for kept in self._kept for part in self._split(*kept)]
        self._kept.clear()
        sent = pieces + [piece for piece in pieces if self.rng.random() < 0.5]
        self.rng.shuffle(sent)
        self.num_frames += len(sent)
        self.duplicates += len(sent) - len(pieces)
        starts = [piece.blocks.start for _, piece, _, _ in sent]
        self.reordered += starts != sorted(starts)
        for kv, piece, table, resends in sent:
            self._push(outgoing, kv, [piece], table, resends)

    def _split(self, kv: Any, piece: Piece, table: Any, resends: int) -> Iterator[tuple[Any, ...]]:
        """Split into runs of 1 to 3 blocks; how much had been computed at the grant is random."""
        start = piece.blocks.start
        while start < piece.blocks.stop:
            stop = min(start + self.rng.randrange(1, 4), piece.blocks.stop)
            yield kv, piece._replace(blocks=range(start, stop)), table, resends
            start = stop

    def _compare(self, incoming: Any) -> None:
        """Compare on decode's engine thread; prefill holds its blocks until it receives
        Complete.
        """
        self.commits += 1
        decode_kv, prefill_kv = self.pair.decode.kv, self.pair.prefill.kv
        tables = self.pair.prefill.held_blocks(incoming.ticket.attempt.hex())
        for group, layer_group in enumerate(decode_kv.spec.groups):
            first = incoming.reservation.first_block[group]
            here = incoming.reservation.blocks[group][first:]
            there = tables[group][first : first + len(here)]
            layers = range(len(layer_group.layers))
            arrived = b"".join(decode_kv.read(group, layers, here))
            sent = b"".join(prefill_kv.read(group, layers, there))
            if arrived != sent or not any(arrived):
                self._wrong.append(f"bytes of group {group}")
            counts = {self._writes[group, layer, block] for layer in layers for block in here}
            if counts != {1}:
                self._wrong.append(f"blocks of group {group} were written {counts} times")
