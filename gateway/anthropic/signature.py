"""The signature of a thinking block. Clients return it with the block; some drop a block without
one. Pure.

A signature proves nothing: a client may write any reasoning. The signature of hidden reasoning
contains its text, so that the next turn's prompt includes it.
"""

import binascii
from base64 import b64decode, b64encode
from hashlib import sha256

_HIDDEN = b"thought:"


def signature_of(thought: str, *, hidden: bool) -> str:
    """Return the signature as text; `hidden`: the block is sent without its reasoning."""
    data = thought.encode(errors="replace")
    return b64encode(_HIDDEN + data if hidden else sha256(data).digest()).decode()


def hidden_thought(signature: object) -> str:
    """Return the reasoning in a signature of this server; empty if it has none."""
    if not isinstance(signature, str):
        return ""
    try:
        data = b64decode(signature, validate=True)
        return data.removeprefix(_HIDDEN).decode() if data.startswith(_HIDDEN) else ""
    except (binascii.Error, ValueError):
        return ""
