"""API keys: no other key is accepted, and each has a separate prefix cache."""

import asyncio
import hashlib
import hmac
import os
import signal
from pathlib import Path

import pytest
from systems.eventually import eventually

from pdserve.services.common.tenants import EVERYBODY, ApiKeys, hashed


def name(keys: ApiKeys, key: str) -> str | None:
    tenant = keys.tenant(f"Bearer {key}")
    return None if tenant is None else tenant.name


def test_a_file_has_keys_or_their_hashes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n one \n\n{hashed('alice', 'two')}\n")
    keys = ApiKeys(["three"], str(path))
    assert keys.required
    assert name(keys, "one") == hashlib.sha256(b"one").hexdigest()[:12]
    assert name(keys, "two") == "alice"
    assert name(keys, "three")
    for wrong in ("# ours", "", "four", "alice", hashed("alice", "two")):
        assert name(keys, wrong) is None
    assert keys.tenant("Basic one") is None
    assert keys.tenant("BEARER  two ") == keys.tenant("Bearer two")


def test_a_key_is_compared_with_all_hashes_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All hashes are compared whichever matches, so the time reveals nothing about it."""
    compared: list[tuple[bytes, bytes]] = []
    really = hmac.compare_digest

    def noting(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return really(a, b)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    keys = ApiKeys(("one", "two", "three"))
    hashes = [hashlib.sha256(key.encode()).digest() for key in ("one", "two", "three")]
    for shown in ("one", "three", "another"):
        assert (name(keys, shown) is None) == (shown == "another")
        own = hashlib.sha256(shown.encode()).digest()
        assert compared == [(own, known) for known in hashes]
        compared.clear()


def test_without_keys_every_client_is_accepted() -> None:
    keys = ApiKeys()
    assert not keys.required
    assert keys.tenant("") is EVERYBODY
    assert EVERYBODY.cache_salt(b"own") == b"own"


def test_a_missing_or_empty_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="no API key"):
        ApiKeys(file=str(path))
    with pytest.raises(ValueError, match="empty"):
        ApiKeys([""])
    with pytest.raises(OSError, match="No such file"):
        ApiKeys(file=str(tmp_path / "none"))


@pytest.mark.parametrize("bad", ["", "a b", "a:b", "x" * 65])
def test_invalid_names_of_keys(bad: str) -> None:
    with pytest.raises(ValueError, match="a key's name"):
        hashed(bad, "key")


def test_each_key_has_a_separate_salt() -> None:
    keys = ApiKeys(["one", "two"])
    one, two = (keys.tenant(f"Bearer {key}") for key in ("one", "two"))
    assert one is not None
    assert two is not None
    salts = {one.cache_salt(b""), two.cache_salt(b""), one.cache_salt(b"x"), two.cache_salt(b"x")}
    assert len(salts) == 4
    assert b"" not in salts
    assert one.id != two.id
    again = ApiKeys(["two", "one"]).tenant("Bearer one")
    assert again == one, "gateways agree"


def test_a_list_of_hashes_reveals_no_salt(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(hashed("first", "one"))
    tenant = ApiKeys(file=str(path)).tenant("Bearer one")
    plain = ApiKeys(["one"]).tenant("Bearer one")
    assert tenant is not None
    assert plain is not None
    assert tenant.salt == plain.salt, "it is derived from the key that the client sends"


@pytest.mark.parametrize("line", ["first:sha256:" + "AB" * 32, "a b:sha256:" + "ab" * 32])
def test_a_malformed_hash_is_not_a_key(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(line)
    with pytest.raises(ValueError, match="pdserve key"):
        ApiKeys(file=str(path))


def test_a_shared_prefix_is_an_option() -> None:
    keys = ApiKeys(["one", "two"], shared_prefix=True)
    tenants = [keys.tenant(f"Bearer {key}") for key in ("one", "two")]
    assert [t.cache_salt(b"x") for t in tenants if t is not None] == [b"x", b"x"]


@pytest.mark.anyio
@pytest.mark.parametrize("notified", [False, True])
async def test_a_file_is_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str, notified: bool
) -> None:
    monkeypatch.setattr("pdserve.services.common.tenants.LOOK_AGAIN_S", 3600 if notified else 0.01)
    path = tmp_path / "keys"
    path.write_text("one\n")
    keys = ApiKeys(file=str(path))
    watching = asyncio.create_task(keys.watch())
    await asyncio.sleep(0)

    async def change(text: str) -> None:
        path.write_text(text)
        if notified:
            os.kill(os.getpid(), signal.SIGHUP)

    await change("one\ntwo\n")
    await eventually(lambda: name(keys, "two"))
    assert name(keys, "one")
    await change("# none any more\n")
    await change("two\n")
    await eventually(lambda: not name(keys, "one"))
    assert name(keys, "two")
    watching.cancel()


@pytest.mark.anyio
async def test_without_a_file_sighup_ends_nothing(anyio_backend: str) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    watching = asyncio.create_task(ApiKeys().watch())
    try:
        await eventually(lambda: signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGHUP)
        assert not watching.done()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)


def test_an_unusable_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    keys = ApiKeys(file=str(path))
    path.write_text("# none\n")
    keys.reload()
    assert "cannot reload the API keys" in caplog.text
    path.unlink()
    keys.reload()
    assert name(keys, "one")
