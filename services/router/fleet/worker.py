"""What the router knows of one worker's kind, and what the placement policy sees of the worker;
pure.
"""

from dataclasses import dataclass

from pdserve.engine.kv import Difference, KvIdentity, KvSpec, Mixing, refusal, spec_difference

SIDES = ("at decode", "at prefill")


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
    """Return why KV of one kind cannot become KV of the other, or None."""
    if prefill.wire_version != decode.wire_version:
        text = f"wire version {decode.wire_version} at decode, {prefill.wire_version} at prefill"
        return Difference("wire version", text)
    decode_transports, prefill_transports = decode.transports, prefill.transports
    if not decode_transports or (
        prefill_transports is not decode_transports
        and set(prefill_transports).isdisjoint(decode_transports)
    ):
        decode_text, prefill_text = (
            " ".join(transports) or "none" for transports in (decode_transports, prefill_transports)
        )
        text = f"transports {decode_text} at decode, {prefill_text} at prefill"
        return Difference("transport", text)
    if prefill.encrypts != decode.encrypts:
        decode_text, prefill_text = ("on" if k.encrypts else "off" for k in (decode, prefill))
        text = f"KV encryption {decode_text} at decode, {prefill_text} at prefill"
        return Difference("encryption", text)
    identity_difference = refusal(decode.identity, prefill.identity, mixing, SIDES)
    same_layout = decode.layout is prefill.layout or decode.layout == prefill.layout
    if identity_difference is None and not same_layout:
        return Difference("layout", spec_difference(decode.layout, prefill.layout, SIDES))
    return identity_difference


@dataclass(slots=True)
class WorkerFacts:
    """A value, never changed. Not frozen, because a frozen one takes five times as long to make,
    for each load report."""

    boot: bytes
    kind: WorkerKind
    requests: int = 0  # running, waiting, and sent by this router but not yet reported
    waiting_tokens: int = 0  # prompt tokens not computed yet, also those sent but not reported
    free_tokens: int = 0  # decode: room for KV, less what is promised to hand-offs
    # Tokens of one prompt; 0 in the facts that a Worker keeps, which concern no prompt.
    cached_tokens: int = 0
    promised_tokens: int = 0  # from its start, cached or in transfer for other requests

    def of_prompt(self, cached_tokens: int, promised_tokens: int) -> "WorkerFacts":
        """Return the same worker's facts for a prompt of which it has so many tokens."""
        # By position: names take twice as long, and `replace` six times.
        return WorkerFacts(
            self.boot,
            self.kind,
            self.requests,
            self.waiting_tokens,
            self.free_tokens,
            cached_tokens,
            promised_tokens,
        )
