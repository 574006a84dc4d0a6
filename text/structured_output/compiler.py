"""Compiles the structures of requests to grammars, and checks that these can be enforced, so that
decode workers get only grammars that compile.

A gateway runs it in a tokenizer worker, because clients' grammars are untrusted and can take much
time and memory; the Python API runs it in its own process, without limits.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from tokenizers import AddedToken

from pdserve.engine.api import GRAMMAR_LIMITS, MAX_GRAMMAR_BYTES, MAX_STRUCTURE_VALUES
from pdserve.engine.api.grammar_tokenizer import make_tokenizer
from pdserve.text.errors import TextError
from pdserve.text.request import Structure
from pdserve.text.structured_output.schemas import enforceable, fault, without_faults
from pdserve.text.structured_output.sources import (
    ModelTokens,
    is_lenient,
    other_form,
    source,
    tag_source,
)
from pdserve.text.tokenizer.tokenizer import SpecialTokens, Tokenizer

_REGEX = re.compile(r"^\s*error: (.*)", re.MULTILINE)


MAX_PARTS = 1024  # results kept of short parts of schemas, which often repeat
MAX_PART_CHARS = 256


class GrammarCompiler:
    """Compiles structures (JSON schemas, regular expressions and others) to grammars for the tokens
    of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Prepare for the model of this tokenizer. Raises ValueError if llguidance does not support
        its vocabulary."""
        model_info = tokenizer.model_info
        self._problem_of_part = lru_cache(MAX_PARTS)(self._problem)
        self._tokenizer = make_tokenizer(tokenizer.file, model_info.vocab_size, model_info.eos_ids)
        # llguidance also treats some tokens as special that tokenizer.json does not flag.
        special = {
            token: added
            for token, added in tokenizer.added.items()
            if token < model_info.vocab_size and self._tokenizer.is_special_token(token)
        }
        unflagged = {token: added for token, added in special.items() if not added.special}
        self._tokens = ModelTokens(
            SpecialTokens(
                {i: _flagged(added, added.lstrip, added.rstrip) for i, added in special.items()}
            ).split,
            SpecialTokens({i: _flagged(added) for i, added in unflagged.items()}).split,
            frozenset(special).difference(model_info.eos_ids),
        )

    def compile(self, structure: Structure) -> str:
        """Compile a structure to the text of Grammar.source (protos/common.proto). If that fails,
        tries again without parts of schemas that need not be enforced. Raises TextError, which
        names the request's field and the faulty part."""
        text = self._source(structure)
        problem = self._problem(text)
        if problem and (relaxed := self._relaxed(structure)) != structure:
            structure, text = relaxed, self._source(relaxed)
            problem = self._problem(text)
        if problem:
            raise self._error(structure, problem)
        return text

    def _source(self, structure: Structure) -> str:
        """Convert a structure to a grammar without compiling it. Raises TextError, which names the
        request's field, if it is invalid or exceeds MAX_GRAMMAR_BYTES."""
        try:
            text = source(structure, self._tokens)
            size = len(text.encode())
            if size > MAX_GRAMMAR_BYTES:
                raise TextError(
                    f"the grammar is too large: {size} bytes; the limit is {MAX_GRAMMAR_BYTES}"
                )
        except (TextError, UnicodeEncodeError) as error:
            reason = str(error) if isinstance(error, TextError) else "it is not valid Unicode"
            raise TextError(f"{structure.param}: {reason}", structure.param) from None
        return text

    def _relaxed(self, structure: Structure) -> Structure:
        """Return the structure without those parts of its schemas that cannot be compiled and need
        not be enforced."""
        value = structure.value
        if structure.kind == "json_schema":
            return replace(structure, value=self._relaxed_schema(value, structure.lenient))
        if structure.kind == "structural_tag":
            tags = [
                {**tag, "schema": self._relaxed_schema(tag["schema"], is_lenient(tag, structure))}
                for tag in value["structures"]
            ]
            relaxed = {**value, "structures": tags}
            if (other := other_form(structure)) is not None:
                relaxed["or"] = asdict(self._relaxed(other))
            return replace(structure, value=relaxed)
        return structure

    def _relaxed_schema(self, schema: Any, lenient: bool) -> Any:
        schema = enforceable(schema, MAX_STRUCTURE_VALUES)
        return without_faults(schema, self._reason, lenient=lenient)

    def _reason(self, schema: Mapping[str, Any], lenient: bool = True) -> str:
        """Return the reason why a schema by itself cannot be compiled; "" if it can."""
        guided = {**schema, "x-guidance": {"lenient": lenient}}
        text = json.dumps({"grammars": [{"json_schema": guided}]})
        return self._problem_of_part(text) if len(text) <= MAX_PART_CHARS else self._problem(text)

    def _problem(self, text: str) -> str:
        """Compile a grammar; return the reason why it does not compile or why no text can match it;
        "" if all is well."""
        matcher = LLMatcher(
            self._tokenizer, text, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS)
        )
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return _plain(matcher.get_error())
        if matcher.is_stopped() and not matcher.is_accepting():
            return "no text matches it"
        return ""

    def _error(self, structure: Structure, problem: str) -> TextError:
        """Build the error for a structure that does not compile, with the path of the faulty part
        of the schema."""
        param, path, schema = structure.param, structure.path or structure.param, None
        lenient, is_hidden = structure.lenient, False
        if structure.kind == "json_schema":
            schema = structure.value
        elif structure.kind == "structural_tag":
            for tag in structure.value["structures"]:
                tag_problem = self._problem(tag_source(tag, structure))
                if tag_problem:
                    problem, schema, param = tag_problem, tag["schema"], tag.get("param", param)
                    path, is_hidden = tag.get("path", param), tag.get("is_hidden", False)
                    lenient = is_lenient(tag, structure)
                    break
            else:
                other = other_form(structure)
                tag_problem = self._problem(source(other, self._tokens)) if other else ""
                if other is not None and tag_problem:
                    return self._error(other, tag_problem)
        schema = enforceable(schema, MAX_STRUCTURE_VALUES)
        fault_path, reason = fault(schema, partial(self._reason, lenient=lenient))
        return TextError(f"{path}{'' if is_hidden else fault_path}: {reason or problem}", param)


def _plain(message: str) -> str:
    """Shorten an error text of llguidance to its reason, without the grammar that it quotes."""
    if message.startswith("NoExtension"):
        return "no text matches it"
    if match := _REGEX.search(message):
        return f"invalid regular expression: {match[1]}"
    return message.partition("\n")[0]


def _flagged(added: AddedToken, lstrip: bool = False, rstrip: bool = False) -> AddedToken:
    return AddedToken(added.content, lstrip=lstrip, rstrip=rstrip, special=True)
