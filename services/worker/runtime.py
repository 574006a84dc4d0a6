"""A worker's engine thread, KV transports and Sender of KV, and what it reports to routers.

The engine thread owns the engine and the KV hand-offs; other threads post work to it. The runtimes
of prefill and decode workers derive from WorkerRuntime and add their own parts.
"""

import json
import logging
import os
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.engine.api import Step
from pdserve.engine.checkpoints import CardData
from pdserve.engine.engine import Engine
from pdserve.engine.handoff.connection import usable
from pdserve.engine.handoff.endpoint import TransportFigures
from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol import WIRE_VERSION, slot_bytes
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.handoff.recorder import EventLog, open_ring
from pdserve.engine.handoff.sender import Sender
from pdserve.engine.kv import KvIdentity, KvSpec, Mixing, encode_spec
from pdserve.engine.scheduling import EngineStats
from pdserve.engine.thread import EngineThread
from pdserve.engine.transport import KvTransport, TransportOptions, make_transports
from pdserve.engine.transport.cuda_ipc import opener
from pdserve.protos import fleet_pb2 as pb
from pdserve.protos.common_pb2 import KvIdentity as WireIdentity
from pdserve.protos.common_pb2 import ModelCard
from pdserve.services.common.capabilities import embeds, generates
from pdserve.services.common.rpc import PROTOCOL_VERSION, blob_digest
from pdserve.services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

Snapshot = tuple[pb.Load, list[bytes], list[bytes]]  # load, prefix hashes added and removed
DATA_BIND = "127.0.0.1:0"  # listening address of a process that only sends


class BlockAudit:
    """Counts the snapshots of a worker in which the numbers of KV blocks do not add up. Used on one
    thread."""

    def __init__(self) -> None:
        self.errors = 0
        self._last = ""

    def look(self, discrepancy: str) -> int:
        """Record a snapshot's discrepancy (empty: none); log it unless it is the same as the last
        one. Returns the number of discrepancies so far."""
        if discrepancy:
            self.errors += 1
            if discrepancy != self._last:
                log.error("KV blocks do not add up: %s", discrepancy)
        self._last = discrepancy
        return self.errors


class WorkerRuntime(ABC):
    """A worker's engine and its KV hand-offs. Constructed on the loading thread.

    A subclass's constructor makes its endpoints (Sender, Receiver), then calls `_begin` and
    `_describe`.
    """

    role: pb.Role
    hello: pb.WorkerHello  # without incarnation and address
    blobs: list[bytes]  # the blobs that the model card names
    figures: dict[str, Any]  # for the report "ready"

    def __init__(self, settings: WorkerSettings, engine: Engine, incarnation: bytes) -> None:
        self.incarnation = incarnation
        self.engine = engine
        self.mixing = Mixing(settings.allow_mixed_weights, settings.allow_mixed_numerics)
        self.thread = EngineThread(engine, self._on_step)
        self._settings = settings
        # A transport that an option names must work, else the worker does not start.
        self._transport_is_chosen = settings.kv_transport != "auto"
        self._changed = True
        self._last_command = b""
        self._audit = BlockAudit()
        self._shm_folder = shm_folder(settings.shm_dir)
        role = pb.Role.Name(self.role).lower()
        self._ring = open_ring(settings.trace_dir, role, incarnation, settings.trace_mb)

    # called by a subclass's constructor

    def _make_transports(self, data_bind: str = DATA_BIND) -> list[KvTransport]:
        """Return the KV transports that the options allow, the preferred one first."""
        options = TransportOptions(
            data_bind,
            self._shm_folder,
            slot_bytes(self.engine.kv.spec),
            device=opener(self.engine.kv, encrypted=self._settings.encrypt_kv),
        )
        return make_transports(self._settings.kv_transport, options)

    def _usable_transports(self, data_bind: str = DATA_BIND) -> list[KvTransport]:
        """Return the KV transports by which this process can send, the preferred one first."""
        return usable(self._make_transports(data_bind), self._transport_is_chosen)

    def _make_sender(
        self, transports: Sequence[KvTransport], on_ended: Callable[[Sent], None]
    ) -> Sender:
        return Sender(
            self.engine,
            self.engine.kv,
            transports,
            incarnation=self.incarnation,
            identity=self.engine.kv_identity,
            on_ended=on_ended,
            wake=self.thread.wake,
            liveness=self._liveness,
            passes_over=self.thread.passes_over,
            encrypted=self._settings.encrypt_kv,
            event_log=EventLog(self._ring),
        )

    def _liveness(self) -> int:
        """Return the engine thread's counter, from which the peers of hand-offs see that this
        process is alive. It moves even if the engine has nothing to compute, because a ticker wakes
        the thread during hand-offs."""
        return self.thread.liveness

    def _begin(self, poll: Callable[[], bool]) -> None:
        """Start the endpoints of hand-offs. The engine thread calls `poll` in each turn; if it
        returns True, there is more to do and it is called again at once."""
        self.thread.add_poll(poll)
        for endpoint in self._endpoints:
            endpoint.start()

    def _describe(self, card: CardData, transports: Sequence[str], data_address: str = "") -> None:
        """Set what the process reports about itself: the registration with routers (`hello`), the
        model's `blobs`, and the `figures` of its ready report."""
        engine = self.engine
        message, self.blobs = model_card(card, engine.kv_identity, engine.kv.spec)
        self.hello = pb.WorkerHello(
            role=self.role,
            data_address=data_address,
            card=message,
            transports=transports,
            wire_version=WIRE_VERSION,
            encrypt_kv=self._settings.encrypt_kv,
            block_size=engine.limits.block_size,
            protocol=PROTOCOL_VERSION,
        )
        self.figures = {
            "model": card.name,
            "task": task_of(message),
            "kv_tokens": engine.limits.num_blocks * engine.limits.block_size,
            "chunk_size": engine.limits.chunk_size,
            "transports": list(transports),
        }

    # any thread

    def take_changed(self) -> bool:
        """Return whether the worker's load may have changed since the last call of this method."""
        changed, self._changed = self._changed, False
        return changed

    def close(self) -> None:
        """End the engine thread and all hand-offs."""
        self.thread.close()
        for endpoint in self._endpoints:
            endpoint.close()
        if self._ring is not None:
            self._ring.close()

    # the engine thread

    def snapshot(self) -> Snapshot:
        """Return the worker's present load, and the block hashes added to and removed from the
        prefix cache since the last snapshot. Call on the engine thread."""
        load = self._load(self.engine.stats())
        load.accounting_errors = self._audit.look(self.engine.discrepancy())
        load.last_command = self._last_command
        added, removed = self.engine.take_prefix_events()
        return load, added, removed

    def _note_command(self, attempt: bytes) -> None:
        """Record that load reports from now on include the work that this attempt's command has
        added."""
        self._last_command = attempt
        self._changed = True

    @property
    @abstractmethod
    def _endpoints(self) -> Sequence[Sender | Receiver]:
        """The worker's ends of KV hand-offs, in the order in which they are started and closed."""

    @abstractmethod
    def _load(self, stats: EngineStats) -> pb.Load:
        """Return the load report; `snapshot` adds its fields accounting_errors and last_command."""

    @abstractmethod
    def _on_step(self, step: Step) -> None:
        """Handle a step that the engine has planned or computed."""


