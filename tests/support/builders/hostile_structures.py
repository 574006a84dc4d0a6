"""Structures that are designed to exhaust time, memory or stack."""

from typing import Any

from pdserve.text import Structure


def _doubled(times: int, keyword: str) -> dict[str, Any]:
    """Return definitions of which each refers twice to the next one."""
    names = [f"d{n}" for n in range(times)]
    definitions: dict[str, Any] = {
        name: {keyword: [{"$ref": f"#/$defs/{after}"}] * 2}
        for name, after in zip(names, [*names[1:], "last"], strict=True)
    }
    definitions["last"] = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _chained(count: int) -> dict[str, Any]:
    definitions = {
        f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "null"}}}


def _schema(value: Any) -> Structure:
    return Structure("json_schema", value, "guided_json")


HOSTILE = {
    "doubled allOf": _schema(_doubled(40, "allOf")),
    "doubled anyOf": _schema(_doubled(40, "anyOf")),
    "doubled oneOf": _schema(_doubled(40, "oneOf")),
    "chained": _schema(_chained(1500)),
    "itself": _schema({"$ref": "#"}),
    "long text": _schema({"type": "string", "maxLength": 10**9}),
    "at least long": _schema({"type": "string", "minLength": 10**9}),
    "many items": _schema({"type": "array", "minItems": 10**6, "items": {"minItems": 10**6}}),
    "product": _schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}.{j}": {"type": "null"}}} for j in range(10)]}
                for i in range(10)
            ]
        }
    ),
    "enum": _schema({"enum": [f"{n * 7919 % 10007} is one of them" for n in range(4000)]}),
    "properties": _schema({"properties": {f"p{n}": {"type": "string"} for n in range(2700)}}),
    "multiples": _schema(
        {"allOf": [{"type": "integer", "multipleOf": n} for n in (101, 103, 107, 109, 113, 127)]}
    ),
    "patterns": _schema({"allOf": [{"pattern": f".*a.{{{n}}}"} for n in range(20, 40)]}),
    "names": _schema({"patternProperties": {f"^.*{n}.*$": {} for n in range(40)}}),
    "repeated": Structure("regex", "((a{1,1000}){1,1000}){1,1000}", "regex"),
    "states": Structure("regex", "(.*a.{20}){20}", "regex"),
    "stars": Structure("regex", "(" * 200 + "a" + "*)" * 199 + ")*", "regex"),
    "groups": Structure("regex", "(" * 50_000 + "a" + ")" * 50_000, "regex"),
    "optional": Structure("regex", "a?" * 30_000, "regex"),
    "parentheses": Structure("grammar", "start: " + "(" * 60_000 + '"a"' + ")" * 60_000, "grammar"),
    "rules": Structure(
        "grammar",
        "start: R0\n" + "\n".join(f"R{n}: R{n + 1} R{n + 1}" for n in range(60)) + '\nR60: "a"',
        "grammar",
    ),
    "repeated rules": Structure(
        "grammar", 'start: a{1000,2000}\na: b{1000,2000}\nb: c{1000,2000}\nc: "x"', "grammar"
    ),
    "GBNF": Structure("grammar", 'root ::= "a"' + " | root" * 18_000, "grammar"),
    "blank lines": Structure("grammar", "\n" * 120_000 + 'root ::= "a"', "grammar"),
    "begin with a trigger": Structure(
        "structural_tag",
        {
            "structures": [{"begin": f"<{n}", "schema": True, "end": ">"} for n in range(250)],
            "triggers": ["<" + str(n)[:k] for n in range(120) for k in range(2)],
        },
        "structural_tag",
    ),
}
