"""The checks for two releases that work together: the stages of an upgrade, and the release to
test."""

import subprocess
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import line5_versions
import pytest
import releases
from line5_versions import ALL_NEW, NEW, OLD, THIS_BUILD, Front, Rolled, figures_of
from releases import NoRelease, Release


class BusyLoad:
    """A load whose streams complete at every check, without failures."""

    def __init__(self) -> None:
        self.where = ""
        self.running = self.unequal = 0
        self.failed: list[str] = []
        self.broken: list[str] = []
        self._ended = count()

    @property
    def completed(self) -> int:
        return next(self._ended)


NAMELESS: dict[str, str] = {}  # the build of a release that does not report its build
ANOTHER = THIS_BUILD | {"version": "0.0.9"}


class ScriptedSystem:
    """The builds of gateways and routers, the versions of workers, and the number of remote
    prefills in each stage."""

    def __init__(
        self,
        protocols: list[int],
        handed: list[int],
        gateways: Sequence[dict[str, str]] = (THIS_BUILD,),
        routers: Sequence[dict[str, str]] = (THIS_BUILD, THIS_BUILD),
    ) -> None:
        self.gateways, self.routers = gateways, routers
        self.build = lambda build: build
        self.protocols = lambda: protocols
        totals = [sum(handed[: (looks + 1) // 2]) for looks in range(2 * len(handed))]
        self.remote_prefills = iter(totals).__next__


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("protocols", "handed", "holds"),
    [
        ([0, 1], [3, 2], True),
        ([0, 1], [3, 0], False),  # only in the first stage
        ([1], [3, 2], False),  # only one release
    ],
)
async def test_each_stage_needs_workers_of_both_releases_and_hand_offs(
    protocols: list[int], handed: list[int], holds: bool
) -> None:
    system: Any = ScriptedSystem(protocols, handed)
    load: Any = BusyLoad()
    rolled = Rolled(system, load, per_stage=1)
    for number in range(len(handed)):
        await rolled.stage(f"stage {number}", ALL_NEW, 0, 1)
    assert [stage["remote_prefills"] for stage in rolled.stages] == handed
    assert figures_of(rolled)["ok"] == holds


@pytest.mark.anyio
@pytest.mark.parametrize("front", [Front(a, b) for a in (OLD, NEW) for b in (OLD, NEW)])
@pytest.mark.parametrize(
    ("gateways", "routers", "are"),
    [
        ([THIS_BUILD], [THIS_BUILD, THIS_BUILD], Front(NEW, NEW)),
        ([THIS_BUILD], [NAMELESS, ANOTHER], Front(NEW, OLD)),
        ([ANOTHER], [THIS_BUILD, THIS_BUILD], Front(OLD, NEW)),
        ([NAMELESS], [NAMELESS, NAMELESS], Front(OLD, OLD)),
        ([THIS_BUILD], [THIS_BUILD, NAMELESS], None),  # one router was not replaced
        ([THIS_BUILD, ANOTHER], [THIS_BUILD], None),
    ],
)
async def test_each_stage_needs_its_gateways_and_routers(
    gateways: list[dict[str, str]], routers: list[dict[str, str]], are: Front | None, front: Front
) -> None:
    system: Any = ScriptedSystem([1], [3], gateways, routers)
    load: Any = BusyLoad()
    rolled = Rolled(system, load, per_stage=1)
    await rolled.stage("a stage", front, 1)
    assert figures_of(rolled)["ok"] == (front == are)


def test_a_missing_commit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Release:
        raise NoRelease("it is not in this clone")

    monkeypatch.setattr(line5_versions, "last_release", missing)
    assert line5_versions.releases(1) == {
        "releases": {"ok": True, "skipped": "it is not in this clone"}
    }


def test_a_failed_build_is_not_a_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: tuple[str, ...], **options: object) -> None:
        raise subprocess.CalledProcessError(1, words, stderr="no compiler")

    release = Release("0.1.0", 40 * "0", 0)
    monkeypatch.setattr(line5_versions, "last_release", lambda: release)
    monkeypatch.setattr(releases, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", fail)
    assert line5_versions.releases(1) == {"releases": {"ok": False, "error": "0.1.0: no compiler"}}
