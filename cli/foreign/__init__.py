"""Options, variables and commands of other servers (vLLM, SGLang, llama.cpp, Ollama, vLLM.rs,
candle-vllm, vllm-lite): one table of what each is in pdserve, and the translation by it.
"""

from pdserve.cli.foreign.lookup import explain_key, find_entry, notes_on, similar_names
from pdserve.cli.foreign.table import COMMANDS, NO_COMMANDS
from pdserve.cli.foreign.translate import before_separator, names_model, translate
