"""Converts a structure to a grammar for llguidance: a JSON list of Lark grammars and JSON schemas.

Pure. A grammar may still fail to compile; compiler.py checks it.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from pdserve.engine.api import MAX_STRUCTURE_VALUES
from pdserve.text.errors import TextError
from pdserve.text.request import Structure
from pdserve.text.structured_output.schemas import enforceable, guided

Split = Callable[[str], Sequence[str | int]]  # splits a text at certain tokens

_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # a rule
_ANY = r"/(.|\n)*/"  # free text, in Lark
MAX_BETWEEN = 8  # white space characters between two tags without free text
MAX_LAST = 16  # characters of text after such tags; most tokens have fewer


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """The tokens of a model that no text in a grammar matches: special tokens and some other added
    tokens.

    split: splits a text at all of these tokens.
    plain: splits a text only at those that tokenizer.json does not flag as special; a client may
        write them.
    free: ids of those that are allowed in free text.
    """

    split: Split
    plain: Split
    free: Collection[int]


def source(structure: Structure, tokens: ModelTokens) -> str:
    """Return the grammar of a structure as JSON text. Raises TextError if the structure is
    invalid."""
    grammars = _grammars(structure, tokens)
    options = '%llguidance {"no_forcing": true}\n' if _has_tokens(structure, tokens.split) else ""
    if structure.lead or options:
        first, *others = grammars
        start = _lark(f"{options}start: {_words(tokens.split(structure.lead))} @form")
        grammars = [start, {"name": "form", **first}, *others]
    return _joined(grammars)


def _has_tokens(structure: Structure, split: Split) -> bool:
    """Return whether text from the client in the structure may contain a token that no text
    matches.

    If so, the grammar needs the option `no_forcing`: without it, where only one continuation is
    possible, llguidance would force the usual tokens of that text, including this token.
    """
    value = structure.value
    if structure.kind in ("regex", "lark", "grammar"):
        return True
    if structure.kind == "structural_tag":
        other = other_form(structure)
        if other is not None and _has_tokens(other, split):
            return True
        value = [tag["schema"] for tag in value["structures"]]
    return any(isinstance(part, int) for part in split(json.dumps(value, ensure_ascii=False)))


def tag_source(tag: Mapping[str, Any], structure: Structure) -> str:
    """Return the grammar of a single tag's schema as JSON text, to check it by itself."""
    return _joined([_json(tag["schema"], structure, is_lenient(tag, structure))])


def is_lenient(tag: Mapping[str, Any], structure: Structure) -> bool:
    """Return whether parts of a tag's schema that cannot be compiled may be ignored; if the tag
    does not say so, the setting of the structure applies."""
    tag_setting = tag.get("lenient")
    return structure.lenient if tag_setting is None else bool(tag_setting)


def other_form(structure: Structure) -> Structure | None:
    """Return the structure that an answer may match instead of the tags; None if the structure is
    not of tags or has no such alternative."""
    other = structure.value.get("or") if structure.kind == "structural_tag" else None
    return None if other is None else Structure(**other)


def _joined(grammars: list[dict[str, Any]]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))


def _grammars(structure: Structure, tokens: ModelTokens) -> list[dict[str, Any]]:
    value = structure.value
    match structure.kind:
        case "json_schema":
            return [_json(value, structure, structure.lenient)]
        case "json_object":
            return [_json({"type": "object"}, structure, structure.lenient)]
        case "regex":
            return [_lark(f"start: /{_as_lark(value)}/")]
        case "choice":
            choices = (_words(tokens.plain(choice) or [""]) for choice in value)
            return [_lark("start: " + " | ".join(choices))]
        case "lark":
            return [_lark(value)]
        case "grammar":
            return [_lark(_as_lark_grammar(value))]
        case "structural_tag":
            return _tagged(structure, tokens)


def _lark(text: str) -> dict[str, Any]:
    return {"lark_grammar": text}


def _json(schema: Any, structure: Structure, lenient: bool) -> dict[str, Any]:
    schema = enforceable(schema, MAX_STRUCTURE_VALUES)
    return {"json_schema": guided(schema, lenient=lenient, whitespace=structure.whitespace)}


def _as_lark(regex: str) -> str:
    """Escape a regular expression so that it can be written between slashes in Lark."""

    def escape(match: re.Match[str]) -> str:
        if match[0].endswith("\n"):
            return r"\n"
        return r"\/" if match[0] == "/" else match[0]

    return re.sub(r"\\.|/|\n", escape, regex, flags=re.DOTALL)


def _as_lark_grammar(text: str) -> str:
    """Convert a GBNF grammar to Lark; return a Lark grammar unchanged. Raises TextError if the GBNF
    is invalid."""
    if not _GBNF.search(text):
        return text
    try:
        return gbnf_to_lark(_ESCAPE.sub(_plain_escape, text))
    except RecursionError:
        raise TextError("the grammar is nested too deeply") from None
    except Exception as error:  # bare Exception, or IndexError at an unexpected end
        raise TextError(f"the grammar is not valid GBNF: {error}") from None


