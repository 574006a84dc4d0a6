"""Structures compile to grammars that enforce them, or fail with the field and path in the
error."""

import json
import random
import re
from itertools import product
from typing import Any

import pytest
from llguidance import LLMatcher
from oracles.grammar_walks import Walk, compiler, tokenizer

from pdserve.engine.api import MAX_GRAMMAR_BYTES
from pdserve.text import Structure, TextError
from pdserve.text.structured_output.schemas import FORMATS

ONE = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"type": "null"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def compiled(kind: Any, value: Any = None, **options: Any) -> str:
    return compiler().compile(Structure(kind, value, "field", **options))


def walk(kind: Any, value: Any = None, **options: Any) -> Walk:
    return Walk(compiled(kind, value, **options))


def accepts(source: str, text: str) -> bool:
    """Whether a grammar accepts a text as a whole answer."""
    walk = Walk(source)
    return walk.take(text) and walk.may_end


def takes(kind: Any, value: Any, text: str, **options: Any) -> bool:
    return accepts(compiled(kind, value, **options), text)


def error_of(kind: Any, value: Any, **options: Any) -> TextError:
    with pytest.raises(TextError) as caught:
        compiler().compile(Structure(kind, value, "field", **options))
    return caught.value


STRUCTURES = [
    ("json_schema", ONE, ['{"a": true, "b": [null]}'], ['{"a": 1, "b": []}', '{"b": []}']),
    ("json_schema", True, ['"x"', "[1, {}]"], ["x"]),
    ("json_object", None, ['{"x": [1, {"y": null}]}', "{}"], ["[]", '"x"', "{x: 1}"]),
    ("regex", r"a/b\/\d{2}[/]", ["a/b/12/"], ["a/b/1/", "xa/b/12/"]),
    ("regex", "^(yes|no)$", ["yes", "no"], ["maybe", "yes "]),
    ("regex", "^a|b$", ["a", "b"], ["ab", "c"]),
    ("regex", r"cost\$", ["cost$"], ["cost"]),
    ("regex", "a\nb\\\n", ["a\nb\n"], ["ab", "a\nb\\n"]),
    ("choice", ['sa"y', "é\\", "a\nb"], ['sa"y', "é\\", "a\nb"], ["say", "sa"]),
    ("lark", 'start: "a" b*\nb: "(" b ")" | "x"', ["a", "a(x)x"], ["b", "a(x"]),
    ("grammar", 'start: "::= "', ["::= "], ["x"]),
    ("grammar", 'root ::= "a" item*\nitem ::= "(" item ")" | [x-z]', ["a(y)z"], ["a(y", "w"]),
    ("grammar", 'root ::= "\\u0041" [\\u0042-\\u0044a\\-]{2}', ["AC-", "ABa"], ["A+a", "AC"]),
    ("grammar", 'my-rule ::= "b"\nroot ::= ("a" | my-rule) # or', ["a", "b"], ["ab"]),
]


def test_an_answer_matches_its_structure(subtests):
    for kind, value, right, wrong in STRUCTURES:
        with subtests.test(kind=kind, value=value):
            for text in right:
                assert takes(kind, value, text), text
            for text in wrong:
                assert not takes(kind, value, text), text


def test_json_has_limited_whitespace() -> None:
    for text in (
        '{"a":true,"b":[]}',
        '{ "a" : true , "b" : [ ] }',
        '{\n    "a": true,\n    "b": [\n        null,\n        null\n    ]\n}',
        '{\n\t"a": true,\n\t"b": []\n}',
    ):
        assert takes("json_schema", ONE, text)
    for text in ("{  ", "{\n\n", "{ \n", "{\n" + " " * 21, '{"a":\t', " {"):
        assert not walk("json_schema", ONE).take(text), text
    for kind, value in (("json_object", None), ("json_schema", True)):
        assert not walk(kind, value).take("{  ")
    assert takes("json_schema", ONE, '{"a":true,"b":[null,null]}', whitespace=False)
    assert not walk("json_schema", ONE, whitespace=False).take("{ ")
    assert not walk("json_schema", ONE, whitespace=False).take("{\n")


