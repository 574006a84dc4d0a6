"""Code that is forbidden in the whole tree: running data as code, fetching URLs, listening on
every network.
"""

import ast
import ipaddress
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from google.protobuf.descriptor import Descriptor

from pdserve.cli.commands import COMMANDS
from pdserve.cli.options.options import Option
from pdserve.gateway.anthropic.request_models import MessagesBody
from pdserve.gateway.openai.request_models import schema
from pdserve.gateway.openai.responses.request_model import ResponsesBody
from pdserve.protos import fleet_pb2, router_pb2, text_pb2

ROOT = Path(__file__).parents[1]
FOLDERS = ("text", "gateway", "services", "cli", "llm", "engine", "kernels", ".src", "tools")

# Each runs the code in its input, or makes any object of it.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "torch.load", "torch.package", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
    "yaml.full_load", "os.system", "os.popen", "builtins.eval", "builtins.exec",
}  # fmt: skip
ATTRIBUTE_NAMES = {name.rpartition(".")[2] for name in ATTRIBUTES}
FLAGS = {"shell", "allow_pickle", "trust_remote_code"}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield path


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(), str(path))))


def dangers(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, what) of each node that would run data as code."""
    for node in nodes:
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in found if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if name.split(".")[0] in MODULES or name in ATTRIBUTES:
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute):
            if node.attr in ATTRIBUTE_NAMES and ast.unparse(node) in ATTRIBUTES:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
                yield node.lineno, node.func.id
            for keyword in node.keywords:
                refused = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in FLAGS and not refused:
                    yield node.lineno, str(keyword.arg)


DANGEROUS = (
    "import pickle", "import marshal as m", "from pickle import loads", "torch.load(path)",
    "from torch import load", "eval(text)", "exec(text)", "yaml.load(text)",
    "run(text, shell=True)", "run(text, shell=wanted)", "numpy.load(f, allow_pickle=True)",
    "from_pretrained(name, trust_remote_code=True)", "os.system(text)",
)  # fmt: skip


def test_dangerous_code_is_found() -> None:
    assert [line for line in DANGEROUS if not list(dangers(ast.walk(ast.parse(line))))] == []


def test_no_data_is_run_as_code() -> None:
    paths = list(sources(*FOLDERS))
    assert len(paths) > 200
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in paths
        for line, what in dangers(nodes_of(path))
    ]
    assert found == []


CLIENTS = ("urllib.request", "http.client", "httpx", "httpx2", "requests", "aiohttp", "mcp",
           "huggingface_hub")  # fmt: skip
MAY_FETCH = {  # from MCP servers that an operator names, and from the API server of a pod
    "gateway/mcp/connection.py",
    "services/common/kubernetes_api.py",
}


def imports_a_client(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return False
    return any(f"{name}.".startswith(f"{client}.") for name in names for client in CLIENTS)


def test_no_server_module_can_fetch_a_url() -> None:
    services = ("common", "router", "picker", "worker", "prefill", "decode")
    fetching = {
        str(path.relative_to(ROOT))
        for path in sources("text", "gateway", *(f"services/{name}" for name in services))
        if any(map(imports_a_client, nodes_of(path)))
    }
    assert fetching == MAY_FETCH


def fields(message: Descriptor) -> set[str]:
    """Return names of all fields of a message and of those within it."""
    inner = [field.message_type for field in message.fields if field.message_type]
    return {field.name for field in message.fields}.union(*map(fields, inner))


def test_no_client_can_name_an_address() -> None:
    """Neither gRPC nor HTTP has such a field; workers, which the cluster trusts, name their own
    addresses.
    """
    places = {"address", "host", "port", "url", "uri", "endpoint", "router", "worker", "peer"}

    def named(names: Iterable[str]) -> set[str]:
        return {name for name in names if places & set(name.lower().split("_"))}

    requests = (
        text_pb2.ChatRequest,
        text_pb2.CompleteRequest,
        router_pb2.GenerateRequest,
        router_pb2.ListModelsRequest,
    )
    bodies = (
        schema.ChatBody,
        schema.CompletionBody,
        schema.TokenizeBody,
        schema.DetokenizeBody,
        ResponsesBody,
        MessagesBody,
    )
    for request in requests:
        assert named(fields(request.DESCRIPTOR)) == set()
    for body in bodies:
        within = body.model_json_schema().get("$defs", {}).values()
        names = set(body.model_fields).union(*(part.get("properties", {}) for part in within))
        assert named(names) == set()
    assert named(fields(fleet_pb2.WorkerReport.DESCRIPTOR)) >= {"address", "data_address"}


def all_options() -> dict[str, list[Option]]:
    """Return the options of every command."""
    return {
        name: [option for section in command.sections() for option in section.options]
        for name, command in COMMANDS.items()
    }


def test_every_service_binds_to_loopback_by_default() -> None:
    checked = set()
    for command, options in all_options().items():
        for option in options:
            if option.name == "host":
                host = option.default
            elif option.name.endswith("bind") and option.default:
                host, _, _ = option.default.rpartition(":")
            else:
                continue
            assert ipaddress.ip_address(host).is_loopback, f"{command} {option.flag}"
            checked.add(option.name)
    assert checked == {"host", "bind", "data_bind"}


def test_the_program_names_no_address_of_all_interfaces() -> None:
    wildcards = re.compile(r"(0\.0\.0\.0|\[?::\]?)(:\d+)?|:\d+")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in sources(*FOLDERS[:-1])
        for node in nodes_of(path)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and wildcards.fullmatch(node.value)
    ]
    assert found == []


def test_every_option_is_read() -> None:
    read = {
        node.attr
        for path in sources(*FOLDERS[:6])
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    for command, options in all_options().items():
        unread = [option.flag for option in options if option.field not in read]
        assert unread == [], command
