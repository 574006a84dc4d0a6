"""The runbook has an entry for each alert, with commands that exist."""

import re
from pathlib import Path

import pytest
from alerts_page import rules

from pdserve.cli.commands import COMMANDS

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/runbook.md").read_text()
ENTRIES = {
    part.partition("\n")[0]: part.partition("\n")[2] for part in re.split(r"^## ", TEXT, flags=re.M)
}
COMMAND = re.compile(r"^    (.+)$", re.MULTILINE)
TOOLS = ("pdserve", "curl", "kubectl")


def commands(text: str) -> list[list[str]]:
    """Return the words of each command in the indented lines; a line is split at its pipes."""
    lines = COMMAND.findall(text)
    return [part.split() for line in lines for part in re.split(r" \| ", line)]


def test_the_runbook_has_exactly_one_entry_per_alert() -> None:
    assert [name for name in ENTRIES if name.startswith("Pdserve")] == list(rules())


def test_an_alert_links_to_its_entry(subtests: pytest.Subtests) -> None:
    """The anchor has the form that GitHub derives from the heading."""
    for name in rules():
        with subtests.test(name):
            path, _, anchor = rules()[name]["annotations"]["runbook_url"].partition("#")
            assert (ROOT / path).read_text() == TEXT
            assert anchor == name.lower()
            found = commands(ENTRIES[name])
            assert found, "no command shows the cause"
            assert {words[0] for words in found} <= {*TOOLS, "grep"}
            assert found[0][0] in TOOLS


def test_the_options_of_pdserve_commands_exist(subtests: pytest.Subtests) -> None:
    """Covers the `pdserve` commands of the whole entry, including those within sentences."""
    for name in ENTRIES:
        with subtests.test(name):
            quoted = [words.split() for words in re.findall(r"`(pdserve [^`]+)`", ENTRIES[name])]
            for words in (*commands(ENTRIES[name]), *quoted):
                if words[0] != "pdserve":
                    continue
                command = COMMANDS[words[1]]
                flags = {
                    option.flag for section in command.sections() for option in section.options
                }
                used = [word for word in words[2:] if word.startswith("--")]
                assert set(used) <= flags, words
                plain = [w for i, w in enumerate(words[2:], 2) if not w.startswith("--")]
                values = sum(1 for flag in used if _takes_value(command.name, flag))
                needed = len(command.positionals)
                assert len(plain) - values >= needed or words in quoted, words


def _takes_value(command: str, flag: str) -> bool:
    options = (o for s in COMMANDS[command].sections() for o in s.options)
    return next(option.kind is not bool for option in options if option.flag == flag)


def test_the_metrics_page_links_to_the_runbook() -> None:
    assert "runbook.md" in (ROOT / "docs/metrics.md").read_text()
