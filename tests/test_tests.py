"""The tests' own manners, found by discovery: they ask public objects, and wait in one place."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MOST_POKES = 71  # of private attributes; to go down, never up

# Loops that pause and yet wait for nothing, with what they do instead.
PACED = {
    "gateway/http/test_connections.py": "a slow reader",
    "gateway/text/test_tokenizer.py": "counts its turns while another thread works",
    "support/fake_router.py": "sends its tokens at a pace",
    "support/odd_worker.py": "a worker whose engine hangs",
}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(TESTS.rglob("*.py")):
        yield str(path.relative_to(TESTS)), ast.parse(path.read_text(), str(path))


def is_poke(node: ast.AST) -> bool:
    """`x._name`, but not of a test object itself, nor what named tuples offer to everybody."""
    if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
        return False
    own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    above = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
    return not (own or above or node.attr.startswith("__") or node.attr == "_replace")


def pokes() -> Counter[str]:
    """Accesses to private attributes of others, by file."""
    return Counter(name for name, tree in trees() for node in ast.walk(tree) if is_poke(node))


def polling_loops() -> Counter[str]:
    """`while` loops with a condition and a pause, by file, but those of simulated time."""
    found: Counter[str] = Counter()
    for name, tree in trees():
        for loop in ast.walk(tree):
            if not isinstance(loop, ast.While) or name.startswith("simulation/"):
                continue
            pauses = any(
                isinstance(node, ast.Call) and ast.unparse(node.func).endswith("sleep")
                for node in ast.walk(loop)
            )
            if pauses and not isinstance(loop.test, ast.Constant):
                found[name] += 1
    return found


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("x._y", 1),
        ("x()._y._z", 2),
        ("self.x._y", 1),
        ("self._y + cls._y + super()._y", 0),
        ("x.__dict__, x._replace(y=1), x.y", 0),
    ],
)
def test_a_poke_is_found(code: str, count: int) -> None:
    assert sum(map(is_poke, ast.walk(ast.parse(code)))) == count


def test_private_attributes_are_left_alone() -> None:
    found = pokes()
    assert found.total() <= MOST_POKES, found.most_common(20)


def test_tests_wait_in_one_place() -> None:
    """By `eventually` and `wait_until`, whose one limit no verdict depends on."""
    assert dict(polling_loops()) == dict.fromkeys(PACED, 1)
