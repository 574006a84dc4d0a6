"""One request in the router: its state machine, the object that carries out the machine's actions,
and the placement and migration of requests."""

from pdserve.services.router.request.actions import FailureReason
from pdserve.services.router.request.effects import Assignment, Client
from pdserve.services.router.request.events import Reachability
from pdserve.services.router.request.machine import MAX_CRASHES
from pdserve.services.router.request.migrations import Migrations
from pdserve.services.router.request.placer import PickedHost, PickQuery, Placer
from pdserve.services.router.request.request import ROUTER_ERRORS, RoutedRequest
from pdserve.services.router.request.state import Transition
