"""Properties shared by workers of one build, model and configuration, and whether KV of one kind
can become KV of another; pure."""

from dataclasses import dataclass

from pdserve.engine.kv.identity import Difference, KvIdentity, Mixing, refusal
from pdserve.engine.kv.spec import KvSpec, spec_difference


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """The common part of the hellos of workers of one kind. They share one object, because each
    placement compares it."""

    identity: KvIdentity
    wire_version: int
    transports: tuple[str, ...]
    layout: KvSpec
    encrypts: bool


def mismatch(prefill: WorkerKind, decode: WorkerKind, mixing: Mixing) -> Difference | None:
    """Return why KV of one kind cannot become KV of the other, in decode's words, or None."""
    if prefill.wire_version != decode.wire_version:
        text = f"wire version {decode.wire_version} here, {prefill.wire_version} there"
        return Difference("wire version", text)
    ours, theirs = decode.transports, prefill.transports
    if not ours or (theirs is not ours and set(theirs).isdisjoint(ours)):
        here, there = (" ".join(transports) or "none" for transports in (ours, theirs))
        return Difference("transport", f"transports {here} here, {there} there")
    if prefill.encrypts != decode.encrypts:
        here, there = ("encrypted" if kind.encrypts else "not" for kind in (decode, prefill))
        return Difference("encryption", f"KV encryption: {here} here, {there} there")
    other = refusal(decode.identity, prefill.identity, mixing)
    same_layout = decode.layout is prefill.layout or decode.layout == prefill.layout
    if other is None and not same_layout:
        return Difference("layout", spec_difference(decode.layout, prefill.layout))
    return other
