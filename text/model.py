"""A model's tokenizer, chat template and generation defaults, loaded by the fork servers of a
gateway and by the Python API."""

from typing import TYPE_CHECKING

from pdserve.text.errors import TextError, UnsupportedTokenizer
from pdserve.text.generation_config import GenerationDefaults
from pdserve.text.reasoning import reasoning_family_of
from pdserve.text.request import Structure
from pdserve.text.templates import ChatTemplate
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import Tokenizer
from pdserve.text.tool_parsers import tool_family_of

if TYPE_CHECKING:
    from pdserve.text.structured_output.compiler import GrammarCompiler

MAX_REASON = 200  # characters of the reason why a model supports no grammars


class TextModel:
    """The loaded tokenizer, chat template and generation defaults of a model."""

    def __init__(self, model_info: TextModelInfo, files: dict[str, bytes]) -> None:
        """Raises UnsupportedTokenizer if a file is unusable; BaseException if a Rust library
        panics."""
        self.tokenizer = Tokenizer(files["tokenizer"], model_info)
        self.template: ChatTemplate | None = None
        self._family = self.reasoning_parser = ""
        if files["template"]:
            try:
                source = files["template"].decode()
            except UnicodeDecodeError:
                raise UnsupportedTokenizer("its chat template is not valid UTF-8") from None
            self.template = ChatTemplate(source, self.tokenizer)
            self._family = tool_family_of(source)
            self.reasoning_parser = reasoning_family_of(source)
        self.defaults = GenerationDefaults.from_json(files["generation"] or b"{}")
        self._compiler: GrammarCompiler | None = None
        self._grammar_error = ""

    @property
    def tool_parser(self) -> str:
        """The name of the template's tool family; empty if the template shows no tools."""
        return self._family if self.template is not None and self.template.shows_tools else ""

    @property
    def has_loaded_grammars(self) -> bool:
        return self._compiler is not None or self._grammar_error != ""

    def load_grammars(self) -> None:
        """Load the grammar compiler once: about 3 us and 2 KB per token of the vocabulary. In a
        gateway, only the worker that compiles grammars calls it."""
        if self.has_loaded_grammars:
            return
        # Imports llguidance, which is slow.
        from pdserve.text.structured_output.compiler import GrammarCompiler

        try:
            self._compiler = GrammarCompiler(self.tokenizer)
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also a panic of llguidance; the model writes free text
            self._grammar_error = (
                f"this model does not support structured output: {str(error)[:MAX_REASON]}"
            )

    def grammar(self, structure: Structure) -> str:
        """Compile a structure. Raises TextError if it or the model is unsupported."""
        self.load_grammars()
        if self._compiler is None:
            raise TextError(self._grammar_error, structure.param)
        return self._compiler.compile(structure)
