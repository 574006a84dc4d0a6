"""The commands that run a single process: gateway, router, picker, prefill, decode. Each imports
only what its own process needs.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from pdserve.cli.options import OptionError, Settings
from pdserve.cli.up.cores import Share, machine_cores, take
from pdserve.services.common.auth.certificates import Role
from pdserve.services.common.logs import logs_json, quiet_grpc_core
from pdserve.services.common.options import ServerSettings
from pdserve.services.common.process import raise_open_files, use_grpc_poller

if TYPE_CHECKING:
    from pdserve.services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


def gateway(settings: Settings, positionals: Mapping[str, str]) -> int:
    quiet_grpc_core(settings.values["log_format"].value)
    from pdserve.gateway.settings import GatewaySettings

    require(settings, "routers")
    role_settings = settings.build(GatewaySettings)
    check_trust(role_settings, Role.GATEWAY)
    if role_settings.workers > 1:
        from pdserve.cli.up.gateway_workers import run
    else:
        from pdserve.gateway.main import run
    return guarded(lambda: run(role_settings))


def router(settings: Settings, positionals: Mapping[str, str]) -> int:
    quiet_grpc_core(settings.values["log_format"].value)
    use_grpc_poller()
    from pdserve.services.router.main import run
    from pdserve.services.router.settings import RouterSettings

    role_settings = settings.build(RouterSettings)
    check_trust(role_settings, Role.ROUTER)
    return guarded(lambda: run(role_settings))


def picker(settings: Settings, positionals: Mapping[str, str]) -> int:
    quiet_grpc_core(settings.values["log_format"].value)
    from pdserve.services.picker.main import run
    from pdserve.services.picker.settings import PickerSettings

    require(settings, "routers")
    role_settings = settings.build(PickerSettings)
    check_trust(role_settings, Role.GATEWAY)  # it calls routers like a gateway
    return guarded(lambda: run(role_settings))


def prefill(settings: Settings, positionals: Mapping[str, str]) -> int:
    from pdserve.services.worker.settings import PrefillSettings

    return _worker(settings, PrefillSettings, Role.PREFILL)


def decode(settings: Settings, positionals: Mapping[str, str]) -> int:
    from pdserve.services.worker.settings import DecodeSettings

    return _worker(settings, DecodeSettings, Role.DECODE)


def _worker(settings: Settings, cls: "type[WorkerSettings]", role: Role) -> int:
    quiet_grpc_core(settings.values["log_format"].value)
    from pdserve.engine.api import EngineConfig

    require(settings, "routers")
    role_settings = settings.build(cls)
    limit_threads(role_settings.threads)
    check_trust(role_settings, role)
    if role_settings.encrypt_kv and not role_settings.cluster_cert:
        raise OptionError(
            "--encrypt-kv requires certificates, because the processes send each other its keys"
        )
    # Imports torch, and so comes after limit_threads.
    run = resolve_name(f"pdserve.services.{role}.servicer:run")
    return guarded(lambda: run(role_settings, settings.build(EngineConfig)))


def require(settings: Settings, *names: str) -> None:
    """Raise OptionError if one of the named options has no value; there is no default that would
    work."""
    for option in settings.options():
        if option.name in names and not settings.values[option.name].value:
            raise OptionError(f"{option.flag} is required (or set {option.env})")


def check_trust(host_settings: ServerSettings, role: Role) -> None:
    """Raise OptionError if the certificate or secret options are wrong, so that this process could
    not authenticate to the others of its cluster in this role."""
    from pdserve.services.common.auth.access import TlsAccess, make_access

    try:
        access = make_access(host_settings)
        if isinstance(access, TlsAccess) and access.role() is not role:
            raise ValueError(f"--cluster-cert has the role {access.role()}, but this is a {role}")
    except (OSError, ValueError) as error:
        raise OptionError(str(error)) from None


def limit_threads(threads: int) -> None:
    """Set the number of compute threads of this process, before torch is imported. Raises
    OptionError if `threads` exceeds the usable cores or differs from OMP_NUM_THREADS."""
    _, num_usable = machine_cores()
    if threads > num_usable:
        raise OptionError(f"--threads {threads} exceeds the {num_usable} usable cores")
    env_threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads and env_threads and env_threads != str(threads):
        raise OptionError(
            f"--threads {threads} contradicts the environment's OMP_NUM_THREADS={env_threads}"
        )
    take(Share(threads or (int(env_threads) if env_threads.isdecimal() else num_usable)))


def guarded(run: Callable[[], int]) -> int:
    """Run a service; return its exit code. An error that the user can fix is reported as one line,
    without a traceback, and the code is 1."""
    try:
        raise_open_files()
        return run()
    except Exception as error:
        if not isinstance(error, OSError | ValueError) and not is_pdserve_error(error):
            raise
        if logs_json():
            log.critical("%s", error)
        else:
            print(f"pdserve: {error}", file=sys.stderr)
        return 1


def is_pdserve_error(error: BaseException) -> bool:
    """Return whether the class of an exception is defined by pdserve; the messages of such
    exceptions are written for users."""
    return type(error).__module__.startswith("pdserve.")
