"""The tests' own manners, found by discovery: they ask public objects, and wait in one place."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Uses of others' private attributes; to go down, never up. Nine of them are names given to setattr
# and its like, which were not counted while the bound was 70.
MOST_POKES = 78

# Loops that pause and yet wait for nothing, with what they do instead.
PACED = {
    "gateway/http/test_connections.py": "a slow reader",
    "gateway/http/test_unread_over_tls.py": "a slow reader",
    "gateway/text/test_tokenizer.py": "counts its turns while another thread works",
    "support/fake_router.py": "sends its tokens at a pace",
    "support/odd_worker.py": "a worker whose engine hangs",
    "system/test_drain.py": "notes what workers report while another thread drains one",
}
BY_NAME = ("getattr", "setattr", "delattr", "object")  # the last one is unittest.mock's


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(TESTS.rglob("*.py")):
        yield str(path.relative_to(TESTS)), ast.parse(path.read_text(), str(path))


def is_private(name: object) -> bool:
    """`_name`, also at the end of a dotted path."""
    last = name.rpartition(".")[2] if isinstance(name, str) else ""
    return last.startswith("_") and not last.startswith("__")


def is_poke(node: ast.AST) -> bool:
    """`x._name`, but not of a test object itself, nor what named tuples and os offer to everybody;
    or setattr and its like with such a name."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
        own = bool(node.args) and ast.unparse(node.args[0]) in ("self", "cls")
        return not own and any(is_private(getattr(a, "value", "")) for a in node.args)
    if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
        return False
    own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    above = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
    return not (own or above or node.attr.startswith("__") or node.attr in ("_replace", "_exit"))


def pokes() -> Counter[str]:
    """Accesses to private attributes of others, by file."""
    return Counter(name for name, tree in trees() for node in ast.walk(tree) if is_poke(node))


def is_pause(node: ast.AST) -> bool:
    """A sleep, or `x.wait(seconds)`, for a time that is written down."""
    if not isinstance(node, ast.Call):
        return False
    times = [*node.args, *(word.value for word in node.keywords if word.arg == "timeout")]
    called = ast.unparse(node.func).rpartition(".")[2]
    written = [t.value for t in times if isinstance(t, ast.Constant)]
    return called == "sleep" or (called == "wait" and any(written))


def is_polling(loop: ast.AST) -> bool:
    """Pauses until a condition holds: that of a `while`, or that of what leaves a `for`."""
    if isinstance(loop, ast.While):
        ends = not isinstance(loop.test, ast.Constant)
    elif isinstance(loop, ast.For | ast.AsyncFor):
        ends = any(isinstance(node, ast.Break | ast.Return) for node in ast.walk(loop))
    else:
        return False
    return ends and any(map(is_pause, ast.walk(loop)))


def polling_loops() -> Counter[str]:
    """By file, but those of simulated time."""
    return Counter(
        name
        for name, tree in trees()
        for node in ast.walk(tree)
        if is_polling(node) and not name.startswith("simulation/")
    )


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("x._y", 1),
        ("x()._y._z", 2),
        ("self.x._y", 1),
        ("self._y + cls._y + super()._y", 0),
        ("x.__dict__, x._replace(y=1), os._exit(0), x.y", 0),
    ],
)
def test_a_poke_is_found(code: str, count: int) -> None:
    assert sum(map(is_poke, ast.walk(ast.parse(code)))) == count


def test_private_attributes_are_left_alone() -> None:
    found = pokes()
    assert found.total() <= MOST_POKES, found.most_common(20)


@pytest.mark.parametrize(
    ("code", "polls"),
    [
        ("while not done:\n    time.sleep(0.1)", True),
        ("while not done:\n    await asyncio.sleep(PAUSE_S)", True),
        ("while not Event().wait(0.1):\n    look()", True),
        ("for _ in range(9):\n    if done: break\n    Event().wait(0.1)", True),
        ("for _ in range(9):\n    if done(): return\n    over.wait(timeout=0.1)", True),
        ("for _ in range(9):\n    time.sleep(0.1)", False),
        ("while True:\n    await asyncio.sleep(1)", False),
        ("while left:\n    done.wait(LIMIT_S)", False),
    ],
)
def test_a_polling_loop_is_found(code: str, polls: bool) -> None:
    assert is_polling(ast.parse(code).body[0]) is polls


def test_tests_wait_in_one_place() -> None:
    """By `eventually` and `wait_until`, whose one limit no verdict depends on."""
    assert dict(polling_loops()) == dict.fromkeys(PACED, 1)
