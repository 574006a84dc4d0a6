"""Access rights: the tables of docs/security.md, and a running system with certificates."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import psutil
import pytest
from oracles.rights_tables import METHODS, REFUSED, ROUTES, status
from systems.eventually import wait_until
from systems.fleet import Fleet
from systems.listening import listening

from pdserve.gateway.grpc_api import TEXT_METHODS
from pdserve.protos import common_pb2, fleet_pb2, router_pb2, text_pb2, worker_pb2
from pdserve.protos.text_pb2_grpc import TextStub
from pdserve.services.common.auth.certificates import EVERY_ROLE, RIGHTS, Role
from pdserve.services.common.server import HEALTH_CHECK
from pdserve.services.picker.main import SERVICE as PICKER
from pdserve.services.router.servicer import OPEN_METHODS

KEY = {"authorization": "Bearer KEY"}
OTHERS = {"POST", "PUT", "DELETE", "PATCH"}
# 404 instead of 405: OpenAI has the first route, which is not offered here; the others match the
# route of a response by its id.
NOT_OFFERED = {
    ("DELETE", "/v1/models/{name}"),
    ("DELETE", "/v1/responses/input_tokens"),
    ("DELETE", "/responses/input_tokens"),
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    keys = ("--api-key", "KEY", "--api-key", "OTHER-KEY", "--admin-api-key", "ADMIN-KEY")
    with Fleet(*keys, certificates=True) as fleet:
        yield fleet


def test_the_table_lists_the_routes_of_the_application() -> None:
    from pdserve.gateway.anthropic import AnthropicApi
    from pdserve.gateway.http.admin import add_admin
    from pdserve.gateway.http.app import create_routes
    from pdserve.gateway.http.docs import add_docs
    from pdserve.gateway.metrics import GatewayProcesses
    from pdserve.gateway.ollama import OllamaApi
    from pdserve.gateway.openai import OpenAiApi
    from pdserve.gateway.openai.stored.parts import StoredRoutes
    from pdserve.gateway.rerank import RerankApi
    from pdserve.gateway.web import add_fleet, add_pages

    none: Any = None
    processes = GatewayProcesses()
    service: Any = SimpleNamespace(count=None, upstream=None, clock=None, processes=processes)
    stored = StoredRoutes(none, none, none, lambda: None)
    apis = [
        AnthropicApi(none, none, none),
        RerankApi(none, none),
        OllamaApi(none, none, none),
        OpenAiApi(service, none, none, stored=stored),
    ]
    app = create_routes(apis, service, none)
    add_fleet(app, service)
    add_pages(app, "")
    add_admin(app, none, lambda: None)
    add_docs(app, apis, "", keys=True)
    there = {
        f"{method} {route.path.replace(':path', '')}"  # type: ignore[attr-defined]
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    assert {route for route, _ in ROUTES} == there


def test_the_table_lists_the_methods_of_the_protos() -> None:
    there = {
        f"{service.full_name}/{method.name}"
        for module in (common_pb2, fleet_pb2, router_pb2, text_pb2, worker_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    roles = {method: who for method, _, who in METHODS}
    own_methods = {method for method in roles if method.startswith("pdserve.")}
    assert own_methods == there
    assert {method.removeprefix("/") for method in RIGHTS} <= set(roles)
    for method, who in roles.items():
        allowed = RIGHTS.get(f"/{method}")
        if allowed == EVERY_ROLE:
            assert who.split(";")[0] == "every role"
        elif allowed is not None:
            assert set(who.split(", ")) == set(allowed)
        elif f"/{method}" in TEXT_METHODS:
            assert who == "client"
        elif f"/{method}" in OPEN_METHODS:
            assert who == "client, gateway"
        else:
            assert f"/{method}" == HEALTH_CHECK or method == f"{PICKER}/Process"
            assert re.split("[;:]", who)[0] == "everybody"


def test_a_route_requires_what_the_table_says(fleet: Fleet, subtests: pytest.Subtests) -> None:
    with httpx.Client(follow_redirects=True) as http:
        for route, who in ROUTES:
            with subtests.test(route):
                check_route(http, fleet.url, route, who)


def check_route(http: httpx.Client, server: str, route: str, who: str) -> None:
    method, _, path = route.partition(" ")
    model = "SmolLM2-135M-Instruct"
    names = {"/v1/models/{name}": model, "/models/{name}": model, "/web/{name}": "chat.js"}
    url = server + re.sub(r"{.*}", names.get(path, "none"), path)
    without = http.request(method, url)
    with_key = http.request(method, url, headers=KEY)
    wrong = http.request(method, url, headers={"authorization": "Bearer KEX"})
    named = "{" in path and path not in names  # the named object does not exist
    if who == "admin":
        assert with_key.status_code == 401
    else:
        assert with_key.status_code in ((404,) if named else (200, 415))
    assert without.status_code == wrong.status_code == (200 if who == "everybody" else 401)
    taken = {route.split()[0] for route, _ in ROUTES if route.split()[1] == path}
    opened = 405 if who in ("everybody", "admin") else 401
    for other in OTHERS - taken:
        expected = 404 if (other, path) in NOT_OFFERED else 405
        assert http.request(other, url, headers=KEY).status_code == expected
        assert http.request(other, url).status_code == opened


def test_paths_outside_the_table_do_not_exist(fleet: Fleet) -> None:
    for path in (
        "/web",
        "/web/x",
        "/redoc",
        "/docs/x",
        "/v1",
        "/v1/images",
        "//metrics",
        "/..%2fmetrics",
    ):
        assert httpx.get(fleet.url + path).status_code == 401
        assert httpx.get(fleet.url + path, headers=KEY).status_code == 404


def test_a_stranger_can_call_only_methods_open_to_everybody(
    fleet: Fleet, subtests: pytest.Subtests
) -> None:
    """Tries the public ports and those of the cluster, where TLS refuses the connection."""
    addresses = {"gateway": fleet.grpc, "router": fleet.router}
    for method, at, who in METHODS:
        with subtests.test(method):
            places = addresses if at == "all" else {n: a for n, a in addresses.items() if n in at}
            for address in places.values():
                with grpc.insecure_channel(address) as channel:
                    found = status(channel, method)
                    keyed = status(channel, method, **KEY)
                if who.startswith("everybody"):
                    assert found is grpc.StatusCode.OK
                else:
                    assert found in REFUSED
                if who.startswith("client"):
                    assert keyed not in REFUSED
                elif not who.startswith("everybody"):
                    assert keyed in REFUSED


def test_cluster_ports_accept_only_tls(fleet: Fleet) -> None:
    addresses = workers(fleet)
    assert len(addresses) == 2
    for address in addresses:
        with grpc.insecure_channel(address) as channel:
            for method in (*RIGHTS, "/grpc.health.v1.Health/Check"):
                assert status(channel, method.lstrip("/")) is grpc.StatusCode.UNAVAILABLE


def workers(fleet: Fleet) -> list[str]:
    """Return the workers' addresses from the gateway's metrics."""
    text = httpx.get(f"{fleet.url}/metrics", headers=KEY).raise_for_status().text
    return sorted(set(re.findall(r'worker="([\d.:]+)"', text)))


def test_no_other_port_is_open(fleet: Fleet) -> None:
    """Exceptions are the ports tested above, and the KV port and unix socket, which test_ports.py
    covers."""
    known = {
        Role.GATEWAY: {fleet.url.removeprefix("http://"), fleet.grpc},
        Role.ROUTER: {fleet.router},
        Role.PREFILL: set(),
        Role.DECODE: set(),
    }
    left = {}
    for role, addresses in known.items():
        (pid,) = fleet.pids(role)
        found = listening(psutil.Process(pid))
        assert found >= addresses
        left[role] = found - addresses
    assert [len(left[role]) for role in Role] == [0, 1, 1, 3]
    cluster = {address for address in workers(fleet) if address in left[Role.DECODE]}
    assert left[Role.PREFILL] | cluster == set(workers(fleet))
    (path,) = (found for found in left[Role.DECODE] if found.endswith(".sock"))
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    assert Path(path).stat().st_mode & 0o777 == 0o600
    (inside,) = left[Role.ROUTER]
    with grpc.insecure_channel(inside) as channel:
        code = status(channel, "grpc.health.v1.Health/Check")
        assert code is grpc.StatusCode.UNAVAILABLE, "the port must accept only TLS"
    addresses = set().union(*left.values(), *known.values()) - {path}
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    parent = psutil.Process(fleet.process.pid)
    assert listening(parent) == set().union(*left.values(), *known.values())


def test_remote_prefill_works_with_certificates(fleet: Fleet) -> None:
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "one two three " * 300, "max_tokens": 4}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=KEY, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4
    text = httpx.get(f"{fleet.url}/metrics", headers=KEY).text
    (remote,) = re.findall(r'pdserve_prefill_requests_total{where="remote"} (\S+)', text)
    assert float(remote) == 1


def test_prompts_cached_for_one_key_are_not_visible_to_another(fleet: Fleet) -> None:
    """Checks HTTP and gRPC. The key that cached a prompt does get cache hits."""
    prompt = "once upon a time " * 20

    def http(key: str) -> int:
        body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 1}
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=60)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def rpc(key: str) -> int:
        request = text_pb2.CompleteRequest(prompt=prompt)
        request.options.params.max_tokens = 1
        with grpc.insecure_channel(fleet.grpc) as channel:
            metadata = (("authorization", f"Bearer {key}"),)
            chunks = list(TextStub(channel).Complete(request, metadata=metadata, timeout=60))
        return int(chunks[-1].usage.cached_tokens)

    assert http("KEY") == 0
    assert rpc("OTHER-KEY") == 0
    assert http("KEY") > 0
    assert rpc("KEY") > 0
    prompt = "in a land far away " * 20
    assert rpc("KEY") == 0
    assert http("OTHER-KEY") == 0


def test_a_request_has_one_line_in_the_log_of_all_processes(fleet: Fleet) -> None:
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "a b c " * 300, "max_tokens": 4}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=KEY, timeout=60)
    id_ = answer.json()["id"]
    wait_until(lambda: id_ in fleet.log(), "the line of the request")
    time.sleep(0.5)  # a worker could still write one
    (line,) = (line for line in fleet.log().splitlines() if id_ in line)
    assert "POST /v1/completions 200 model=" in line
    assert " key=" in line


def test_no_command_line_contains_a_secret(fleet: Fleet) -> None:
    parent = psutil.Process(fleet.process.pid)
    lines = [" ".join(p.cmdline()) for p in (parent, *parent.children(recursive=True))]
    assert "--api-key ***" in lines[0]
    assert not any("KEY" in line for line in lines)
    for role in Role:
        assert any(line.startswith(f"pdserve {role}") for line in lines), role


def test_the_admin_key_ends_the_system(fleet: Fleet) -> None:
    """The last test of the file, since the system ends."""
    children = psutil.Process(fleet.process.pid).children(recursive=True)
    reply = httpx.post(f"{fleet.url}/shutdown", headers={"authorization": "Bearer ADMIN-KEY"})
    assert (reply.status_code, reply.json()) == (200, {"status": "shutting down"})
    assert fleet.process.wait(60) == 0
    assert fleet.log().rstrip().endswith("stopped")
    assert psutil.wait_procs(children, timeout=10)[1] == []
