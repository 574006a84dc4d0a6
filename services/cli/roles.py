"""The commands of single processes: gateway, router, picker, prefill, decode. Each imports only its
own parts."""

import logging
import os
import sys
from collections.abc import Callable, Mapping

from pdserve.services.host.auth.roles import Role
from pdserve.services.host.logs import logs_json, quiet_grpc_core
from pdserve.services.host.options import HostSettings
from pdserve.services.host.process import raise_open_files, use_grpc_poller
from pdserve.services.local.child import take
from pdserve.services.local.cores import Share, machine_cores
from pdserve.services.options.options import OptionError
from pdserve.services.options.sources import Settings

log = logging.getLogger(__name__)


def gateway(settings: Settings, positionals: Mapping[str, str]) -> int:
    quiet_grpc_core(settings.values["log_format"].value)
    from pdserve.gateway.settings import GatewaySettings

    require(settings, "routers")
    mine = settings.build(GatewaySettings)
    check_trust(mine, Role.GATEWAY)
    if mine.workers > 1:
        from pdserve.services.local.gateway_workers import run
    else:
        from pdserve.gateway.main import run
    return guarded(lambda: run(mine))


def router(settings: Settings, positionals: Mapping[str, str]) -> int:
    quiet_grpc_core(settings.values["log_format"].value)
    use_grpc_poller()
    from pdserve.services.router.main import run
    from pdserve.services.router.settings import RouterSettings

    mine = settings.build(RouterSettings)
    check_trust(mine, Role.ROUTER)
    return guarded(lambda: run(mine))


def picker(settings: Settings, positionals: Mapping[str, str]) -> int:
    quiet_grpc_core(settings.values["log_format"].value)
    from pdserve.services.picker.main import run
    from pdserve.services.picker.settings import PickerSettings

    require(settings, "routers")
    mine = settings.build(PickerSettings)
    check_trust(mine, Role.GATEWAY)  # it calls routers like a gateway
    return guarded(lambda: run(mine))


def prefill(settings: Settings, positionals: Mapping[str, str]) -> int:
    quiet_grpc_core(settings.values["log_format"].value)
    from pdserve.engine.api.config import EngineConfig
    from pdserve.services.prefill.settings import PrefillSettings

    require(settings, "routers")
    mine = settings.build(PrefillSettings)
    limit_threads(mine.threads)
    check_trust(mine, Role.PREFILL)
    check_sealing(mine.encrypt_kv, bool(mine.cluster_cert))
    from pdserve.services.prefill.main import run

    return guarded(lambda: run(mine, settings.build(EngineConfig)))


def decode(settings: Settings, positionals: Mapping[str, str]) -> int:
    quiet_grpc_core(settings.values["log_format"].value)
    from pdserve.engine.api.config import EngineConfig
    from pdserve.services.decode.settings import DecodeSettings

    require(settings, "routers")
    mine = settings.build(DecodeSettings)
    limit_threads(mine.threads)
    check_trust(mine, Role.DECODE)
    check_sealing(mine.encrypt_kv, bool(mine.cluster_cert))
    from pdserve.services.decode.main import run

    return guarded(lambda: run(mine, settings.build(EngineConfig)))


def require(settings: Settings, *names: str) -> None:
    """Raises OptionError if an option without a sensible default is missing."""
    for option in settings.options():
        if option.name in names and not settings.values[option.name].value:
            raise OptionError(f"{option.flag} is needed (or {option.env})")


def check_trust(mine: HostSettings, role: Role) -> None:
    """Raises OptionError if this process and others could not trust each other."""
    from pdserve.services.host.auth.access import make_access
    from pdserve.services.host.auth.tls import TlsAccess

    try:
        access = make_access(mine)
        if isinstance(access, TlsAccess) and access.role() is not role:
            raise ValueError(f"--cluster-cert is of a {access.role()}, and this is a {role}")
    except (OSError, ValueError) as error:
        raise OptionError(str(error)) from None


def check_sealing(encrypt_kv: bool, has_certificates: bool) -> None:
    """Raises OptionError if the encryption keys of KV would cross the network in plain text."""
    if encrypt_kv and not has_certificates:
        raise OptionError("--encrypt-kv needs certificates: its keys travel between the processes")


def limit_threads(threads: int) -> None:
    """Set this process's thread counts before torch is imported. Raises OptionError if `threads`
    exceeds the usable cores or contradicts OMP_NUM_THREADS."""
    _, worth = machine_cores()
    if threads > worth:
        raise OptionError(f"--threads {threads}: {worth} cores may be used")
    given = os.environ.get("OMP_NUM_THREADS", "")
    if threads and given and given != str(threads):
        raise OptionError(f"--threads {threads} contradicts OMP_NUM_THREADS={given}")
    take(Share(threads or (int(given) if given.isdecimal() else worth)))


def guarded(run: Callable[[], int]) -> int:
    """Run a service; report an error that the user can fix as one line, without a traceback."""
    try:
        raise_open_files()
        return run()
    except Exception as error:
        if not isinstance(error, OSError | ValueError) and not is_typed(error):
            raise
        if logs_json():
            log.critical("%s", error)
        else:
            print(f"pdserve: {error}", file=sys.stderr)
        return 1


def is_typed(error: BaseException) -> bool:
    """Whether the exception's class is pdserve's, whose messages are written for users."""
    return type(error).__module__.startswith("pdserve.")
