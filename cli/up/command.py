"""`pdserve up`: a complete system on one machine, in which every process is a child of this one.

The models are checked first. Then all processes start together: the router's address is chosen
before that, and stays the same if the router restarts. When `run` returns, all processes have
ended.
"""

import errno
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

from pdserve.cli.options import OptionError, Settings, UpSettings, render
from pdserve.cli.progress import Lines, ProgressView, progress_below_log
from pdserve.cli.up import gateway_workers
from pdserve.cli.up.banner import Banner, local_url
from pdserve.cli.up.child import Task
from pdserve.cli.up.cores import Share, allot, machine_cores
from pdserve.cli.up.folders import CONFIG_FILE, STATE_FILE, data_dir, kept_database, run_dir
from pdserve.cli.up.stop_limit import stop_limit_s
from pdserve.cli.up.supervisor import Child, StartError, Supervisor, death_of
from pdserve.engine.api import EngineConfig
from pdserve.engine.api.default_model import NO_DEFAULT_MODEL, default_model
from pdserve.gateway.admin_key import AdminKey
from pdserve.gateway.settings import GatewaySettings, worker_name
from pdserve.services.common.auth.certificates import Role, certificate_settings, make_authority
from pdserve.services.common.logs import configure_logging, logs_json, quiet_grpc_core
from pdserve.services.common.process import raise_open_files
from pdserve.services.common.tenants import ApiKeys, make_keys
from pdserve.services.common.tracing import endpoint
from pdserve.services.router.settings import RouterSettings
from pdserve.services.worker.settings import DecodeSettings, PrefillSettings, WorkerSettings

log = logging.getLogger(__name__)

ENTRIES = {
    "router": "pdserve.services.router.main:run",
    "gateway": "pdserve.gateway.main:run",
    "gateway worker": gateway_workers.ENTRY,
    "prefill": "pdserve.services.prefill.servicer:run",
    "decode": "pdserve.services.decode.servicer:run",
    "model check": "pdserve.cli.up.model_check:run",
}
# These share most imports. The gateway shares few; it imports its modules in parallel.
PRELOAD = tuple(ENTRIES[role].partition(":")[0] for role in ("router", "prefill", "decode"))
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
GATEWAY, ROUTER = "gateway", "router"
MAX_NAME = 100  # characters of a model's name
FIRST_PORT = 10_000  # lowest port that `free_port` chooses


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run `pdserve up`: start all processes, serve until a signal, stop them. Returns the exit
    code."""
    return serve(settings)


def serve(settings: Settings, on_ready: Callable[[str], None] | None = None) -> int:
    """Run a system until a signal; return the exit code. When it is ready, call `on_ready` with the
    URL of its gateway, or else print how to use it."""
    gateway = settings.build(GatewaySettings)
    as_json = gateway.log_format == "json"
    quiet_grpc_core(gateway.log_format)
    if as_json:
        configure_logging("up", gateway.log_level, log_format="json")
    raise_open_files()  # the children inherit the limit
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise gRPC prints a line at each fork
    try:
        with nullcontext(Lines(say)) if as_json else progress_below_log() as view:
            system = System(settings, progress=view, on_ready=on_ready)
            with (
                run_dir() as folder,
                Supervisor(
                    system.on_event, PRELOAD, lambda: system.serving, system.reloading()
                ) as supervisor,
            ):
                return system.serve(supervisor, folder)
    except (StartError, OSError) as error:
        say(f"pdserve up: {error}", logging.ERROR)
        return 1


@dataclass(frozen=True, slots=True)
class Database:
    """The gateway's database. `place` says where it is, unless the user has chosen it."""

    url: str
    place: str = ""


class ModelOption(NamedTuple):
    """A value of --model: MODEL or NAME=MODEL."""

    name: str  # by which clients request the model; empty: derived from its location
    location: str  # path or Hugging Face id; empty: the bundled model

    @classmethod
    def parse(cls, text: str) -> "ModelOption":
        name, separator, location = text.partition("=")
        if not separator or text[:1] in ("/", ".", "~") or os.path.exists(text):
            return cls("", text)
        if not name or not location or not name.isprintable() or len(name) > MAX_NAME:
            raise OptionError(f"--model {text}: expected NAME=MODEL")
        return cls(name, location)

    def __str__(self) -> str:
        return self.location or "the bundled model"


