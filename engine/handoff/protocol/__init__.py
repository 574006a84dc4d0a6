"""The protocol by which a hand-off transfers KV: its state machine, messages, frames and keys; no
I/O."""

from pdserve.engine.handoff.protocol.frames import (
    FRAME_TYPE,
    ID_BYTES,
    PREFIX_BYTES,
    TAG_BYTES,
    WIRE_VERSION,
    Bitmap,
    FrameError,
    FrameHeader,
    OtherVersion,
    Piece,
    Prefix,
    cut,
    mark_of,
    renamed,
    slot_bytes,
)
from pdserve.engine.handoff.protocol.keys import (
    SECRET_BYTES,
    Domain,
    TagKey,
    Ticket,
    TicketKeys,
    derive_keys,
    verified_payload,
)
from pdserve.engine.handoff.protocol.machine import (
    PROGRESS_S,
    Action,
    Actions,
    Claimed,
    ClaimGranted,
    Event,
    Filled,
    Handoff,
    HandoffEnded,
    Heard,
    PeerProgress,
    Phase,
    Picked,
    Reserved,
    Side,
    Tick,
    step,
)
from pdserve.engine.handoff.protocol.messages import HandoffCompatibility, Hello
