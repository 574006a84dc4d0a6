"""The mutants that `make mutation` draws: each changes the meaning of one line and can be
parsed.
"""

import ast
from pathlib import Path

import pytest
from mutation.edits import apply, cpp_edits, python_edits
from mutation.mutants import Mutant, draw, mutated

PYTHON = '''"""A docstring with 1 < 2 in it."""
LIMIT: int = 3


def admit(queue: list[int], most: int = 8) -> bool:
    """True if there is room."""
    if len(queue) >= most and not queue[0]:
        log.warning("%d wait", len(queue))
        raise ValueError("no room for 5")
    queue.append(most)
    return len(queue) < LIMIT
'''
CHANGES = {
    "LIMIT: int = 4",
    "def admit(queue: list[int], most: int = 9) -> bool:",
    "    if len(queue) > most and not queue[0]:",
    "    if len(queue) >= most or not queue[0]:",
    "    if len(queue) >= most and (queue[0]):",
    "    if len(queue) >= most and not queue[1]:",
    "    if not (len(queue) >= most and not queue[0]):",
    "        pass",
    "    pass",
    "    return None",
    "    return len(queue) <= LIMIT",
}


def test_every_mutant_of_a_python_module_changes_behaviour() -> None:
    """No docstring, annotation, message or log line is changed."""
    found = set()
    for edit in python_edits(PYTHON):
        changed = apply(PYTHON, edit)
        ast.parse(changed)
        found |= set(changed.splitlines()) - set(PYTHON.splitlines())
    assert found == CHANGES


def test_mutants_of_cpp_leave_comments_and_strings_alone() -> None:
    source = 'if (i < rows && used) {  // i < rows\n  fail("a == b", 2);\n}\n#include <a>\n'
    assert {apply(source, edit).splitlines()[edit.line - 1] for edit in cpp_edits(source)} == {
        "if (i <= rows && used) {  // i < rows",
        "if (i < rows || used) {  // i < rows",
        '  fail("a == b", 3);',
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("engine/scheduling/a.py", "engine/b.py", "gateway/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(PYTHON)
    return tmp_path


def test_a_seed_draws_the_same_mutants_when_other_files_change(tree: Path) -> None:
    before = draw(tree, 5, 100)
    assert before == draw(tree, 5, 100) != draw(tree, 6, 100)
    (tree / "gateway/c.py").write_text("WEIGHT = 4\n" + PYTHON)
    (tree / "engine/b.py").unlink()

    def kept(mutants: list[Mutant]) -> list[Mutant]:
        return [m for m in mutants if m.path != "engine/b.py" and not m.line.startswith("WEIGHT")]

    assert kept(draw(tree, 5, 100)) == kept(before) != []


def test_important_parts_are_drawn_twice_as_often(tree: Path) -> None:
    first = [draw(tree, seed, 1)[0].area for seed in range(600)]
    assert 240 < first.count("scheduler") < 360  # of three files of equal length


def test_a_mutant_is_found_again_after_its_line_has_moved(tree: Path) -> None:
    (mutant,) = [m for m in draw(tree, 5, 100) if m.path == "engine/b.py" and "append" in m.line]
    (tree / "engine/b.py").write_text("\n\n" + PYTHON)
    text, line = mutated(tree, mutant)
    assert text.splitlines()[line - 1] == "    pass"
    (tree / "engine/b.py").write_text(PYTHON.replace("append", "add"))
    with pytest.raises(LookupError):
        mutated(tree, mutant)
