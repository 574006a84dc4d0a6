"""Tokenizer workers: processes that render chat templates, tokenize prompts and compile grammars,
so that none of these blocks the gateway."""

from pdserve.text.workers.constraints import prepare_constraints
from pdserve.text.workers.messages import WorkerLimits
from pdserve.text.workers.pool import LoadedTokenizer, TokenizerPool
