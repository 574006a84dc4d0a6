"""Hostile bytes and values, drawn from a Random."""

from collections.abc import Sequence
from random import Random
from typing import Any

# Lengths and counts that have broken parsers: signs, wraps at 32 and 64 bits, off by one.
EDGES = [0, 1, 2, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**60]
EDGES += [2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
LETTERS = "abcxyz_.019"
STRINGS = ["", "\0", "\ud800", "é", "𐀀", "a" * 5000, "{{", "{%", "</s>", "../..", "%n", "\r\n"]
NUMBERS = [0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e308]
MAX_STEPS = 4


def number(rng: Random) -> bytes:
    edge = rng.choice(EDGES)
    return (
        edge.to_bytes(8, "little") if rng.random() < 0.5 else (edge % 2**32).to_bytes(4, "little")
    )


def mutate(rng: Random, data: bytes, head: int = 0) -> bytes:
    """Return the data with some changes within the first `head` bytes (0: anywhere)."""
    for _ in range(rng.randint(1, MAX_STEPS)):
        at = rng.randrange(max(1, min(head or len(data), len(data))))
        new = rng.choice((number, _letters, _noise))(rng)
        how = rng.choice(("put", "insert", "cut", "end", "copy", "flip"))
        if how == "put":
            data = data[:at] + new + data[at + len(new) :]
        elif how == "insert":
            data = data[:at] + new + data[at:]
        elif how == "cut":
            data = data[:at] + data[at + len(new) :]
        elif how == "copy":
            data = data[:at] + data[at : at + 40] + data[at:]
        elif how == "end":
            data = data[:at]
        elif data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    return data


def _letters(rng: Random) -> bytes:
    """Draw letters, so that names stay names."""
    return "".join(rng.choices(LETTERS, k=rng.randint(1, 2))).encode()


def _noise(rng: Random) -> bytes:
    return rng.randbytes(rng.randint(1, 9))


def value(rng: Random, depth: int = 3) -> Any:
    """Draw a value that JSON can represent."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.randint(-10, 300)
    if kind == 4:
        return rng.choice(STRINGS)
    if kind == 5:
        return "".join(chr(rng.randrange(32, 0x3000)) for _ in range(rng.randrange(20)))
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(STRINGS): value(rng, depth - 1) for _ in range(rng.randrange(4))}


def change(rng: Random, tree: Any, names: Sequence[str] = ()) -> Any:
    """Return a JSON value with one of its parts replaced, removed, duplicated or renamed. `names`:
    fields that may be added.
    """
    if isinstance(tree, dict) and (tree or names) and rng.random() < 0.9:
        tree = dict(tree)
        if names and rng.random() < 0.3:
            tree[rng.choice(names)] = value(rng)
            return tree
        if not tree:
            return value(rng)
        key = rng.choice(list(tree))
        how = rng.random()
        if how < 0.1:
            del tree[key]
        elif how < 0.2:
            tree[rng.choice(STRINGS)] = tree[key]
        else:
            tree[key] = change(rng, tree[key])
        return tree
    if isinstance(tree, list) and tree and rng.random() < 0.9:
        tree = list(tree)
        at = rng.randrange(len(tree))
        how = rng.random()
        if how < 0.1:
            del tree[at]
        elif how < 0.2:
            tree[at:at] = [tree[at]] * rng.randint(1, 50)
        else:
            tree[at] = change(rng, tree[at])
        return tree
    if isinstance(tree, str) and tree and rng.random() < 0.5:
        return mutate(rng, tree.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
    return value(rng)
