"""`pdserve up` over fake services: arguments of each child, restarts, and a clean end."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from systems.chaos.cluster import lasting_port
from systems.cluster_secret import SECRET
from systems.eventually import LIMIT_S

from pdserve.cli.commands import COMMANDS
from pdserve.cli.main import main, parse_command
from pdserve.cli.options import OptionError
from pdserve.cli.ps import running
from pdserve.cli.up.command import System
from pdserve.cli.up.folders import PREFIX, STATE_FILE, data_dir, run_dir
from pdserve.cli.up.supervisor import Child, StartError, Supervisor
from pdserve.gateway.settings import GatewaySettings
from pdserve.services.common.auth.certificates import role_in
from pdserve.services.common.options import ECHO_S
from pdserve.services.router.settings import RouterSettings
from pdserve.services.worker.settings import DecodeSettings, PrefillSettings

FAKES = {
    "router": "fakes.service:router",
    "gateway": "fakes.service:gateway",
    "gateway worker": "fakes.service:gateway_worker",
    "prefill": "fakes.service:worker",
    "decode": "fakes.service:worker",
    "model check": "fakes.service:model_check",
}
SUPPORT = Path(__file__).parents[1] / "support"


class Watched(Supervisor):
    """Calls back once everything is up, on the supervisor's own thread."""

    def __init__(self, system: System, then: Callable[["Watched"], bool]) -> None:
        super().__init__(system.on_event, reloading=system.reloading())
        self._then = then
        self.stages: list[list[str]] = []  # in which its children stop
        # Sockets on which this process listens when its children stop, by their descriptor.
        self.listening: dict[int, tuple[str, int]] = {}

    def run_until(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        serving = len(self.children) > 1 and all(c.ready for c in self.children)
        if serving and not done():
            return super().run_until(lambda: self._then(self), 20.0)
        return super().run_until(done, timeout_s)

    def stop(self, stages: Sequence[Sequence[Child]], bound_s: float) -> bool:
        self.stages = [[child.name for child in stage] for stage in stages]
        sockets = psutil.Process().net_connections("tcp")
        listening = (one for one in sockets if one.status == psutil.CONN_LISTEN)
        self.listening = {one.fd: (one.laddr.ip, one.laddr.port) for one in listening}
        return super().stop(stages, bound_s)

    def named(self, name: str) -> Child:
        return next(c for c in self.children if c.name == name)


def serve(tmp_path: Path, *words: str, then: Callable[[Watched], bool] = lambda s: True) -> Watched:
    """Run a system until it is ready, then until `then` returns, then to its end."""
    settings, _ = parse_command(COMMANDS["up"], "pdserve up", ["--port", "0", *words])
    system = System(settings, FAKES)
    with run_dir(tmp_path) as folder, Watched(system, then) as supervisor:
        facts = {c.name: c.figures for c in supervisor.children}
        code = system.serve(supervisor, folder)
        assert code == 0, facts
    assert list(tmp_path.iterdir()) == []
    assert not any(psutil.pid_exists(c.figures["pid"]) for c in supervisor.children)
    return supervisor


def test_every_child_gets_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = serve(tmp_path, "--model", "one.gguf", "--model", "two", "--decode", "2")
    names = [child.name for child in ended.children]
    assert names[:2] == ["gateway", "router"]
    assert sorted(names[2:]) == sorted(
        f"{role} {n} of {model}"
        for model in ("one.gguf", "two")
        for role, n in (("prefill", 0), ("decode", 0), ("decode", 1))
    )
    (gateway, router, *workers) = (child.figures for child in ended.children)
    assert int(router["bind"].removeprefix("127.0.0.1:")) > 0
    everyone = (router, *workers, gateway)
    assert len({f["ca"] for f in everyone}) == 1
    names = ["router", *(w["role"] for w in workers), "gateway"]
    assert [role_in(f["cert"].encode()) for f in everyone] == names
    assert all(f["secret"] == [] for f in everyone)
    assert gateway["routers"] == [router["bind"]]
    for worker in workers:
        assert worker["routers"] == [router["bind"]]
        assert worker["threads"] == 1
        assert worker["shm_dir"].startswith(str(tmp_path))
        assert worker["trace_dir"] == router["trace_dir"] == worker["shm_dir"]
        assert worker["host_engines"] == 6
    assert [w["model"] for w in workers].count("two") == 3

    roles = [{name.split()[0] for name in stage} for stage in ended.stages]
    assert roles == [{"gateway"}, {"decode"}, {"prefill"}, {"router"}]
    said = capsys.readouterr()
    assert "curl http://127.0.0.1:0/v1/chat/completions" in said.out
    assert '"model": "fake"' in said.out
    assert "Authorization" not in said.out
    assert "decode 0 of two: loading 25%" in said.err
    assert "decode 0 of two: ready" in said.err
    assert "KV pool of 1000 tokens" in said.err
    assert said.err.rstrip().endswith("stopped")
    assert "router: loading" not in said.err


@pytest.mark.parametrize(
    "words", [(), pytest.param(("--prefill", "1"), marks=pytest.mark.extended)]
)
def test_a_model_without_prefill_has_no_worker_for_it_by_default(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    ended = serve(tmp_path, "--model", "encoder", "--model", "two", *words)
    workers = {child.name: child.figures for child in ended.children[2:]}
    expected = {"decode 0 of encoder", "decode 0 of two", "prefill 0 of two"}
    assert workers.keys() == expected | ({"prefill 0 of encoder"} if words else set())
    assert {figures["host_engines"] for figures in workers.values()} == {len(workers)}


def test_models_of_equal_names_need_names(tmp_path: Path) -> None:
    def up(*words: str) -> System:
        settings, _ = parse_command(COMMANDS["up"], "pdserve up", ["--port", "0", *words])
        return System(settings, FAKES)

    system = up("--model", "a/tiny", "--model", "b/tiny")
    with run_dir(tmp_path) as folder, Supervisor(system.on_event) as supervisor:
        wanted = "a/tiny and b/tiny would both be served as tiny: .* --model NAME=b/tiny"
        with pytest.raises(StartError, match=wanted):
            system.serve(supervisor, folder)
        assert supervisor.children == []
    for words, message in (
        (("--served-name", "x", "--model", "a", "--model", "b"), "by --model NAME=MODEL"),
        (("--served-name", "x", "--model", "y=b"), "by --model NAME=MODEL"),
        (("--model", "x=a", "--model", "x=b"), "--model: two models have the name x"),
        (("--model", "x="), "--model x=: expected NAME=MODEL"),
        (("--model", "=a"), "--model =a: expected NAME=MODEL"),
    ):
        with pytest.raises(OptionError, match=message):
            up(*words)
    (tmp_path / "a=b").mkdir()
    ended = serve(tmp_path / "a=b", "--model", "org/x=a/tiny", "--model", str(tmp_path / "a=b"))
    names = {"decode 0 of org/x", "prefill 0 of org/x", "decode 0 of a=b", "prefill 0 of a=b"}
    workers = {child.name: child.figures for child in ended.children[2:]}
    assert workers.keys() == names
    assert {figures["model"] for figures in workers.values()} == {"a/tiny", str(tmp_path / "a=b")}


def test_ps_lists_running_systems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[list[str]] = []

    def list_them(supervisor: Watched) -> bool:
        if not listed:
            dead = tmp_path / f"{PREFIX}dead"
            dead.mkdir()
            (dead / STATE_FILE).write_text('{"pid": 1, "started": 0, "url": "", "models": []}')
            monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
            assert main(["ps"]) == 0
            listed.extend(line.split() for line in capsys.readouterr().out.splitlines())
            shutil.rmtree(dead)
        return True

    serve(tmp_path, then=list_them)
    lines = listed[listed.index(["pid", "url", "models", "for"]) + 1 :]
    assert [line[:3] for line in lines] == [[str(os.getpid()), "http://127.0.0.1:0", "fake"]]
    assert running(tmp_path) == []


def test_several_gateway_processes_share_sockets_and_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, keys = tmp_path / "run", tmp_path / "keys"
    folder.mkdir()
    keys.write_text("first\n")
    sent: list[int] = []

    def hang_up(supervisor: Watched) -> bool:
        if not sent:
            sent.append(signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
        return all("reloads" in c.figures for c in supervisor.children[:3])

    words = ["--gateway-workers", "2", "--unix-socket", str(tmp_path / "api")]
    ended = serve(folder, *words, "--api-key-file", str(keys), then=hang_up)
    names = [child.name for child in ended.children]
    assert names == ["gateway 0", "gateway 1", "router", "decode 0", "prefill 0"]
    first, second = (child.figures for child in ended.children[:2])
    (host, port), unix = first["shared"]
    assert (host, unix) == ("127.0.0.1", str(tmp_path / "api"))
    assert first["url"] == f"http://127.0.0.1:{port}"
    assert (host, port) not in ended.listening.values(), ended.listening
    assert (first["index"], second["index"]) == (0, 1)
    for what in ("shared", "url", "database_url", "rates"):
        assert first[what] == second[what]
    assert first["rates"].startswith(f"sqlite:///{folder}")
    assert f"curl http://127.0.0.1:{port}/v1" in capsys.readouterr().out
    assert not (tmp_path / "api").exists()


def database_of(tmp_path: Path, *words: str) -> str:
    run_folder = tmp_path / "run"
    run_folder.mkdir(exist_ok=True)
    url: str = serve(run_folder, "--prefill", "0", *words).named("gateway").figures["database_url"]
    return url


def test_files_and_batches_are_kept_for_the_next_system_of_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    (tmp_path / "home/pdserve").mkdir(mode=0o755, parents=True)
    kept = database_of(tmp_path, "--port", "28765")
    assert kept.startswith(f"sqlite:///{tmp_path}/home/pdserve/gateway-")
    assert kept.endswith("-28765.db")
    assert database_of(tmp_path, "--port", "28765") == kept
    assert capsys.readouterr().err.count("will be lost") == 0
    assert (tmp_path / "home/pdserve").stat().st_mode & 0o777 == 0o700
    assert database_of(tmp_path).startswith(f"sqlite:///{tmp_path}/run/pdserve-up-")
    assert database_of(tmp_path, "--database-url", "none") == "none"
    monkeypatch.setenv("XDG_DATA_HOME", "/proc/nowhere")
    url = database_of(tmp_path, "--port", "28765")
    assert url.startswith(f"sqlite:///{tmp_path}/run/pdserve-up-")
    assert "files, batches and usage will be lost when pdserve stops" in capsys.readouterr().err


def test_another_users_folder_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match="belongs to another user"):
        data_dir()


def test_the_allotment_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cores = len(os.sched_getaffinity(0))
    ended = serve(tmp_path, "--prefill", "0")
    assert [c.name for c in ended.children] == ["gateway", "router", "decode 0"]
    assert ended.children[2].figures["threads"] == cores
    err = capsys.readouterr().err
    assert f"gateway and router: cores shared by all ({cores})" in err
    assert "decode 0: core" in err


def test_a_given_secret_keys_and_ports_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("third\n")
    folder = tmp_path / "run"
    folder.mkdir()
    port = lasting_port()
    words = ["--cluster-secret", SECRET, "--api-key", "first", "--api-key", "second"]
    words += ["--api-key-file", str(keys), "--router-port", str(port), "--queue-timeout-s", "7"]
    words += ["--trace-dir", str(tmp_path)]
    ended = serve(folder, *words)
    router = ended.named("router").figures
    assert (router["secret"], router["bind"]) == ([SECRET], f"127.0.0.1:{port}")
    assert router["api_keys"] == ["first", "second"]
    assert router["api_key_file"] == str(keys)
    assert router["queue_timeout_s"] == 7
    assert router["trace_dir"] == ended.named("decode 0").figures["trace_dir"] == str(tmp_path)
    out = capsys.readouterr().out
    assert "Authorization: Bearer YOUR_KEY" in out
    assert "first" not in out


def test_a_killed_router_restarts_at_its_address(tmp_path: Path) -> None:
    killed: list[int] = []
    addresses: list[str] = []

    def kill_router(supervisor: Watched) -> bool:
        router = supervisor.named("router")
        if not killed:
            killed.append(router.figures["pid"])
            addresses.append(router.figures["bind"])
            os.kill(killed[0], signal.SIGKILL)
        return router.restarts == 1 and router.ready

    ended = serve(tmp_path, then=kill_router)
    router = ended.named("router").figures
    assert router["pid"] != killed[0]
    assert [router["bind"]] == [router["address"]] == addresses
    assert [c.restarts for c in ended.children] == [0, 1, 0, 0]


def test_sighup_reloads_the_keys(tmp_path: Path) -> None:
    """Only in children that have keys; without a key file SIGHUP is a stop."""
    keys = tmp_path / "keys"
    keys.write_text("first\n")
    folder = tmp_path / "run"
    folder.mkdir()
    sent: list[int] = []

    def hang_up(supervisor: Watched) -> bool:
        if not sent:
            sent.append(signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
        return all("reloads" in supervisor.named(n).figures for n in ("gateway", "router"))

    ended = serve(folder, "--api-key-file", str(keys), then=hang_up)
    assert all("reloads" in ended.named(n).figures for n in ("gateway", "router"))
    assert [c.restarts for c in ended.children] == [0, 0, 0, 0]
    assert ended.signals == []


def test_mcp_servers_belong_to_the_gateway_and_are_checked_first(tmp_path: Path) -> None:
    config = tmp_path / "mcp.json"
    config.write_text('{"mcpServers": {"a": {"command": "x"}}}')
    words = ["--port", "0", "--mcp-config", str(config), "--mcp-max-rounds", "3"]
    made = parse_command(COMMANDS["up"], "pdserve up", words)[0].build(GatewaySettings)
    assert (made.mcp_config, made.mcp_max_rounds) == (str(config), 3)
    System(parse_command(COMMANDS["up"], "pdserve up", words)[0], FAKES)
    config.write_text("{}")
    with pytest.raises(OptionError, match=r"--mcp-config .*mcp\.json: mcpServers is missing"):
        System(parse_command(COMMANDS["up"], "pdserve up", words)[0], FAKES)
    words = ["--port", "0", "--api-key", "k", "--admin-api-key", "k"]
    with pytest.raises(OptionError, match="--admin-api-key must differ from all API keys"):
        System(parse_command(COMMANDS["up"], "pdserve up", words)[0], FAKES)
    words = ["--port", "0", "--override-generation-config", '{"heat": 1}']
    with pytest.raises(OptionError, match="--override-generation-config: unknown name 'heat'"):
        System(parse_command(COMMANDS["up"], "pdserve up", words)[0], FAKES)


def test_traces_of_every_process_go_to_one_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--port", "0", "--otlp-traces-endpoint", "http://c:4318"]
    settings, _ = parse_command(COMMANDS["up"], "pdserve up", words)
    for kind in (GatewaySettings, RouterSettings, PrefillSettings, DecodeSettings):
        assert settings.build(kind).otlp_traces_endpoint == "http://c:4318"
    System(settings, FAKES)
    monkeypatch.setattr("pdserve.services.common.tracing.is_installed", lambda: False)
    with pytest.raises(OptionError, match="--otlp-traces-endpoint needs OpenTelemetry: pip"):
        System(settings, FAKES)
    words[-1] = "c:4318"
    with pytest.raises(OptionError, match="--otlp-traces-endpoint: 'c:4318' is not an http"):
        System(parse_command(COMMANDS["up"], "pdserve up", words)[0], FAKES)


def test_a_worker_that_cannot_start_ends_the_system(tmp_path: Path) -> None:
    settings, _ = parse_command(COMMANDS["up"], "pdserve up", ["--port", "0"])
    system = System(settings, {**FAKES, "prefill": "fakes.service:broken_worker"})
    with run_dir(tmp_path) as folder, Supervisor(system.on_event) as supervisor:
        with pytest.raises(StartError, match="prefill 0 could not start: no such model"):
            system.serve(supervisor, folder)
        assert all(c.process is None for c in supervisor.children)


def test_a_busy_port_is_named() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        for flag in ("--port", "--grpc-port", "--router-port"):
            words = ["--port", "0", flag, str(port)]
            settings, _ = parse_command(COMMANDS["up"], "pdserve up", words)
            with pytest.raises(OSError, match=rf"port {port} of 127.0.0.1 .* {flag}"):
                System(settings, FAKES)


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1", "fe80::1"])
def test_an_address_of_another_machine_is_not_called_a_busy_port(host: str) -> None:
    message = rf"^cannot listen on {host} \(.*\); choose another --host"
    for port in ("0", "8000"):
        words = ["--port", port, "--host", host]
        settings, _ = parse_command(COMMANDS["up"], "pdserve up", words)
        with pytest.raises(OSError, match=message):
            System(settings, FAKES)


def test_an_open_address_without_a_key_gets_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(tmp_path, "--host", "0.0.0.0")
    said = capsys.readouterr()
    assert "no --api-key is set" in said.err
    assert "0.0.0.0" not in said.out
    serve(tmp_path, "--host", "0.0.0.0", "--api-key", "k")
    assert "no --api-key is set" not in capsys.readouterr().err


def test_the_output_says_how_to_send_a_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["somewhere/pdserve"])
    monkeypatch.setenv("PATH", str(tmp_path))
    serve(tmp_path, "--api-key", "k")
    out = capsys.readouterr().out
    assert "chat page  http://127.0.0.1:0/\n" in out
    chat = "pdserve chat --url http://127.0.0.1:0 --api-key YOUR_KEY"
    assert f"  somewhere/{chat}\n" in out


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Run the real command in a separate process, over fake services."""
    started: list[subprocess.Popen[str]] = []

    def start(
        drain_s: float = 0, words: tuple[str, ...] = (), **entries: str
    ) -> subprocess.Popen[str]:
        code = (
            "if __name__ == '__main__':\n"  # its children import it, too
            "    import sys\n"
            "    from pdserve.cli.up import command\n"
            "    from pdserve.cli.main import main\n"
            f"    command.ENTRIES.update({ {**FAKES, **entries}!r})\n"
            f"    sys.exit(main(['up', '--port', '0', '--drain-s', '{drain_s}', *{words}]))\n"
        )
        script = tmp_path / "script.py"
        script.write_text(code)
        env = {**os.environ, "PYTHONPATH": str(SUPPORT), "TMPDIR": str(tmp_path)}
        made = subprocess.Popen(
            [sys.executable, script],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(made)
        return made

    yield start
    for made in started:
        with made:  # closes its pipes and waits
            made.kill()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return all its descendants, once it reports that it is ready."""
    assert process.stdout is not None
    assert any("pdserve is ready" in line for line in process.stdout)
    return psutil.Process(process.pid).children(recursive=True)


def test_json_output_has_an_object_in_every_line(
    process: Callable[..., subprocess.Popen[str]],
) -> None:
    up = process(words=("--log-format", "json"))
    assert up.stderr is not None
    lines = []
    for line in up.stderr:
        lines.append(json.loads(line))
        if "pdserve is ready" in lines[-1]["message"]:
            up.send_signal(signal.SIGTERM)
    out, _ = up.communicate(timeout=LIMIT_S)
    assert up.returncode == 0
    assert out == ""
    messages = [line["message"] for line in lines]
    assert "decode 0: loading 100%" in messages
    assert messages[-1] == "stopped"
    assert {line["component"] for line in lines} == {"up"}


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.extended),
        pytest.param(signal.SIGHUP, marks=pytest.mark.extended),
    ],
)
def test_a_signal_ends_every_process(
    process: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    up = process()
    children = family(up)
    assert len(children) >= 4
    assert list(tmp_path.glob(PREFIX + "*/*.sock"))
    up.send_signal(number)
    assert up.wait(LIMIT_S) == 0
    assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []
    assert list(tmp_path.glob(PREFIX + "*")) == []


def test_the_second_signal_ends_the_system_at_once(
    process: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    up = process(drain_s=10 * LIMIT_S, decode="fakes.service:stubborn_worker")
    children = family(up)
    up.send_signal(signal.SIGINT)
    assert up.stderr is not None
    assert any("stopping" in line for line in up.stderr)
    time.sleep(ECHO_S + 0.1)
    up.send_signal(signal.SIGINT)
    assert up.wait(LIMIT_S) == 1
    assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []
    assert list(tmp_path.glob(PREFIX + "*")) == []


def test_no_orphan_when_up_is_killed(process: Callable[..., subprocess.Popen[str]]) -> None:
    up = process()
    children = family(up)
    up.kill()
    assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []


def test_a_certificate_for_clients_goes_with_a_cluster_secret(tmp_path: Path) -> None:
    """The gateway presents it; the router's own port is then on loopback and presents none."""
    words = ("--tls-cert", "cert.pem", "--tls-key", "key.pem")
    ended = serve(tmp_path, "--cluster-secret", "s" * 32, *words)
    assert "bind" in ended.named("router").figures