def load_of(
    stats: EngineStats,
    figures: Mapping[str, TransportFigures],
    refusals: Mapping[str, int],
    stale: int,
) -> pb.Load:
    """Convert an engine's statistics to a load report. `figures` and `refusals` (refused
    connections) are by the transport's name; `stale` is the number of messages about ended
    attempts."""
    blocks = stats.blocks
    empty = TransportFigures()
    transports = []
    for name in sorted({*figures, *refusals}):
        figure = figures.get(name, empty)
        transports.append(
            pb.TransportCounters(
                transport=name,
                bytes=figure.num_bytes,
                frames=figure.frames,
                seconds=figure.seconds,
                refused=figure.refused + refusals.get(name, 0),
            )
        )
    return pb.Load(
        running=stats.running,
        waiting=stats.waiting,
        waiting_tokens=stats.waiting_tokens,
        blocks_total=blocks.total,
        blocks_free=blocks.free,
        blocks_used=blocks.used,
        blocks_cached=blocks.cached,
        blocks_reserved=blocks.reserved,
        blocks_held=stats.held_blocks,
        blocks_parked=stats.parked_blocks,
        oldest_s=stats.oldest_s,
        prefill_tokens_s=stats.prefill_tokens_s,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        preemptions=stats.preemptions,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        transports=transports,
        stale_messages=stale,
    )


def shm_folder(configured: str) -> str:
    """Return the folder of the unix sockets by which processes of one host set up shared memory:
    the configured folder, or else this user's own folder under the temporary folder.

    Returns "", which disables the transport shm, if that folder belongs to another user or is open
    to other users.
    """
    if configured:
        return configured
    folder = Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return ""
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return str(folder) if is_own_folder and not status.st_mode & 0o077 else ""


def task_of(card: ModelCard) -> str:
    """Return what a model does: "embed", "score", "chat", or "complete" for a base model."""
    if generates(card):
        return "chat" if card.template_digest else "complete"
    return "embed" if embeds(card) else "score"


def model_card(card: CardData, identity: KvIdentity, spec: KvSpec) -> tuple[ModelCard, list[bytes]]:
    """Return the ModelCard that describes a loaded model, and the blobs (tokenizer, chat template,
    generation config) that it names by their digests. `identity` and `spec` describe the engine's
    KV."""
    template = card.chat_template.encode()
    config = card.generation_config
    generation = json.dumps(config, sort_keys=True).encode() if config else b""
    message = ModelCard(
        name=card.name,
        architecture=card.architecture,
        context_len=card.context_len,
        vocab_size=card.vocab_size,
        eos_ids=card.eos_ids,
        bos_id=card.bos_id or 0,
        has_bos=card.bos_id is not None,
        adds_bos=card.adds_bos,
        tokenizer_digest=blob_digest(card.tokenizer_json),
        template_digest=blob_digest(template),
        generation_config_digest=blob_digest(generation),
        kv_identity=WireIdentity(**identity.parts()),
        kv_spec=encode_spec(spec),
        created=card.created,
        weights_bytes=card.weights_bytes,
        pooling=card.pooling,
        normalizes=card.normalizes,
        hidden_size=card.hidden_size,
        score_token_ids=card.score_ids,
        pool=card.pool,
        scores_pairs=card.scores_pairs,
    )
    return message, [card.tokenizer_json, template, generation]
