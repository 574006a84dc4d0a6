"""`pdserve replay RING...` prints the records of KV hand-offs that processes keep in ring files.

Each record is one line, in order of time; times count from the first record of the attempt. A ring
file can be read while its process runs.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pdserve.cli.options import ReplaySettings, Settings
from pdserve.engine.handoff.recorder import (
    ROUTE,
    SUFFIX,
    Entry,
    Recording,
    RecordKind,
    RingError,
    Timeline,
    check,
    describe,
    merge,
    read_rings,
)
from pdserve.engine.handoff.recorder.scenario import scenario


def run(settings: Settings, positionals: Mapping[str, list[str]]) -> int:
    """Run `pdserve replay`. Returns 0, or 1 if a ring file cannot be read, no record matches, or
    --check finds that a rule was broken."""
    options = settings.build(ReplaySettings)
    prefix = options.attempt.lower()
    try:
        recordings = read_rings(paths(positionals["ring"]))
    except RingError as error:
        print(f"pdserve replay: {error}", file=sys.stderr)
        return 1
    timeline = merge(recordings)
    attempts = {
        attempt: entries
        for attempt, entries in timeline.attempts().items()
        if attempt.hex().startswith(prefix[: 2 * len(attempt)])
    }
    for recording in recordings:
        if recording.lost or recording.damaged:
            print(f"{recording.name}: {gaps(recording)}", file=sys.stderr)
    if not attempts:
        print(
            "pdserve replay: no attempt matches --attempt"
            if prefix
            else "pdserve replay: the rings have no records"
        )
        return 1
    if options.seed:
        print(json.dumps(scenario(timeline, attempts)))
    elif not options.check:
        for attempt, entries in attempts.items():
            print("\n".join(attempt_lines(timeline, attempt, entries)), end="\n\n")
    return verdict(recordings, attempts) if options.check else 0


def paths(args: Sequence[str]) -> list[Path]:
    """Return the ring files that the arguments name, directly or by their folder.

    Raises RingError if a folder contains no ring file.
    """
    files: list[Path] = []
    for arg in args:
        path = Path(arg)
        ring_files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not ring_files:
            raise RingError(f"{path}: no {SUFFIX} file in this folder")
        files += ring_files
    return list(dict.fromkeys(files))


def gaps(recording: Recording) -> str:
    """Say how many records of a ring file are lost: overwritten or damaged."""
    parts = [f"{recording.lost} older records overwritten"] if recording.lost else []
    parts += [f"{recording.damaged} records damaged"] if recording.damaged else []
    return ", ".join(parts)


def attempt_lines(timeline: Timeline, attempt: bytes, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the output for one attempt: a heading, then a line for each of its records."""
    routed = [
        e.record for e in entries if e.record.side == ROUTE and e.record.kind is RecordKind.OPENED
    ]
    request_text = f", request {routed[0].argument} try {routed[0].detail}" if routed else ""
    yield f"attempt {attempt.hex()}{request_text}"
    width = max(len(recording.name) for recording in timeline.recordings)
    for entry in entries:
        recording, record = timeline.of(entry), entry.record
        seconds = (entry.at_ns - entries[0].at_ns) / 1e9
        description = describe(recording, record)
        yield f"  {seconds:12.6f}  {recording.name:{width}}  {record.side:7}  {description}"


def verdict(recordings: Sequence[Recording], attempts: Mapping[bytes, Sequence[Entry]]) -> int:
    """Print the rules that the hand-offs of these attempts have broken, and a summary. Returns the
    exit code, 1 if there are such violations."""
    violations = [v for v in check(recordings) if v.attempt in attempts]
    for violation in violations:
        print(violation, end="\n\n")
    records = sum(map(len, attempts.values()))
    print(f"{len(attempts)} attempts, {records} records, {len(violations)} violations")
    return 1 if violations else 0
