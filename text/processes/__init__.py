"""Tokenizer workers: processes that render templates and tokenize, so that no text of a client
blocks the gateway."""

from pdserve.text.processes.constraints import prepared
from pdserve.text.processes.messages import TextLimits
from pdserve.text.processes.pool import LoadedText, TextPool
