"""A structure as a grammar of llguidance: JSON of a list of grammars in Lark or of JSON schemas.

Pure. What is returned need not compile (compiler.py).
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from pdserve.engine.api.sampling_bounds import MAX_STRUCTURE_VALUES
from pdserve.gateway.grammars.schemas import enforceable, guided
from pdserve.gateway.requests.structure import Structure
from pdserve.gateway.text.errors import TextError

Split = Callable[[str], Sequence[str | int]]  # a text at some tokens

_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # a rule
_ANY = r"/(.|\n)*/"  # free text, in Lark
MAX_BETWEEN = 8  # white space characters between two tags that no text may surround
MAX_LAST = 16  # characters of text behind these; most tokens have fewer


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """The tokens of a model that match no text in a grammar: those that are flagged special, and
    further added ones.

    `split`: a text at all of them. `plain`: at those that are not flagged, which a client may
    write. `free`: those that text without a form may have.
    """

    split: Split
    plain: Split
    free: Collection[int]


def source(structure: Structure, tokens: ModelTokens) -> str:
    """Raises TextError for what is no such structure."""
    grammars = _grammars(structure, tokens)
    options = '%llguidance {"no_forcing": true}\n' if _has_tokens(structure, tokens.split) else ""
    if structure.lead or options:
        whole, *parts = grammars
        start = _lark(f"{options}start: {_words(tokens.split(structure.lead))} @form")
        grammars = [start, {"name": "form", **whole}, *parts]
    return _joined(grammars)


def _has_tokens(structure: Structure, split: Split) -> bool:
    """Whether a client's text may contain the text of a token that matches no text. Where a grammar
    leaves only one text, llguidance forces its usual tokens, and so this one, without the option
    `no_forcing`."""
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
    """The grammar of the schema of one tag alone."""
    return _joined([_json(tag["schema"], structure, is_lenient(tag, structure))])


def is_lenient(tag: Mapping[str, Any], structure: Structure) -> bool:
    """Whether the schema of one tag is."""
    own = tag.get("lenient")
    return structure.lenient if own is None else bool(own)


def other_form(structure: Structure) -> Structure | None:
    """What a text matches instead of the tags; None: it must have them."""
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
            return [_lark(_of_any(value))]
        case "structural_tag":
            return _tagged(structure, tokens)


def _lark(text: str) -> dict[str, Any]:
    return {"lark_grammar": text}


def _json(schema: Any, structure: Structure, lenient: bool) -> dict[str, Any]:
    schema = enforceable(schema, MAX_STRUCTURE_VALUES)
    return {"json_schema": guided(schema, lenient=lenient, whitespace=structure.whitespace)}


def _as_lark(regex: str) -> str:
    """A regular expression as it is written between slashes."""

    def written(found: re.Match[str]) -> str:
        if found[0].endswith("\n"):
            return r"\n"
        return r"\/" if found[0] == "/" else found[0]

    return re.sub(r"\\.|/|\n", written, regex, flags=re.DOTALL)


def _of_any(text: str) -> str:
    """Lark as it is, GBNF as Lark. Raises TextError."""
    if not _GBNF.search(text):
        return text
    try:
        return gbnf_to_lark(_ESCAPE.sub(_plain_escape, text))
    except RecursionError:
        raise TextError("the grammar is nested too deeply") from None
    except Exception as error:  # the library raises bare Exception, and IndexError at an odd end
        raise TextError(f"the grammar is not valid GBNF: {error}") from None


def _plain_escape(found: re.Match[str]) -> str:
    r"""An escape of GBNF in a form that the converter reads well: it drops zeros of \u0041, and
    does not know \-."""
    escape = found[1]
    if escape == "-":
        return r"\x2d"
    if len(escape) == 1:
        return found[0]
    code = int(escape[1:], 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code < 0x110000 else found[0]


def _tagged(structure: Structure, tokens: ModelTokens) -> list[dict[str, Any]]:
    """Tags, in free text if none is required."""
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
        whole, *parts = _grammars(other, tokens)
        schemas += [{"name": "or", **whole}, *parts]
    return [_lark("\n".join(("%llguidance {}", *lines))), *schemas]


def _only_tags(value: Mapping[str, Any], split: Split) -> list[str]:
    """The rules of tags with nothing but white space between them.

    Where another tag could begin, a model may write a few characters of text, which end it all: one
    that can only end or go on with tags repeats them until it has no tokens left, if it is small.
    Behind a tag without an end that text would be part of the tag.
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
    """The rules of free text in which a trigger begins one of the tags that begin with it."""
    split = tokens.split
    tags, triggers = value["structures"], value["triggers"]
    started = [split(trigger) for trigger in triggers]
    # A trigger that begins with a special token is not written as text either.
    unwritten = [t for t, parts in zip(triggers, started, strict=True) if isinstance(parts[0], int)]
    text = _ANY
    if unwritten:
        text += f" & ~/(.|\\n)*({'|'.join(map(_literal, unwritten))})(.|\\n)*/"
    # Special tokens that free text may have: those of no trigger, and the first of one before what
    # is not the rest of it.
    others = ",".join(map(str, sorted(set(tokens.free).difference(*started))))
    lines = [f"TEXT: {text}"]
    passed = [f"<[{others}]> TEXT"] if others else []
    for token, rests in _beginnings(started).items():
        lines.append(f"NOT_{token}: {text} & ~/({'|'.join(map(_literal, rests))}){_ANY[1:]}")
        passed.append(f"<[{token}]> NOT_{token}")
    lines.append(f"free: TEXT ({' | '.join(passed)})*" if passed else "free: TEXT")
    before = f"(TEXT <[{others}]>)* " if others else ""
    segments = []
    for t, trigger in enumerate(triggers):
        ends = [
            f"{_words(split(tag['begin'][len(trigger) :]))} {_ended(n, tag, split)}"
            for n, tag in enumerate(tags)
            if tag["begin"].startswith(trigger)
        ]
        if ends:
            if isinstance(started[t][0], int):
                begun = f"free {_words(started[t])}"
            else:
                begun = before + _triggered(t, started[t], lines)
            lines.append(f"segment_{t}: {begun} ({' | '.join(ends)})")
            segments.append(f"segment_{t}")
    any_segment = " | ".join(segments)
    if value.get("stop_after_first"):
        return [f"start: {any_segment} | free", *lines]
    return [f"start: ({any_segment})* free", *lines]