def test_library_options_in_a_schema_are_dropped() -> None:
    schema = {**ONE, "x-guidance": {"whitespace_pattern": " *", "item_separator": ";"}}
    assert not walk("json_schema", schema).take("{  ")
    assert takes("json_schema", schema, '{"a": true, "b": []}')


NOT_ENFORCED = [
    ({"properties": {"a": {"not": {"type": "string"}}}}, ".properties.a.not"),
    ({"$defs": {"x": {"uniqueItems": True}}, "$ref": "#/$defs/x"}, ".$defs.x.uniqueItems"),
    ({"anyOf": [{"type": "null"}, {"contains": {}}]}, ".anyOf[1].contains"),
    ({"items": {"properties": {"a/b": {"if": {}, "then": {"type": "null"}}}}},
     '.items.properties["a/b"].if'),
    ({"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, ".items.oneOf"),
    ({"properties": {"not": {"enum": [{"not": 1}], "unevaluatedItems": False, "allOf": [{}]}}},
     ".properties.not.unevaluatedItems"),
    ({"propertyNames": {"pattern": "^a"}, "title": "t"}, ".propertyNames"),
    ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, ".minProperties"),
    ({"patternProperties": {"^a": {}, "b$": {}}}, ".patternProperties"),
    ({"properties": {"email": {"pattern": r"^(?!\.)[a-z]+$"}}}, ".properties.email.pattern"),
    ({"items": {"patternProperties": {"(?<=a)b": {}}}}, '.items.patternProperties["(?<=a)b"]'),
    ({"properties": {"n": {"multipleOf": 1e-30}}}, ".properties.n.multipleOf"),
    ({"properties": {"a": {"oneOf": [{"const": 1}, {"type": "null"}]}, "b": {"oneOf": [
        {"type": "integer"}, {"type": "number"}]}}}, ".properties.b.oneOf"),
    ({"properties": {"a": {"minProperties": 1}, "b": {"properties": {"c": {}, "d": {}},
      "minProperties": 1}}}, ".properties.b.minProperties"),
    ({"items": {"minimum": "1"}}, ".items.minimum"), ({"items": {"enum": "a"}}, ".items.enum"),
    ({"items": {"minLength": "1"}}, ".items.minLength"),
    ({"items": {"required": True}}, ".items.required"),
    ({"properties": {"a": {"$ref": "http://x.y/z"}}}, ".properties.a.$ref"),
    ({"properties": {"a": {"$ref": "#b"}}}, ".properties.a.$ref"),
    ({"properties": {"a": None}}, ".properties"),
    ({"properties": {"a": {"items": "string"}}}, ".properties.a.items"),
]  # fmt: skip


def test_an_unenforceable_keyword_is_named_or_ignored(subtests):
    for schema, place in NOT_ENFORCED:
        with subtests.test(schema=schema):
            error = error_of("json_schema", schema)
            assert error.param == "field"
            assert str(error).startswith(f"field{place}: ")
            error = error_of("json_schema", schema, path="field.schema")
            assert str(error).startswith(f"field.schema{place}: ")
            compiler().compile(Structure("json_schema", schema, "field", lenient=True))


def test_an_invalid_schema_is_named_in_the_error(subtests):
    invalid: dict[str, Any] = {"properties": {"a": {"items": {"type": ["null", "date"]}}}}
    nowhere = {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"a": {}}}
    past = {"properties": {"a": {"$ref": "#/anyOf/1"}}, "anyOf": [{}]}
    document = {"$id": "http://x.y/z", "properties": {"c": {"$ref": "#/$defs/a"}}}
    outside = {"properties": {"a": document, "ab": {"$ref": "#/$defs/a"}}, "$defs": {"a": {}}}
    for schema, place in (
        (invalid, ".properties.a.items.type"),
        (nowhere, ".properties.a.$ref"),
        (past, ".properties.a.$ref"),
        (outside, ".properties.a.properties.c.$ref"),
    ):
        with subtests.test(schema=schema):
            error = error_of("json_schema", {"type": "object", **schema})
            assert str(error).startswith(f"field{place}: ")
            compiler().compile(Structure("json_schema", schema, "field", lenient=True))
    present = {"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/0"}, {"$ref": "#/$defs/b%20c"}],
               "$defs": {"b c": {"pattern": "(?=a)"}}}  # fmt: skip
    assert str(error_of("json_schema", present)).startswith('field.$defs["b c"].pattern: ')


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # as pydantic writes it

