"""Constraints on an answer besides its sampling: bad words, a grammar, a thinking budget; pure.

They consist of token ids. The caller has the model's tokenizer: it encodes `texts_of` a request and
compiles its structure.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdserve.engine.api import MAX_SEQUENCE_IDS
from pdserve.text.errors import TextError
from pdserve.text.request import RequestedSampling, Structure, oversize
from pdserve.text.tokenizer import Vocabulary

NEAR_END = 4096  # ids at a prompt's end, searched for open reasoning
LAST = 2 * MAX_SEQUENCE_IDS  # ids at the end, in which a template may begin or end reasoning

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints for all choices and prompts of one request; empty ones bind nothing."""

    bad_words: tuple[Ids, ...] = ()
    grammar: str = ""  # its source
    grammar_after: Ids = ()  # the grammar binds what follows these; empty: all
    grammar_after_text: str = ""  # the same as text
    thinking_budget: int | None = None
    thinking_start: Ids = ()
    thinking_end: Ids = ()

    def of_prompt(
        self, prompt: Sequence[int], vocabulary: Vocabulary, *, continues: bool
    ) -> "Constraints":
        """Return the constraints on one prompt's answer; `continues`: the answer continues it.

        If the prompt has already begun or ended the reasoning, the answer does not contain the tag
        that marks it.
        """
        after, start = self.grammar_after, self.thinking_start
        if not (after or start):
            return self
        closing = self.grammar_after_text.rstrip()
        if closing and _end_text(prompt, vocabulary).endswith(closing):
            after = ()
        begin = vocabulary.decode(start, skip_special_tokens=False).strip()
        if (begin and _end_text(prompt, vocabulary).endswith(begin)) or (
            continues and _last_index(prompt, start) > _last_index(prompt, self.thinking_end)
        ):
            start = ()
        return replace(self, grammar_after=after, thinking_start=start)


def texts_of(requested: RequestedSampling) -> list[str]:
    """Return the texts whose token ids `constraints_of` needs."""
    r = requested
    words = [form for word in r.bad_words for form in _as_written(word)]
    after = [r.structure_after] if r.structure is not None and r.structure_after else []
    tags = r.thinking_tags or () if r.thinking_budget is not None else ()
    return list(dict.fromkeys((*words, *after, *tags)))


def check_structure(requested: RequestedSampling, structure: Structure) -> None:
    """Check that nothing else decides where the answer ends, and that the structure is not too
    large. The answer ends where its structure does. Raises TextError that names the field."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(requested, name):
            raise TextError(f"{name} cannot be combined with {structure.param}", name)
    if reason := oversize(structure):
        raise TextError(f"{structure.param} is too large: {reason}", structure.param)


def constraints_of(
    requested: RequestedSampling,
    ids: Mapping[str, Sequence[int]],
    grammar: str,
    vocabulary: Vocabulary,
) -> Constraints:
    """Return the constraints of a request. `ids`: of `texts_of` the request, each as it continues
    another text; `grammar`: the source of its structure. Raises TextError that names the field."""
    r = requested
    words = [tuple(ids[form]) for word in r.bad_words for form in _as_written(word)]
    if any(len(word) > MAX_SEQUENCE_IDS for word in words):
        raise TextError(f"a bad word must have at most {MAX_SEQUENCE_IDS} tokens", "bad_words")
    after: Ids = ()
    if r.structure is not None and r.structure_after:
        after = _tag_ids(r.structure_after, ids, vocabulary, r.structure.param)
    start: Ids = ()
    end: Ids = ()
    if r.thinking_budget is not None and r.thinking_tags is not None:
        first, last = r.thinking_tags
        if ids[first]:
            start = _tag_ids(first, ids, vocabulary, r.thinking_budget_field)
        end = _tag_ids(last, ids, vocabulary, r.thinking_budget_field)
    return Constraints(
        bad_words=tuple(dict.fromkeys(words)),
        grammar=grammar,
        grammar_after=after,
        grammar_after_text=r.structure_after if after else "",
        thinking_budget=r.thinking_budget,
        thinking_start=start,
        thinking_end=end,
    )


def _as_written(word: str) -> tuple[str, str]:
    """Return a bad word as it occurs within a text: not after a space, and after one."""
    bare = word.lstrip()
    return bare, f" {bare}"


def _tag_ids(tag: str, ids: Mapping[str, Sequence[int]], vocabulary: Vocabulary, param: str) -> Ids:
    """Return the ids of a reasoning tag. Raises TextError if the model cannot write the tag."""
    tag_ids = tuple(ids[tag])
    if len(tag_ids) > MAX_SEQUENCE_IDS:
        raise TextError(f"{param}: the tag {tag[:MAX_SEQUENCE_IDS]!r} has too many tokens", param)
    if not tag_ids or vocabulary.decode(tag_ids, skip_special_tokens=False).strip() != tag.strip():
        raise TextError(f"{param}: the model cannot write the tag {tag!r}", param)
    return tag_ids


def _end_text(prompt: Sequence[int], vocabulary: Vocabulary) -> str:
    """Return the end of a prompt's text, without trailing spaces."""
    return vocabulary.decode(prompt[-LAST:], skip_special_tokens=False).rstrip()


def _last_index(prompt: Sequence[int], part: Sequence[int]) -> int:
    """Return where a sequence occurs last near a prompt's end; -1 if it does not, or is empty."""
    if not part:
        return -1
    data, needle = array("I", prompt[-NEAR_END:]).tobytes(), array("I", part).tobytes()
    size = array("I").itemsize
    offset = data.rfind(needle)
    while offset > 0 and offset % size:
        offset = data.rfind(needle, 0, offset + len(needle) - 1)
    return offset // size if offset >= 0 else -1