def _ended(number: int, tag: Mapping[str, Any], split: Split) -> str:
    """What a tag has after its beginning."""
    return f"@schema_{number} {_words(split(tag['end']))}"


def _beginnings(triggers: Iterable[Sequence[str | int]]) -> dict[int, list[str]]:
    """The texts that make triggers of special tokens, by the token; none for one that is a trigger
    whatever follows."""
    found: dict[int, list[str]] = {}
    bare = {trigger[0] for trigger in triggers if len(trigger) == 1}
    for first, *rest in triggers:
        if isinstance(first, int) and first not in bare and isinstance(rest[0], str):
            found.setdefault(first, []).append(rest[0])
    return found


def _literal(text: str) -> str:
    """A regular expression of a text."""
    return _as_lark("".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text))


def _triggered(number: int, trigger: Sequence[str | int], lines: list[str]) -> str:
    """Free text up to the end of a trigger; its rule is added to `lines`. A special token in it is
    what triggers: text before it may be any."""
    at = next((n for n, part in enumerate(trigger) if isinstance(part, int)), None)
    if at is not None:
        return f"TEXT {_words(trigger[at:])}"
    lines.append(f"trigger_{number}[lazy]: TEXT {_words(trigger)}")
    return f"trigger_{number}"


def _words(parts: Sequence[str | int]) -> str:
    """Texts and special tokens one after the other, in Lark."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)
