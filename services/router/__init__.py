"""The router: chooses workers for requests, and fails over to others."""

from pdserve.services.router.main import run
from pdserve.services.router.settings import RouterSettings
