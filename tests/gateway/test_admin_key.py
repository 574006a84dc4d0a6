"""The operator's key is refused if it is blank, malformed or also a client's."""

from pathlib import Path

import pytest

from pdserve.gateway.admin_key import AdminKey
from pdserve.services.common.tenants import ApiKeys, hashed


def test_a_key_that_cannot_work_is_refused_at_the_start() -> None:
    clients = ApiKeys(("client", hashed("alice", "other")))
    for key, reason in (
        ("", "must not be blank"),
        (" ", "must not be blank"),
        ("key ", "must not be blank, or begin or end with a space"),
        ("a:sha256:b", "NAME:sha256:HEX"),
        ("client", "must differ from all API keys of clients"),
        ("other", "must differ"),
        (hashed("operator", "client"), "must differ"),
    ):
        with pytest.raises(ValueError, match=reason) as caught:
            AdminKey(key, clients)
        assert str(caught.value).startswith("--admin-api-key"), key


def test_only_the_key_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("client\n")
    clients = ApiKeys(file=str(file))
    key = AdminKey(hashed("operator", "secret"), clients)
    assert key.accepts("Bearer secret")
    assert not key.accepts("Bearer client")
    assert AdminKey("secret", ApiKeys()).accepts("Bearer secret")
    file.write_text("client\nsecret\n")
    clients.reload()
    assert not key.accepts("Bearer secret"), "it is a client's key now"
