"""The HTTP and gRPC gateway: the APIs of OpenAI, Anthropic, Ollama and Cohere over one Service,
and its client of the router."""

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.caller import Caller
from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.main import make_text_limits, run
from pdserve.gateway.pooling import PreparedInputs
from pdserve.gateway.prepared_completion import PreparedCompletion
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.service import Records, Service, ServiceOptions
from pdserve.gateway.settings import GatewaySettings, GatewayWorker, PromptSettings, worker_name