# (a lenient schema, answers that its enforceable part accepts, answers that it rejects)
LENIENT = [
    ({"type": "string", "pattern": r"^(?=a).{3}", "maxLength": 4}, ['"bcde"'], ['"bcdef"', "1"]),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}, ["1.5", '"x"'],
     ["null"]),
    ({"type": "array", "items": {"type": "string", "pattern": r"(a)\1"}, "maxItems": 1}, ['["x"]'],
     ['["x", "y"]', "[1]"]),
    ({"type": "string", "format": "uuid", "pattern": "(?!0)"},
     ['"01234567-89ab-cdef-0123-456789abcdef"'], ['"0"']),
    ({"type": "object", "patternProperties": {"^(?!x)": {"type": "null"}, "^n": {"type": "null"}},
      "additionalProperties": False}, ['{"n": null}', '{"a": 1}'], ['{"n": 1}']),
    ({"type": "object", "patternProperties": {"^a": {"type": "null"}, "b$": {"type": "null"}},
      "properties": {"c": {"type": "null"}}}, ['{"ab": 1}'], ['{"c": 1}']),
    ({"type": "object", "properties": {"a": {"$ref": "https://example.com/a"}, "b": {"const": 1}}},
     ['{"a": 7, "b": 1}'], ['{"a": 7, "b": 2}']),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {
        "in": {"$ref": "#/$defs/a", "type": "object"}, "n": {"type": "null"}}}}},
     ['{"in": {"n": null}}'], ['{"in": {"n": 1}}']),
    ({"type": "integer", "multipleOf": 1e-30, "maximum": 7}, ["7"], ["8", "null"]),
    *(({"type": "object", "properties": {"a": {"$ref": to, "type": "string"}, "b": {"const": 1}}},
       ['{"a": "x", "b": 1}'], ['{"a": 1}', '{"b": 2}'])
      for to in ("other.json", "other.json#/a", "#foo", "a b", "urn:uuid:7", "http://[", "//x#y")),
    ({"$id": "a b", "$schema": "http://example.com/s", "type": "null"}, ["null"], ["1"]),
    ({"$id": "https://x.y/root", "type": "object", "properties": {
        "a": {"$ref": "#/$defs/a"}, "b": {"$ref": "b"}, "c": {"$ref": "#c"}, "d": {"$ref": "d"}},
      "$defs": {"a": {"type": "null"}, "b": {"$id": "b", "type": "null"},
                "c": {"$anchor": "c", "type": "null"}}},
     ['{"a": null, "b": null, "c": null, "d": 1}'], ['{"a": 1}', '{"b": 1}', '{"c": 1}']),
    ({"$id": ["x"], "type": "object", "properties": {
        "a": {"$id": {}, "pattern": "(?=a)", "type": "string"}}}, ['{"a": "b"}'], ['{"a": 1}']),
    *(({"type": "object", "properties": {"a": {"type": name}}}, [f'{{"a": {right}}}'],
       [f'{{"a": {wrong}}}'])
      for name, right, wrong in (
          ("STRING", '"x"', "1"), ("str", '"x"', "1"), ("float", "1.5", '"x"'), ("int", "1", "1.5"),
          ("bool", "true", "1"), ("dict", '{"x": 1}', "1"), ("list", "[1]", "1"),
          ("any", "[1]", "x"))),
    ({"type": "number", "minimum": 0.5, "maximum": 1e300}, ["7"], ["null"]),
    *(({"type": "object", "properties": {"a": {"type": "null", "$id": "x"}, "b": wrong}},
       ['{"a": null, "b": 1}', '{"b": "x"}'], ['{"a": 1}', "1"])
      for wrong in ({"type": "date"}, {"type": ["string", "datetime"]}, {"$ref": "#/$defs/none"},
                    {"$id": "z", "$ref": "#/properties/a"}, {"required": True}, {"enum": "x"},
                    {"minLength": "3"}, {"minimum": "1"}, {"type": 7})),
    ({"type": "array", "items": {"type": "strin"}, "maxItems": 1}, ["[1]"], ["[1, 2]"]),
    ({"type": "object", "propertyNames": {"enum": [f"n{n}" for n in range(150)]},
      "additionalProperties": {"properties": {f"p{n}": {"enum": ["on", "x"]} for n in range(40)}}},
     ['{"n1": {"p1": "on"}}'], ['{"n1": {"p1": "up"}}']),
    ({"type": "object", "properties": {"a": {"type": "object", "properties": []}, "b": None,
      "c": {"type": "array", "items": "string", "maxItems": 1}}, "anyOf": {}},
     ['{"a": {"x": 1}, "b": 2, "c": [3]}'], ['{"a": 1}', '{"c": [1, 2]}']),
]  # fmt: skip


