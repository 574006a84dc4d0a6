"""The operator's key (--admin-api-key), which must not be a client's key too."""

from pdserve.services.common.tenants import ApiKeys


class AdminKey:
    """Accepts the operator's key unless clients' keys include it."""

    def __init__(self, key: str, clients: ApiKeys) -> None:
        """`key` may be NAME:sha256:HEX, as in ApiKeys. Raises ValueError that names the option if
        the key is blank, malformed or a client's."""
        if not key or key != key.strip():
            raise ValueError("--admin-api-key must not be blank, or begin or end with a space")
        try:
            self._keys = ApiKeys((key,))
        except ValueError as error:
            raise ValueError(f"--admin-api-key: {error}") from None
        self._clients = clients
        if self._keys.overlap(clients):
            raise ValueError("--admin-api-key must differ from all API keys of clients")

    def accepts(self, authorization: str) -> bool:
        """Return whether an Authorization header ("Bearer KEY") has the key. The file of clients'
        keys may have changed since the start, so a key that it contains now is refused."""
        is_client = self._clients.required and self._clients.tenant(authorization) is not None
        return not is_client and self._keys.tenant(authorization) is not None
