"""Tokenizer workers: processes that render chat templates, tokenize prompts and compile grammars,
so that this work does not block the gateway's event loop."""

from pdserve.text.workers.constraints import prepare_constraints
from pdserve.text.workers.messages import WorkerLimits
from pdserve.text.workers.pool import LoadedTokenizer, TokenizerPool