def test_a_lenient_schema_is_enforced_as_far_as_possible(subtests):
    for schema, right, wrong in LENIENT:
        with subtests.test(schema=schema):
            error_of("json_schema", schema)
            tag = {"begin": "<f=x>", "schema": schema, "end": "", "lenient": True}
            tags = {"structures": [tag], "triggers": ["<f="], "required": True}
            for begin, source in (
                ("", compiled("json_schema", schema, lenient=True)),
                ("<f=x>", compiled("structural_tag", tags)),
            ):
                for text in right:
                    assert accepts(source, begin + text), text
                for text in wrong:
                    assert not accepts(source, begin + text), text


KIND = {"type": "object", "required": ["kind"], "additionalProperties": False}
CAT, DOG = ({**KIND, "properties": {"kind": {"const": name}}} for name in ("cat", "dog"))

# (a strict schema with keywords that bind nothing, answers that it accepts, answers that it
# rejects)
NOTHING_MORE = [
    ({"type": "object", "propertyNames": {"type": "string", "description": "d"},
      "additionalProperties": {"type": "number"}}, ['{"a": 1}'], ['{"a": "b"}']),
    ({"type": "array", "items": {"type": "null"}, "uniqueItems": False, "minItems": 0,
      "contains": {}, "minContains": 0}, ["[null]", "[]"], ["[1]"]),
    *(({"type": "string", "format": form, "maxLength": 1}, ['"x"'], ['"xy"'])
      for form in ("path", "password", "binary", "byte", "regex", "isbn", "uri-reference")),
    ({"type": "integer", "format": "int64", "not": False}, ["7"], ["x"]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$id": "a", "$comment": "c",
      "title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True,
      "readOnly": True, "writeOnly": False, "contentEncoding": "base64", "contentSchema": {},
      "contentMediaType": "text/plain", "nullable": False, "example": 1, "x-order": 1,
      "externalDocs": {}, "xml": {}, "discriminator": {"propertyName": "a"}, "type": "null",
      "$dynamicAnchor": "a"}, ["null"], ["1"]),
    ({"type": "null", "pattern": None, "enum": None, "format": None, "properties": None}, ["null"],
     ["1"]),
    ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['"ab"'], ['"abc"', '""']),
    ({"type": "object", "dependentRequired": {"a": []}, "dependentSchemas": {"a": True},
      "dependencies": {}, "if": {"required": ["a"]}, "additionalProperties": False}, ["{}"],
     ['{"a": 1}']),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5,
      "exclusiveMaximum": False}, ["4", "5"], ["3", "6"]),
    ({"type": "string", "uniqueItems": True, "propertyNames": {"pattern": "a"}}, ['"x"'], ["1"]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "additionalItems": False,
      "unevaluatedItems": False}, ["[null]"], ["[1]", "[null, 1]"]),
    ({"type": "array", "items": [{"type": "null"}], "unevaluatedItems": False}, ["[null]"],
     ["[1]", "[null, 1]"]),
    *(({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"},
        "$defs": {"s": {"type": "string"}}}, ['{"a": 1}'], ['{"a": "b"}'])
      for names in ({"format": "uuid"}, {"type": "string", "format": "date"},
                    {"$ref": "#/$defs/s"})),
    *(({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"},
        "$defs": {"e": {"enum": ["a", "b"], "type": "string"}}}, ['{"a": 1, "b": 2}', '{"b": 1}'],
       ['{"c": 1}', '{"a": "b"}'])
      for names in ({"enum": ["a", "b"]}, {"$ref": "#/$defs/e"})),
    ({"properties": {"a": {"type": "null"}}, "type": "object",
      "unevaluatedProperties": {"not": {}}}, ['{"a": null}'], ['{"b": 1}']),
    ({"type": "object", "properties": {"a": {"not": {}}, "b": {"anyOf": [
        {"not": {}}, {"type": "null"}]}}}, ['{"b": null}'], ['{"a": 1}', '{"b": 1}']),
    *(({"type": "array", "prefixItems": [{"type": "string", "format": form, **keywords}],
        "minItems": 1}, [f'["{text}"]'], ["[1]", '["' + "x" * 400 + '"]'])
      for form in ("email", "uuid")
      for keywords, text in (({"pattern": r"^\d+$"}, "123"), ({"enum": ["x"]}, "x"),
                             ({"minLength": 300, "maxLength": 301}, "y" * 300))),
    ({"allOf": [{"type": "string", "pattern": r"^\d+$"}, {"format": "email"}]}, ['"12"'], ['"a"']),
    ({"$ref": "#/$defs/a", "format": "uuid", "$defs": {"a": {"type": "string", "maxLength": 2}}},
     ['"ab"'], ['"abc"']),
    ({"$schema": "http://example.com/s", "type": "null"}, ["null"], ["1"]),
    ({"discriminator": {"propertyName": "kind"}, "$defs": {"Cat": CAT, "Dog": DOG},
      "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}, ['{"kind": "dog"}'],
     ['{"kind": "cow"}']),
    ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
     ["7"], ["null"]),  # zod's z.float64()
    ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
     ["7"], ["null"]),  # zod's z.float32()
    ({"$defs": {"C[x]": CAT, "Dog": DOG}, "oneOf": [
        {"type": "null"}, {"$ref": "#/$defs/C%5Bx%5D"}, {"$ref": "#/$defs/Dog"},
        {"type": "integer"}]},
     ["null", '{"kind": "cat"}', "1"], ['{"kind": "cow"}', '"x"']),
]  # fmt: skip


