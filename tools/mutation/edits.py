"""Small changes of meaning in Python and C++ source, each of which a test should notice. Pure."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "+"),
}
LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}
CPP_EDITS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<= )==(?= )", "!="),
        (r"(?<= )!=(?= )", "=="),
        (r"(?<= )<(?= )", "<="),
        (r"(?<= )<=(?= )", "<"),
        (r"(?<= )>(?= )", ">="),
        (r"(?<= )>=(?= )", ">"),
        (r"(?<= )&&(?= )", "||"),
        (r"(?<= )\|\|(?= )", "&&"),
        (r"(?<= )\+(?= )", "-"),
        (r"(?<= )-(?= )", "+"),
        (r"(?<= )\*(?= )", "+"),
        (r"(?<= )/(?= )", "*"),
        (r"(?<= )%(?= )", "+"),
        (r"(?<= )\+=(?= )", "-="),
        (r"(?<=[ (,\[])\d+(?=[ ),;\]])", "{+1}"),
        (r"\btrue\b", "false"),
        (r"\bfalse\b", "true"),
    )
]
# Lines whose change does not compile, or does not affect behaviour.
CPP_SKIPPED = re.compile(
    r"\s*(#|//|/?\*|template\b|static_assert|using\b|namespace\b|extern\b|asm\b)"
)


@dataclass(frozen=True)
class Edit:
    """Replacement of the characters [start, end) of a source file by `text`; `line` counts from
    1."""

    line: int
    start: int
    end: int
    text: str


def apply(source: str, edit: Edit) -> str:
    return source[: edit.start] + edit.text + source[edit.end :]


class _PythonEdits(ast.NodeVisitor):
    """Collect the edits of one module."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[Edit] = []
        self._lines = [0]  # offset of each line's first character
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._texts = source.splitlines()

    def _offset(self, line: int, column: int) -> int:
        """The offset of an ast position, whose column counts UTF-8 bytes."""
        text = self._texts[line - 1] if line <= len(self._texts) else ""
        return self._lines[line - 1] + len(text.encode()[:column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._offset(node.lineno, node.col_offset)
        return start, self._offset(node.end_lineno, node.end_col_offset)

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        self.found.append(Edit(node.lineno, *self._span(node), text))

    def _between(self, left: ast.expr, right: ast.expr, pattern: str, text: str) -> None:
        """Replace an operator, which stands between its operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        if match := re.search(pattern, self.source[start:end]):
            line = self.source.count("\n", 0, start + match.start()) + 1
            self.found.append(Edit(line, start + match.start(), start + match.end(), text))

    def visit_Compare(self, node: ast.Compare) -> None:
        for (left, right), op in zip(
            pairwise([node.left, *node.comparators]), node.ops, strict=True
        ):
            pattern, text = COMPARISONS[type(op)]
            self._between(left, right, pattern, text)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        pattern, text = (r"\band\b", "or") if isinstance(node.op, ast.And) else (r"\bor\b", "and")
        for left, right in pairwise(node.values):
            self._between(left, right, pattern, text)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC:
            symbol, text = ARITHMETIC[type(node.op)]
            self._between(node.left, node.right, re.escape(symbol), text)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, end = self._span(node.operand)
            self._replace(node, f"({self.source[start:end]})")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        opposite = {ast.Add: "-=", ast.Sub: "+="}.get(type(node.op))
        if opposite:
            self._between(node.target, node.value, r"[+-]=", opposite)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._replace(node, repr(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip f-strings: positions within them are not exact before Python 3.12."""

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._replace(node, "return None")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")  # not visited: its words do not affect behaviour

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break")

    def _visit_condition(self, node: ast.If | ast.While | ast.IfExp) -> None:
        start, end = self._span(node.test)
        self.found.append(Edit(node.test.lineno, start, end, f"not ({self.source[start:end]})"))
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _visit_condition

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            if isinstance(call.func, ast.Attribute) and call.func.attr in LOGGING:
                return
            self._replace(node, "pass")
        self.generic_visit(node)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Visit the defaults and the body, without annotations and decorators."""
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        """Visit the arguments of a lambda."""
        for default in node.defaults:
            self.visit(default)


def python_edits(source: str) -> list[Edit]:
    visitor = _PythonEdits(source)
    visitor.visit(ast.parse(source))
    return visitor.found


def cpp_edits(source: str) -> list[Edit]:
    return list(_cpp_edits(source))


def _cpp_edits(source: str) -> Iterator[Edit]:
    offset = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        code = re.sub(r'"(?:\\.|[^"\\])*"', lambda m: " " * len(m[0]), line)
        code = code.split("//")[0]
        if not CPP_SKIPPED.match(code):
            for pattern, replacement in CPP_EDITS:
                for match in pattern.finditer(code):
                    text = str(int(match[0]) + 1) if replacement == "{+1}" else replacement
                    yield Edit(number, offset + match.start(), offset + match.end(), text)
        offset += len(line)
