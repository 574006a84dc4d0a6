"""The database kept for the next `pdserve up`: one system per port and host at a time."""

from pathlib import Path

import pytest

from pdserve.cli.up import folders as module
from pdserve.cli.up.folders import kept_database


def test_one_system_at_a_time_keeps_the_database(tmp_path: Path) -> None:
    with kept_database(tmp_path, 8000) as path:
        assert path.stat().st_mode & 0o777 == 0o600
        with (
            pytest.raises(OSError, match="another `pdserve up` uses"),
            kept_database(tmp_path, 8000),
        ):
            pass
        with kept_database(tmp_path, 8001) as other:
            assert other != path
    with kept_database(tmp_path, 8000) as again:
        assert again == path


def test_each_host_has_a_separate_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for name in ("one", "other", ""):
        monkeypatch.setattr(module, "MACHINE_ID", tmp_path / "machine-id")
        (tmp_path / "machine-id").write_text(name + "\n")
        with kept_database(tmp_path, 8000) as path:
            found.add(path.name)
    (tmp_path / "machine-id").unlink()  # as if it were empty: the host name is used
    with kept_database(tmp_path, 8000) as path:
        found.add(path.name)
    assert len(found) == 3


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_no_database_is_kept_where_other_hosts_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    home = tmp_path / "a home"
    home.mkdir()
    mounts = tmp_path / "mountinfo"
    point = str(home).replace(" ", "\\040")
    mounts.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / {point} rw shared:1 - {kind} host:/x rw\n"
    )
    monkeypatch.setattr(module, "MOUNTS", mounts)
    with pytest.raises(OSError, match=kind), kept_database(home, 8000):
        pass
    with kept_database(tmp_path, 8000):
        pass


def test_an_unusable_file_is_named(tmp_path: Path) -> None:
    with kept_database(tmp_path, 8000) as path:
        pass
    path.write_bytes(b"no database " * 1000)
    with pytest.raises(OSError, match="not a database"), kept_database(tmp_path, 8000):
        pass