def _plain_escape(match: re.Match[str]) -> str:
    r"""Rewrite one escape of a GBNF grammar for the converter to Lark, which drops the zeros of
    \u0041 and does not know \-."""
    escape = match[1]
    if escape == "-":
        return r"\x2d"
    if len(escape) == 1:
        return match[0]
    code = int(escape[1:], 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code < 0x110000 else match[0]


def _tagged(structure: Structure, tokens: ModelTokens) -> list[dict[str, Any]]:
    """Return the grammars for a structure of tags: the tags with white space between them if they
    are required, otherwise free text in which tags may occur. Raises TextError if a tag begins with
    no trigger."""
    value = structure.value
    tags, triggers = value["structures"], value["triggers"]
    for tag in tags:
        if not any(tag["begin"].startswith(trigger) for trigger in triggers):
            raise TextError(f"the tag {tag['begin'][:80]!r} begins with none of the triggers")
    required = value.get("required")
    lines = _only_tags(value, tokens.split) if required else _tags_in_text(value, tokens)
    schemas = [
        {"name": f"schema_{n}", **_json(tag["schema"], structure, is_lenient(tag, structure))}
        for n, tag in enumerate(tags)
    ]
    other = other_form(structure)
    if other is not None:
        lines = ["start: tags | @or", lines[0].replace("start", "tags", 1), *lines[1:]]
        first, *others = _grammars(other, tokens)
        schemas += [{"name": "or", **first}, *others]
    return [_lark("\n".join(("%llguidance {}", *lines))), *schemas]


def _only_tags(value: Mapping[str, Any], split: Split) -> list[str]:
    """Return the Lark rules of an answer that consists of tags, with only white space between them.

    After a tag the model may also write a few other characters, which end the answer; without that
    choice, small models repeat tags until they run out of tokens. It is not possible if a tag has
    no end, because the characters would become part of the tag.
    """
    tags = value["structures"]
    lines = [
        "tag: " + " | ".join(f"tag_{n}" for n in range(len(tags))),
        *(f"tag_{n}: {_words(split(tag['begin']))} {_ended(n, tag, split)}"
          for n, tag in enumerate(tags)),
    ]  # fmt: skip
    if value.get("stop_after_first"):
        return ["start: tag", *lines]
    last = "BETWEEN? LAST?" if all(tag["end"] for tag in tags) else ""
    firsts = "".join(sorted({_literal(trigger[0]) for trigger in value["triggers"]}))
    return [
        f"start: tag (BETWEEN? tag)* {last}",
        rf"BETWEEN: /\s{{1,{MAX_BETWEEN}}}/",
        rf"LAST: /[^\s{firsts}](.|\n){{0,{MAX_LAST - 1}}}/",
        *lines,
    ]


def _tags_in_text(value: Mapping[str, Any], tokens: ModelTokens) -> list[str]:
    """Return the Lark rules of free text in which each trigger must be followed by the rest of one
    of its tags."""
    split = tokens.split
    tags, triggers = value["structures"], value["triggers"]
    split_triggers = [split(trigger) for trigger in triggers]
    # Free text must not spell out a trigger that begins with a special token.
    forbidden = [
        t for t, parts in zip(triggers, split_triggers, strict=True) if isinstance(parts[0], int)
    ]
    text = _ANY
    if forbidden:
        text += f" & ~/(.|\\n)*({'|'.join(map(_literal, forbidden))})(.|\\n)*/"
    # Special tokens allowed in free text: those in no trigger, and the first token of a trigger if
    # the rest of the trigger does not follow.
    others = ",".join(map(str, sorted(set(tokens.free).difference(*split_triggers))))
    lines = [f"TEXT: {text}"]
    alternatives = [f"<[{others}]> TEXT"] if others else []
    for token, rests in _beginnings(split_triggers).items():
        lines.append(f"NOT_{token}: {text} & ~/({'|'.join(map(_literal, rests))}){_ANY[1:]}")
        alternatives.append(f"<[{token}]> NOT_{token}")
    lines.append(f"free: TEXT ({' | '.join(alternatives)})*" if alternatives else "free: TEXT")
    prefix = f"(TEXT <[{others}]>)* " if others else ""
    segments = []
    for t, trigger in enumerate(triggers):
        ends = [
            f"{_words(split(tag['begin'][len(trigger) :]))} {_ended(n, tag, split)}"
            for n, tag in enumerate(tags)
            if tag["begin"].startswith(trigger)
        ]
        if ends:
            if isinstance(split_triggers[t][0], int):
                beginning = f"free {_words(split_triggers[t])}"
            else:
                beginning = prefix + _triggered(t, split_triggers[t], lines)
            lines.append(f"segment_{t}: {beginning} ({' | '.join(ends)})")
            segments.append(f"segment_{t}")
    any_segment = " | ".join(segments)
    if value.get("stop_after_first"):
        return [f"start: {any_segment} | free", *lines]
    return [f"start: ({any_segment})* free", *lines]


def _ended(number: int, tag: Mapping[str, Any], split: Split) -> str:
    """Return the Lark text for the rest of a tag after its beginning: its schema and its end."""
    return f"@schema_{number} {_words(split(tag['end']))}"


def _beginnings(triggers: Iterable[Sequence[str | int]]) -> dict[int, list[str]]:
    """Return, for each special token that begins a trigger, the texts that follow it in triggers.
    Omits tokens that are a whole trigger."""
    rests: dict[int, list[str]] = {}
    bare = {trigger[0] for trigger in triggers if len(trigger) == 1}
    for first, *rest in triggers:
        if isinstance(first, int) and first not in bare and isinstance(rest[0], str):
            rests.setdefault(first, []).append(rest[0])
    return rests


def _literal(text: str) -> str:
    """Return a regular expression that matches exactly `text`."""
    return _as_lark("".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text))


def _triggered(number: int, trigger: Sequence[str | int], lines: list[str]) -> str:
    """Return the Lark text for free text that ends with a trigger, and add the rule that it needs
    to `lines`. If the trigger contains a special token, only its part from that token on is
    matched."""
    index = next((n for n, part in enumerate(trigger) if isinstance(part, int)), None)
    if index is not None:
        return f"TEXT {_words(trigger[index:])}"
    lines.append(f"trigger_{number}[lazy]: TEXT {_words(trigger)}")
    return f"trigger_{number}"


def _words(parts: Sequence[str | int]) -> str:
    """Return the Lark text for a sequence of texts and special token ids."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)
