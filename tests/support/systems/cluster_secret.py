"""The secret that the processes of a test's cluster share."""

import grpc.aio

from pdserve.services.common.auth.access import SecretAccess, SecretChannel
from pdserve.services.common.rpc import AUTHORIZATION, CHANNEL_OPTIONS

SECRET = "the secret of every cluster of the tests"
ACCESS = SecretAccess((SECRET,))
BEARER = ACCESS.metadata


def open_channel(address: str, secret: str = SECRET) -> SecretChannel:
    """Return a channel whose calls carry the secret, or another."""
    inner = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return SecretChannel(inner, ((AUTHORIZATION, f"Bearer {secret}"),))
