"""The commands in docs/from-*.md: each of another server means the same as the one beside it."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracles.command_lines import meaning

from pdserve.cli.options import OptionError

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `(.+?)` \| (?:`(pdserve .+?)`|refused: (.+)) \|$", re.MULTILINE)
LAUNCHERS = {"vllm serve": "serve"}  # others are one word, in place of `pdserve up`


def rows(page: Path) -> Iterator[tuple[str, str, str]]:
    for row in ROW.finditer(page.read_text()):
        foreign, own, sentence = (text and text.replace(r"\|", "|") for text in row.groups())
        yield foreign, own, sentence


def own_words(command: str) -> list[str]:
    for launcher, word in LAUNCHERS.items():
        if command.startswith(launcher):
            return [word, *shlex.split(command.removeprefix(launcher))]
    return ["up", *shlex.split(command)[1:]]


@pytest.mark.parametrize("page", sorted(DOCS.glob("from-*.md")), ids=lambda page: page.stem)
def test_commands_mean_the_same(page: Path, subtests: pytest.Subtests) -> None:
    found = list(rows(page))
    assert len(found) >= 5
    for foreign, own, sentence in found:
        with subtests.test(foreign):
            if own:
                assert meaning(own_words(foreign)) == meaning(shlex.split(own)[1:])
            else:
                with pytest.raises(OptionError) as refusal:
                    meaning(own_words(foreign))
                assert sentence in str(refusal.value).replace("\n", " ")
