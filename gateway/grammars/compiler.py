"""Compiles the structures that clients ask for, so that no worker gets a grammar that does not.

It runs in the text processes: a grammar comes from strangers, and can take much time and memory.
"""

import json
import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import AddedToken

from pdserve.engine.api.sampling_bounds import GRAMMAR_LIMITS, MAX_GRAMMAR_BYTES
from pdserve.gateway.grammars.schemas import where
from pdserve.gateway.grammars.sources import ModelTokens, other_form, source, tag_source
from pdserve.gateway.requests.structure import Structure
from pdserve.gateway.text.errors import TextError
from pdserve.gateway.text.special import SpecialTokens
from pdserve.gateway.text.tokenizer import Tokenizer

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
_REGEX = re.compile(r"^\s*error: (.*)", re.MULTILINE)
_FORMAT = re.compile(r"Unknown format: (.*)")


class GrammarCompiler:
    """Compiles for the tokens of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError for a vocabulary that llguidance cannot use."""
        card = tokenizer.card
        self._words = _words(tokenizer)
        # Some that tokenizer.json does not flag are special to llguidance, too.
        special = {
            token: added
            for token, added in tokenizer.added.items()
            if token < card.vocab_size and self._words.is_special_token(token)
        }
        unflagged = {token: added for token, added in special.items() if not added.special}
        self._tokens = ModelTokens(
            SpecialTokens(
                {i: _flagged(added, added.lstrip, added.rstrip) for i, added in special.items()}
            ).split,
            SpecialTokens({i: _flagged(added) for i, added in unflagged.items()}).split,
            frozenset(special).difference(card.eos_ids),
        )

    def compile(self, structure: Structure) -> str:
        """Grammar.source of protos/common.proto. Raises TextError that names the field."""
        try:
            text = source(structure, self._tokens)
            size = len(text.encode())
            if size > MAX_GRAMMAR_BYTES:
                raise TextError(
                    f"the grammar is too large: {size} bytes, at most {MAX_GRAMMAR_BYTES}"
                )
        except (TextError, UnicodeEncodeError) as error:
            why = str(error) if isinstance(error, TextError) else "it is not valid Unicode"
            raise TextError(f"{structure.param}: {why}", structure.param) from None
        wrong = self._wrong(text)
        if wrong:
            raise self._error(structure, wrong)
        return text

    def _wrong(self, text: str) -> str:
        """Why no answer can follow a grammar; empty if one can."""
        matcher = LLMatcher(self._words, text, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return _plain(matcher.get_error())
        if matcher.is_stopped() and not matcher.is_accepting():
            return "no text matches it"
        return ""

    def _error(self, structure: Structure, wrong: str) -> TextError:
        """What is wrong, at the schema that has it."""
        param, schema = structure.param, None
        if structure.kind == "json_schema":
            schema = structure.value
        elif structure.kind == "structural_tag":
            for tag in structure.value["structures"]:
                its = self._wrong(tag_source(tag, structure))
                if its:
                    wrong, schema, param = its, tag["schema"], tag.get("param", param)
                    break
            else:
                other = other_form(structure)
                its = self._wrong(source(other, self._tokens)) if other else ""
                if other is not None and its:
                    return self._error(other, its)
        return TextError(f"{param}: {_at(schema, wrong)}{wrong}", param)


def _plain(message: str) -> str:
    """An error of llguidance without the grammar that it quotes in further lines."""
    if message.startswith("NoExtension"):
        return "no text matches it"
    if found := _REGEX.search(message):
        return f"invalid regular expression: {found[1]}"
    return message.partition("\n")[0]


def _at(schema: object, wrong: str) -> str:
    """Where in a schema the keyword is that llguidance does not have, as a beginning of the
    message; empty if it is not known."""
    if found := _UNIMPLEMENTED.search(wrong):
        path = where(schema, json.loads(found[1])[0])
    elif found := _FORMAT.search(wrong):
        path = where(schema, "format", found[1])
    elif wrong.startswith("oneOf"):
        path = where(schema, "oneOf")
    else:
        path = ""
    return f"at {path}: " if path else ""


def _flagged(added: AddedToken, lstrip: bool = False, rstrip: bool = False) -> AddedToken:
    return AddedToken(added.content, lstrip=lstrip, rstrip=rstrip, special=True)


def _words(tokenizer: Tokenizer) -> LLTokenizer:
    """The tokens as a worker has them. Raises ValueError."""
    card = tokenizer.card
    if not card.eos_ids:
        raise ValueError("the model has no token that ends a text")
    text, eos = tokenizer.file.decode(), list(card.eos_ids)
    try:
        return LLTokenizer(text, n_vocab=card.vocab_size, eos_token=eos)
    except ValueError as error:
        if "too small" not in str(error):
            raise
        return LLTokenizer(text, eos_token=eos)  # it has more ids than the model