class ServedModel(NamedTuple):
    """A model that can be served."""

    option: ModelOption
    uses_prefill: bool  # its prompts can be computed by prefill workers


class WorkerToStart(NamedTuple):
    """A worker process to start. Its name includes that of its model if there are several."""

    name: str
    role: str
    model: ModelOption


class System:
    """The processes that `pdserve up` runs. Reports their state to the user on standard error."""

    def __init__(
        self,
        settings: Settings,
        entries: Mapping[str, str] = ENTRIES,
        progress: ProgressView | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        """Check the options before anything is started. Raises OptionError if they contradict each
        other, OSError if a port is in use."""
        self._settings = settings
        self._entries = entries
        self._up = settings.build(UpSettings)
        self._gateway = settings.build(GatewaySettings)
        self._models = [ModelOption.parse(text) for text in self._up.model or ("",)]
        self._check()
        self._needs_key = self._check_keys()
        self._trust = self._make_trust()
        self._router_address, self._client_bind = self._router_addresses()
        self._progress = progress or Lines(say)
        self._on_ready = on_ready
        self.serving = False  # the gateway has reported that it can serve a model
        self._stopping = False
        self._stop_listening: Callable[[], None] = lambda: None  # for several gateway processes
        self._started_at, self._started = time.monotonic(), time.time()

    def _check(self) -> None:
        up, values = self._up, self._settings.values
        remote = values["remote_prefill"]
        if up.prefill == 0 and remote.value == "always":
            raise OptionError(
                "--remote-prefill always contradicts --prefill 0: it needs a prefill worker"
            )
        if up.cluster_secret and values["encrypt_kv"].value:
            raise OptionError(
                "--encrypt-kv contradicts --cluster-secret: encryption needs certificates, which "
                "`pdserve up` creates if no secret is set"
            )
        if values["served_name"].value and (len(self._models) > 1 or self._models[0].name):
            raise OptionError(
                "--served-name is the name of one model: name several by --model NAME=MODEL"
            )
        names = Counter(model.name for model in self._models if model.name)
        if names and max(names.values()) > 1:
            raise OptionError(f"--model: two models have the name {names.most_common()[0][0]}")
        if len(set(self._models)) < len(self._models):
            raise OptionError("--model lists the same model twice")
        if not self._models[0].location and default_model() is None:
            raise OptionError(NO_DEFAULT_MODEL)
        try:
            endpoint(self._gateway)
        except ValueError as error:
            raise OptionError(str(error)) from None
        self._check_gateway_files()
        num_prefill = up.prefill if values["prefill"].given else 0  # else the models decide
        num_workers = (up.decode + num_prefill) * len(self._models)
        allot(*machine_cores(), num_workers, up.threads)
        for flag, host, port in (
            ("--port", self._gateway.host, self._gateway.port),
            ("--grpc-port", self._gateway.host, self._gateway.grpc_port),
            ("--router-port", "127.0.0.1", up.router_port),
        ):
            check_free(flag, host, port)

    def _check_gateway_files(self) -> None:
        """Raise OptionError if a file that the gateway reads at its start cannot be used. The
        imports are here because they are slow."""
        try:
            if self._gateway.mcp_config:
                from pdserve.gateway.mcp import read_config

                read_config(self._gateway.mcp_config)
            from pdserve.gateway.model_overrides import read_overrides

            read_overrides(self._gateway)
        except ValueError as error:
            raise OptionError(str(error)) from None

    def _check_keys(self) -> bool:
        """Return whether the gateway requires API keys. Raises OptionError if the configured keys
        cannot be used."""
        try:
            ApiKeys(self._gateway.api_keys)
        except ValueError as error:
            raise OptionError(f"--api-key: {error}") from None
        try:
            keys = make_keys(self._gateway)
        except (OSError, ValueError) as error:
            raise OptionError(f"--api-key-file: {error}") from None
        if admin_key := self._gateway.admin_api_key:
            try:
                AdminKey(admin_key, keys)
            except ValueError as error:
                raise OptionError(str(error)) from None
        return keys.required

    def reloading(self) -> tuple[str, ...]:
        """Return the names of the children that reload the API key file at SIGHUP. Empty without a
        key file: SIGHUP then stops the system."""
        return (*self._gateway_names(), ROUTER) if self._gateway.api_key_file else ()

    def _gateway_names(self) -> list[str]:
        num = self._up.gateway_workers
        return [GATEWAY] if num == 1 else [worker_name(index) for index in range(num)]

    def _make_trust(self) -> dict[Role, dict[str, Any]]:
        """Return the credentials with which the processes authenticate to each other, by role: the
        configured secret, or else new certificates that no other process has."""
        if self._up.cluster_secret:
            return {role: {"cluster_secret": self._up.cluster_secret} for role in Role}
        authority = make_authority()
        return {role: certificate_settings(authority, role) for role in Role}

    def _router_addresses(self) -> tuple[str, str]:
        """Return the router's addresses: the one for the other processes, and a separate one for
        clients. With a secret, clients use the first one too, and the second is empty."""
        port = self._up.router_port
        if self._up.cluster_secret:
            return f"127.0.0.1:{port or free_port()}", ""
        return f"127.0.0.1:{free_port()}", f"127.0.0.1:{port}"

    def serve(self, supervisor: Supervisor, folder: Path) -> int:
        """Check the models, start the children, wait for a signal, then stop them; return the exit
        code. Raises StartError if a model cannot be served or a child cannot start."""
        with (
            self._database(folder) as database,
            self._gateway_tasks(folder, database.url) as tasks,
        ):
            facts = f"# data: {database.place}\n" if database.place else ""
            # for `pdserve report`
            (folder / CONFIG_FILE).write_text(render(self._settings) + facts)
            self._write_state(folder)
            models = self._check_models(supervisor, folder)
            if supervisor.signals:
                say("stopped")
                return 0
            workers = self._workers(models)
            return self._serve(supervisor, folder, workers, tasks, database.place)

    def _serve(
        self,
        supervisor: Supervisor,
        folder: Path,
        workers: Sequence[WorkerToStart],
        gateway_tasks: Mapping[str, Callable[[], Task]],
        data_place: str,
    ) -> int:
        cores, num_usable = machine_cores()
        shares = allot(cores, num_usable, len(workers), self._up.threads)
        for worker, share in zip(workers, shares, strict=True):
            say(f"{worker.name}: {share}")
        say(f"gateway and router: cores shared by all ({len(cores)})")

        gateways = [supervisor.start(name, make) for name, make in gateway_tasks.items()]
        routers: list[Child] = []
        children: dict[str, list[Child]] = {"decode": [], "prefill": []}
        try:
            routers.append(supervisor.start(ROUTER, lambda: self._router_task(folder)))
            for worker, share in zip(workers, shares, strict=True):
                make = self._worker_task(worker, share, folder, len(workers))
                children[worker.role].append(supervisor.start(worker.name, make))
            supervisor.run_until(lambda: all(child.ready for child in supervisor.children))
            self._progress.close()
            if not supervisor.signals:
                url = str(gateways[0].figures.get("url", ""))
                self._write_state(folder, url, gateways[0].figures.get("models"))
                if self._on_ready:
                    self._on_ready(url)
                else:
                    self._welcome(gateways[0], routers[0], children["decode"], data_place)
            supervisor.run_until(lambda: False)
        finally:
            self._progress.close()
            self._stopping = True
            say("stopping (send the signal again to stop immediately)")
            self._stop_listening()
            # Each stage serves the earlier ones: prefill computes prompts for requests in decode,
            # and workers deregister from the router.
            stages = [gateways, children["decode"], children["prefill"], routers]
            clean = supervisor.stop(stages, stop_limit_s(self._gateway.drain_s))
            say("stopped" if clean else "stopped, but some processes had to be killed")
        return 0 if clean else 1

    def _check_models(self, supervisor: Supervisor, folder: Path) -> Mapping[str, ServedModel]:
        """Check the models in a child process, so that this process imports no torch; return them
        by their served names; none after a signal. Raises StartError, with the reason why a model
        cannot be served."""
        configs = [self._engine_config(model) for model in self._models]
        logs = (self._gateway.log_level, self._gateway.log_format)
        task = Task(self._entries["model check"], (configs, *logs), log_folder=str(folder))
        checked = supervisor.run("model check", lambda: task)
        served: dict[str, ServedModel] = {}
        if supervisor.signals:
            return served
        for option, facts in zip(self._models, checked["models"], strict=True):
            name = facts["name"]
            if name in served:
                raise StartError(
                    f"{served[name].option} and {option} would both be served as {name}: name one "
                    f"of them by --model NAME={option.location}"
                )
            served[name] = ServedModel(option, facts["uses_prefill"])
        return served

    def _engine_config(self, model: ModelOption, **fixed: Any) -> EngineConfig:
        name = {"served_name": model.name} if model.name else {}
        return self._settings.build(EngineConfig, model=model.location, **name, **fixed)

    def _workers(self, models: Mapping[str, ServedModel]) -> list[WorkerToStart]:
        """Return the workers to start. Decode workers come first, because the first workers get the
        cores that cannot be divided evenly. A model that uses no prefill workers has them only if
        the user has set their number."""
        counts = {"decode": self._up.decode, "prefill": self._up.prefill}
        is_set = self._settings.values["prefill"].given
        return [
            WorkerToStart(
                f"{role} {number}" + (f" of {name}" if len(models) > 1 else ""), role, model.option
            )
            for role, count in counts.items()
            for name, model in models.items()
            if role == "decode" or is_set or model.uses_prefill
            for number in range(count)
        ]

    def _trace_dir(self, folder: Path) -> str:
        """Return the folder of the ring files that record KV hand-offs: the configured folder, or
        else that of this run."""
        return self._settings.values["trace_dir"].value or str(folder)

    def _router_task(self, folder: Path) -> Task:
        router_settings = self._settings.build(
            RouterSettings,
            bind=self._router_address,
            client_bind=self._client_bind,
            # With a secret, clients use the internal port, on loopback.
            **({} if self._client_bind else {"tls_cert": "", "tls_key": ""}),
            **self._trust[Role.ROUTER],
            trace_dir=self._trace_dir(folder),
        )
        return Task(self._entries["router"], (router_settings,), log_folder=str(folder))

    @contextmanager
    def _database(self, folder: Path) -> Iterator[Database]:
        """Yield the gateway's database: the configured one, or else a file for the gateway's port,
        so that the next system with the same port finds its data and not another system's batches.
        If the port is random or that file cannot be used, yield a file in the folder of this run,
        which is removed at the end."""
        url, port = self._gateway.database_url, self._gateway.port
        with ExitStack() as stack:
            place = ""
            if not url:
                path = folder / "gateway.db"
                place = "files, batches and usage are removed when pdserve stops"
                if port:
                    try:
                        path = stack.enter_context(kept_database(data_dir(), port))
                        place = str(path)
                    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
                        text = (
                            "warning: files, batches and usage will be lost when pdserve stops: "
                            f"{error}"
                        )
                        say(text, logging.WARNING)
                url = f"sqlite:///{path}"
            yield Database(url, place)

    @contextmanager
    def _gateway_tasks(
        self, folder: Path, database: str
    ) -> Iterator[Mapping[str, Callable[[], Task]]]:
        """Yield for each gateway process, by its name, the function that makes its task."""
        gateway_settings = replace(
            self._gateway,
            routers=(self._router_address,),
            database_url=database,
            **self._trust[Role.GATEWAY],
        )
        names = self._gateway_names()
        if len(names) == 1:
            yield {
                GATEWAY: lambda: Task(
                    self._entries["gateway"], (gateway_settings,), log_folder=str(folder)
                )
            }
            return
        entry = self._entries["gateway worker"]
        with gateway_workers.GatewayWorkers(gateway_settings, len(names), folder, entry) as workers:
            self._stop_listening = workers.stop_listening
            yield {name: partial(workers.task, index) for index, name in enumerate(names)}

    def _worker_task(
        self, worker: WorkerToStart, share: Share, folder: Path, num_workers: int
    ) -> Callable[[], Task]:
        role = worker.role
        cls: type[WorkerSettings] = PrefillSettings if role == "prefill" else DecodeSettings

        def make() -> Task:
            worker_settings = self._settings.build(
                cls,
                routers=(self._router_address,),
                **self._trust[Role(role)],
                threads=share.threads,
                shm_dir=str(folder),
                trace_dir=self._trace_dir(folder),
            )
            engine = self._engine_config(worker.model, host_engines=num_workers)
            return Task(self._entries[role], (worker_settings, engine), share, str(folder))

        return make

    def on_event(self, child: Child, event: str, figures: dict[str, Any]) -> None:
        """Report a child's event (loading, ready, died, restart) to the user."""
        if event == "loading":
            activity = figures["what"] if child.once else f"{child.name}: loading"
            self._progress.update(activity, float(figures.get("fraction", 0.0)))
        elif event == "ready":
            self.serving |= child.name in self._gateway_names()
            if "fraction" in child.figures:
                self._progress.update(f"{child.name}: loading", 1.0)
            tokens = figures.get("kv_tokens")
            kv_text = f", KV pool of {tokens} tokens" if tokens else ""
            say(f"{child.name}: ready after {time.monotonic() - child.started_at:.1f} s{kv_text}")
        elif event == "died" and not self._stopping:
            say(f"{child.name}: {death_of(child, figures['code'])}")
            if figures["restart_s"]:
                say(f"{child.name}: starts again in {figures['restart_s']:g} s")
        elif event == "restart":
            say(f"{child.name}: starting again")

    def _write_state(self, folder: Path, url: str = "", models: Any = None) -> None:
        """Write what runs for `pdserve ps`. Until the system is ready, it has no URL."""
        names = models or [model.name or model.location or "SmolLM2" for model in self._models]
        state = {"pid": os.getpid(), "started": self._started, "url": url, "models": names}
        target = folder / STATE_FILE
        new = target.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(target)

    def _welcome(
        self, gateway: Child, router: Child, decode: Sequence[Child], data_place: str
    ) -> None:
        if self._gateway.host not in ("127.0.0.1", "::1", "localhost") and not self._needs_key:
            text = (
                "warning: no --api-key is set: anyone who reaches this machine can use the server"
            )
            say(text, logging.WARNING)
        model = (gateway.figures.get("models") or [""])[0]
        tasks = {str(child.figures.get("model")): child.figures.get("task") for child in decode}
        banner = Banner(
            seconds=time.monotonic() - self._started_at,
            url=local_url(str(gateway.figures.get("url", ""))),
            grpc=local_url(str(gateway.figures.get("grpc"))),
            ids=router.figures.get("clients") or self._router_address,
            model=model,
            task=tasks.get(model) or "chat",
            needs_key=self._needs_key,
            database=data_place,
            program=program(),
        )
        if logs_json():
            say(banner.ready)
        else:
            print(banner.text(), flush=True)


def program() -> str:
    """Return the command with which the user can start pdserve: "pdserve", or the path of this
    script if PATH does not contain it."""
    script = sys.argv[0]
    return script if Path(script).name == "pdserve" and not which("pdserve") else "pdserve"


def free_port() -> int:
    """Return a free port of 127.0.0.1 outside the ephemeral range, so that the kernel does not
    assign it to another process before the router listens there."""
    try:
        end = int(EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError):
        end = 32_768
    choices = range(FIRST_PORT, end) if end > FIRST_PORT else range(FIRST_PORT, 1 << 16)
    while True:
        port = secrets.choice(choices)
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


def check_free(flag: str, host: str, port: int) -> None:
    """Raise OSError, which names the option to change, if this machine cannot listen on the address
    or the port, for example because the port is in use. Port 0 is any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            reason = getattr(error, "strerror", error)
            if port and getattr(error, "errno", 0) in (errno.EADDRINUSE, errno.EACCES):
                raise OSError(
                    f"port {port} of {host} cannot be used ({reason}); choose one with {flag}"
                ) from None
            raise OSError(f"cannot listen on {host} ({reason}); choose another --host") from None


def say(text: str, level: int = logging.INFO) -> None:
    """Print a message for the user on standard error, because standard output is for text to copy.
    If logs are JSON, log the message instead."""
    if logs_json():
        log.log(level, "%s", text)
    else:
        print(text, file=sys.stderr, flush=True)