def test_keywords_that_bind_nothing_are_accepted_in_a_strict_schema(subtests):
    for (schema, right, wrong), lenient in product(NOTHING_MORE, (False, True)):
        with subtests.test(schema=schema, lenient=lenient):
            source = compiled("json_schema", schema, lenient=lenient)
            for text in right:
                assert accepts(source, text), text
            for text in wrong:
                assert not accepts(source, text), text


def test_formats_known_to_the_library_are_enforced(subtests):
    for form in (*FORMATS, "path", "regex", "iri", "idn-email", "json-pointer", "uri-template"):
        with subtests.test(form):
            schema = {"type": "string", "format": form}
            source = json.dumps({"grammars": [{"json_schema": schema}]})
            assert (not LLMatcher.validate_grammar(source)) == (form in FORMATS)
            assert takes("json_schema", schema, '"?"') == (form not in FORMATS)


WRONG = [
    ("json_schema", False, "must be an object"),
    ("json_schema", {"$ref": "#"}, "no text matches"),
    ("json_schema", {"type": "string", "minLength": 5, "maxLength": 3}, "Unsatisfiable"),
    ("json_schema", {"enum": []}, "Unsatisfiable"),
    ("json_schema", {"type": "string", "pattern": "\ud800"}, "not valid Unicode"),
    ("regex", "(a", "unclosed group"),
    ("regex", "(^a|b$)c", "lookarounds"),
    ("choice", ["\ud800"], "error parsing"),
    ("lark", "start: nothing", "unknown name"),
    ("lark", 'start: "' + "é" * (MAX_GRAMMAR_BYTES // 2) + '"', "too large"),
    ("grammar", "hello", "Expected"),
    ("grammar", 'top ::= "x"', "No 'root' rule"),
    ("grammar", "root ::= " + "(" * 9999, "nested too deeply"),
    ("grammar", 'root ::= "\\', "not valid GBNF"),
]


def test_an_invalid_structure_is_explained(subtests):
    for (kind, value, said), lenient in product(WRONG, (False, True)):
        with subtests.test(kind=kind, said=said, lenient=lenient):
            error = error_of(kind, value, lenient=lenient)
            assert said in str(error)
            assert "field" in str(error)
            assert error.param == "field"
    assert "strin" in str(error_of("json_schema", {"type": "strin"}))
    assert "does not exist" in str(error_of("json_schema", {"$ref": "#/$defs/none"}))
    assert "not present" in str(error_of("json_schema", {"$ref": "http://example.com/s"}))


TAG = {
    "structures": [
        {"begin": "<f=one>", "schema": ONE, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<|im_start|>three ", "schema": {"type": "null"}, "end": "<|im_start|>"},
    ],
    "triggers": ["<f=", "<|im_start|>"],
}


def test_free_text_may_have_tags() -> None:
    for text in (
        "", "hello", "a < b", "say <f=two>7</f> and <f=one>{\"a\": true, \"b\": []}</f> bye",
        "<f=two>7</f><f=two>-1</f>", "so <|im_start|>three null<|im_start|> done",
    ):  # fmt: skip
        assert takes("structural_tag", TAG, text), text
    for text in ("x <f=x", "<f=two>x", '<f=one>{"b', "<f=two>7</x", "<|im_start|>four"):
        assert not walk("structural_tag", TAG).take(text), text
    assert not takes("structural_tag", TAG, "hello <f=two>7")


def test_special_tokens_of_a_tag_are_single_tokens() -> None:
    found = walk("structural_tag", TAG)
    assert found.take("<|im_start|>three null<|im_start|>")
    special = tokenizer().special.texts["<|im_start|>"]
    assert found.ids.count(special) == 2


FORMS = [
    ("json_schema", ONE, '{"a": true, "b": [null]}'), ("regex", "a|b", "b"),
    ("lark", 'start: "a" b*\nb: "(" b ")" | "x"', "a(x)x"), ("choice", ["yes", "no"], "no"),
    ("grammar", 'root ::= "a" item*\nitem ::= "x"', "axx"),
    ("structural_tag", TAG, "say <f=two>7</f> and <|im_start|>three null<|im_start|>"),
]  # fmt: skip


def test_a_lead_precedes_the_structure(subtests: pytest.Subtests) -> None:
    lead = "<|im_start|>so"
    for kind, value, text in FORMS:
        with subtests.test(kind):
            assert takes(kind, value, lead + text, lead=lead)
            assert walk(kind, value, lead=lead).take(lead)
            assert not walk(kind, value, lead=lead).take(text)
            assert not takes(kind, value, lead, lead=lead) or takes(kind, value, "")


def test_free_text_may_have_special_tokens_that_trigger_nothing() -> None:
    value = {"structures": TAG["structures"][:2], "triggers": ["<f="]}
    for text in ("<|im_start|>", "a <|im_start|> b<|im_start|><|im_start|> <f=two>7</f> c"):
        assert takes("structural_tag", value, text), text
    for text in ("<|im_start|><f=x", "<f=two>7</f><|im_start|>a<f=two>x"):
        assert not walk("structural_tag", value).take(text), text


def test_a_special_token_may_trigger_only_before_a_text() -> None:
    """Trigger at <|channel|> before the name of a function, but not before another channel's
    name."""
    begin = "<|im_start|>call to="
    tag = {"begin": f"{begin}f ", "schema": {"type": "integer"}, "end": "<|im_start|>"}
    value = {"structures": [tag, {**tag, "begin": f"{begin}g/"}], "triggers": [begin]}
    for text in (
        "<|im_start|>final",
        "a <|im_start|>called",
        f"{begin}f 7<|im_start|>",
        "x<|im_start|>call it<|im_start|><|im_start|>calm",
        f"<|im_start|>a{begin}g/7<|im_start|>b",
    ):
        assert takes("structural_tag", value, text), text
    for text in (f"{begin}h", f"a {begin}f x", f"{begin}f 7<|im_start|>so {begin}x"):
        assert not walk("structural_tag", value).take(text), text


def test_each_tag_may_be_lenient() -> None:
    tag = {"begin": "<f=x>", "schema": {"type": "null", "not": {}}, "end": ""}
    value = {"structures": [TAG["structures"][0], {**tag, "lenient": True}], "triggers": ["<f="]}
    assert takes("structural_tag", value, "<f=x>null")
    value["structures"].append({**tag, "lenient": False})
    assert "not" in str(error_of("structural_tag", value, lenient=True))


def test_an_answer_may_be_only_tags_or_end_with_one() -> None:
    first = {**TAG, "required": True}
    for text in ("<f=two>7</f>", "<f=two>7</f>\n\n", "<f=two>7</f><f=two>8</f> <f=two>9</f>"):
        assert takes("structural_tag", first, text), text
        assert takes("structural_tag", first, text + "and so on"), text
    for text in ("h", " ", "<f=two>7</f><f=x", "<f=two>7</f><a", "<f=two>7</f>" + "\n" * 9):
        assert not walk("structural_tag", first).take(text), text
    cut = walk("structural_tag", first)
    assert cut.take("<f=two>7</f> sixteen letters,")
    assert cut.allowed() == []
    once = {**TAG, "stop_after_first": True}
    for text in ("hello", "so <f=two>7</f>"):
        assert takes("structural_tag", once, text)
    ended = walk("structural_tag", once)
    assert ended.take("so <f=two>7</f>")
    assert ended.allowed() == []
    both = {**first, "stop_after_first": True}
    only = walk("structural_tag", both)
    assert not walk("structural_tag", both).take("so")
    assert only.take("<f=two>7</f>")
    assert only.allowed() == []
    assert re.match(r"<f=one>|<f=two>|<\|im_start\|>three", walk("structural_tag", both).finish(
        random.Random(1)
    ))  # fmt: skip


OTHER_FORMS = [
    ("json_schema", ONE, '{"a": true, "b": [null]}', '{"a": 1'),
    ("json_object", None, "{}", "["), ("regex", "<f=.", "<f=x", "<g"),
    ("choice", ["yes", "no"], "no", "na"), ("lark", 'start: "a" b*\nb: "x"', "axx", "ay"),
    ("grammar", 'root ::= "a" item*\nitem ::= "x"', "axx", "ay"),
]  # fmt: skip


def test_an_answer_may_have_another_structure_instead_of_tags(subtests):
    for (kind, other, text, wrong), lead in product(OTHER_FORMS, ("", "<|im_start|>so")):
        with subtests.test(kind=kind, lead=lead):
            fields = {"kind": kind, "value": other, "param": "text.format"}
            value = {**TAG, "required": True, "or": fields}
            for one in (text, "<f=two>7</f>", "<f=two>7</f>\n<|im_start|>three null<|im_start|>"):
                assert takes("structural_tag", value, lead + one, lead=lead), one
            for one in (wrong, text + " <f=two>7</f>", "so", "<f=two>x"):
                assert not takes("structural_tag", value, lead + one, lead=lead), one
            once = {**value, "stop_after_first": True}
            assert takes("structural_tag", once, "<f=two>7</f>")
            assert takes("structural_tag", once, text)
            assert not takes("structural_tag", once, "<f=two>7</f><f=two>7</f>")


def test_an_error_in_the_alternative_structure_is_named() -> None:
    other = {"kind": "json_schema", "value": {"not": {}}, "param": "text.format.schema"}
    error = error_of("structural_tag", {**TAG, "required": True, "or": other})
    assert error.param == "text.format.schema"
    assert str(error).startswith("text.format.schema.not: ")
    other["lenient"] = True  # type: ignore[assignment]
    assert takes("structural_tag", {**TAG, "required": True, "or": other}, "7")


def test_an_invalid_schema_of_a_tag_is_named() -> None:
    tags = [TAG["structures"][0], {"begin": "<f=x>", "schema": {"not": {}}, "end": ""}]
    value = {"structures": tags, "triggers": ["<f="]}
    assert error_of("structural_tag", value).param == "field"
    tags[1]["param"] = "tools[1].function.parameters"
    error = error_of("structural_tag", value)
    assert error.param == "tools[1].function.parameters"
    assert str(error).startswith("tools[1].function.parameters.not: ")
    compiler().compile(Structure("structural_tag", value, "field", lenient=True))
    assert "triggers" in str(error_of("structural_tag", {**value, "triggers": ["<g"]}))
