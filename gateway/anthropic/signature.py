"""The signature of a thinking block. Clients send it back with the block, and some drop a thought
that has none. Pure.

It proves nothing: a client may write thoughts as it likes. That of a thought that is not shown has
its text, so that the next turn's prompt has it again.
"""

import binascii
from base64 import b64decode, b64encode
from hashlib import sha256

_HIDDEN = b"thought:"


def signature_of(thought: str, *, hidden: bool) -> str:
    """As text; `hidden`: the block is sent without its thought."""
    data = thought.encode(errors="replace")
    return b64encode(_HIDDEN + data if hidden else sha256(data).digest()).decode()


def hidden_thought(signature: object) -> str:
    """The thought that a signature of this server has; empty if it has none."""
    if not isinstance(signature, str):
        return ""
    try:
        data = b64decode(signature, validate=True)
        return data.removeprefix(_HIDDEN).decode() if data.startswith(_HIDDEN) else ""
    except (binascii.Error, ValueError):
        return ""
