"""What the operator sets in place of the models' own files: a chat template, sampling defaults and
the maximum length of answers."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from pydantic_core import from_json

from pdserve.gateway.settings import GatewaySettings, PromptSettings
from pdserve.text.generation_config import GenerationDefaults, OperatorConfig, operator_config

CONFIG_FILE = "generation_config.json"
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelOverrides:
    """Overrides for all models of a gateway.

    template: source of the chat template; None: each model's own. base: sampling defaults in place
    of those that a model recommends; None: the model's. override: defaults that replace individual
    values of these. max_new_tokens: maximum of every request's max_tokens; None: no maximum.
    """

    template: bytes | None = None
    base: GenerationDefaults | None = None
    override: GenerationDefaults = field(default_factory=GenerationDefaults)
    max_new_tokens: int | None = None

    def defaults(self, recommended: GenerationDefaults) -> GenerationDefaults:
        """Return the sampling defaults of a model that recommends these."""
        values = {item.name: getattr(self.override, item.name) for item in fields(self.override)}
        base = recommended if self.base is None else self.base
        return replace(base, **{name: value for name, value in values.items() if value is not None})


NO_OVERRIDES = ModelOverrides()


def read_template_override(settings: PromptSettings) -> bytes | None:
    """Return the chat template of the options; None without one. Raises ValueError that names the
    option if the file cannot be used."""
    if not settings.chat_template:
        return None
    from pdserve.text.templates import read_template  # imports jinja2, which few gateways need

    try:
        return read_template(settings.chat_template)
    except ValueError as error:
        raise ValueError(f"--chat-template {error}") from None


def read_overrides(settings: GatewaySettings) -> ModelOverrides:
    """Return the overrides that the options configure. Raises ValueError that names the option if a
    file or a value cannot be used."""
    base = _base_config(settings.generation_config)
    override = _inline_config(settings.override_generation_config)
    caps = (override.max_new_tokens, base.max_new_tokens if base else None)
    return ModelOverrides(
        template=read_template_override(settings),
        base=base.defaults if base else None,
        override=override.defaults,
        max_new_tokens=next((cap for cap in caps if cap is not None), None),
    )


def _base_config(source: str) -> OperatorConfig | None:
    """Return the config of --generation-config; None for "auto" or empty, the models' own."""
    if source in ("", "auto"):
        return None
    if source in ("none", "vllm"):
        return OperatorConfig()
    path = Path(source)
    path = path / CONFIG_FILE if path.is_dir() else path
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ValueError(f"the file has more than {MAX_CONFIG_BYTES} bytes")
        return operator_config(_json_object(content))
    except OSError as error:
        raise ValueError(f"--generation-config {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--generation-config {path}: {error}") from None


def _inline_config(text: str) -> OperatorConfig:
    """Return the config of --override-generation-config, whose names must all be known."""
    try:
        return operator_config(_json_object(text), strict=True) if text else OperatorConfig()
    except ValueError as error:
        raise ValueError(f"--override-generation-config: {error}") from None


def _json_object(text: str | bytes) -> dict[str, object]:
    try:
        value = from_json(text, allow_inf_nan=False)  # bounds the depth
    except ValueError:
        raise ValueError("not valid JSON") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
