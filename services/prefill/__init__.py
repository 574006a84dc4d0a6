"""The prefill worker: computes the KV of prompts and sends it."""

from pdserve.services.prefill.servicer import run
