"""Compiles the structures of requests, so that workers get only grammars that compile.

Runs in the text processes, because grammars are untrusted and can take much time and memory.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from tokenizers import AddedToken

from pdserve.engine.api.grammar_tokenizer import make_tokenizer
from pdserve.engine.api.sampling_bounds import (
    GRAMMAR_LIMITS,
    MAX_GRAMMAR_BYTES,
    MAX_STRUCTURE_VALUES,
)
from pdserve.gateway.grammars.schemas import enforceable, fault, without_faults
from pdserve.gateway.grammars.sources import (
    ModelTokens,
    is_lenient,
    other_form,
    source,
    tag_source,
)
from pdserve.gateway.requests.structure import Structure
from pdserve.gateway.text.errors import TextError
from pdserve.gateway.text.special import SpecialTokens
from pdserve.gateway.text.tokenizer import Tokenizer

_REGEX = re.compile(r"^\s*error: (.*)", re.MULTILINE)


MAX_PARTS = 1024  # results kept of short parts of schemas, which often repeat
MAX_PART_CHARS = 256


class GrammarCompiler:
    """Compiles structures to grammars for the tokens of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError if llguidance does not support the vocabulary."""
        card = tokenizer.card
        self._wrong_part = lru_cache(MAX_PARTS)(self._wrong)
        self._words = make_tokenizer(tokenizer.file, card.vocab_size, card.eos_ids)
        # llguidance also treats some tokens as special that tokenizer.json does not flag.
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
        """Compile to Grammar.source of protos/common.proto. Raises TextError with the field."""
        text = self._source(structure)
        wrong = self._wrong(text)
        if wrong and (eased := self._eased(structure)) != structure:
            structure, text = eased, self._source(eased)
            wrong = self._wrong(text)
        if wrong:
            raise self._error(structure, wrong)
        return text

    def _source(self, structure: Structure) -> str:
        """Return the grammar of a structure. Raises TextError that names the field."""
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
        return text

    def _eased(self, structure: Structure) -> Structure:
        """Drop parts of schemas that cannot be compiled and need not be enforced."""
        value = structure.value
        if structure.kind == "json_schema":
            return replace(structure, value=self._eased_schema(value, structure.lenient))
        if structure.kind == "structural_tag":
            tags = [
                {**tag, "schema": self._eased_schema(tag["schema"], is_lenient(tag, structure))}
                for tag in value["structures"]
            ]
            eased = {**value, "structures": tags}
            if (other := other_form(structure)) is not None:
                eased["or"] = asdict(self._eased(other))
            return replace(structure, value=eased)
        return structure

    def _eased_schema(self, schema: Any, lenient: bool) -> Any:
        schema = enforceable(schema, MAX_STRUCTURE_VALUES)
        return without_faults(schema, self._why, lenient=lenient)

    def _why(self, schema: Mapping[str, Any], lenient: bool = True) -> str:
        """Return why a schema alone cannot be compiled; empty if it can."""
        guided = {**schema, "x-guidance": {"lenient": lenient}}
        text = json.dumps({"grammars": [{"json_schema": guided}]})
        return self._wrong_part(text) if len(text) <= MAX_PART_CHARS else self._wrong(text)

    def _wrong(self, text: str) -> str:
        """Return why no answer can match a grammar; empty if one can."""
        matcher = LLMatcher(self._words, text, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return _plain(matcher.get_error())
        if matcher.is_stopped() and not matcher.is_accepting():
            return "no text matches it"
        return ""

    def _error(self, structure: Structure, wrong: str) -> TextError:
        """Return the error with the path of the faulty part of the schema."""
        param, path, schema = structure.param, structure.path or structure.param, None
        lenient, is_hidden = structure.lenient, False
        if structure.kind == "json_schema":
            schema = structure.value
        elif structure.kind == "structural_tag":
            for tag in structure.value["structures"]:
                its = self._wrong(tag_source(tag, structure))
                if its:
                    wrong, schema, param = its, tag["schema"], tag.get("param", param)
                    path, is_hidden = tag.get("path", param), tag.get("is_hidden", False)
                    lenient = is_lenient(tag, structure)
                    break
            else:
                other = other_form(structure)
                its = self._wrong(source(other, self._tokens)) if other else ""
                if other is not None and its:
                    return self._error(other, its)
        schema = enforceable(schema, MAX_STRUCTURE_VALUES)
        at, reason = fault(schema, partial(self._why, lenient=lenient))
        return TextError(f"{path}{'' if is_hidden else at}: {reason or wrong}", param)


def _plain(message: str) -> str:
    """Return an error of llguidance without the grammar that it quotes in further lines."""
    if message.startswith("NoExtension"):
        return "no text matches it"
    if found := _REGEX.search(message):
        return f"invalid regular expression: {found[1]}"
    return message.partition("\n")[0]


def _flagged(added: AddedToken, lstrip: bool = False, rstrip: bool = False) -> AddedToken:
    return AddedToken(added.content, lstrip=lstrip, rstrip=rstrip, special=True)
