"""What binds an answer beside its sampling: from the texts a client wrote to what workers get."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.api.sampling_bounds import MAX_SEQUENCE_IDS
from pdserve.gateway.sampling import RequestedSampling, check_structure
from pdserve.gateway.text.errors import TextError
from pdserve.gateway.text.vocabulary import Vocabulary
from pdserve.gateway.text_processes.pool import LoadedText
from pdserve.protos.common_pb2 import Grammar, SamplingParams, ThinkingBudget, TokenSequence

NEAR_END = 4096  # ids at the end of a prompt, where it is looked up whether thinking is under way
LAST = 2 * MAX_SEQUENCE_IDS  # ids at its end, in which a template may begin or end the thinking


@dataclass(frozen=True, slots=True)
class Constraints:
    """Of all choices and prompts of one request; empty ones bind nothing."""

    bad_words: Sequence[Sequence[int]] = ()
    grammar: Grammar | None = None
    begins_after: str = ""  # as text what grammar.begins_after has
    thinking: ThinkingBudget | None = None

    def bind(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocabulary: Vocabulary,
        *,
        continues: bool,
    ) -> None:
        """Adds them to the parameters of a prompt; `continues`: the answer goes on with its text.

        A prompt may have begun the answer's thinking already, or ended it: then nothing in the
        answer says where it begins or ends.
        """
        params.bad_words.extend(TokenSequence(ids=ids) for ids in self.bad_words)
        if self.grammar is not None:
            params.grammar.CopyFrom(self.grammar)
            if self.begins_after and _end(prompt, vocabulary).endswith(self.begins_after.rstrip()):
                params.grammar.ClearField("begins_after")
        if self.thinking is not None:
            params.thinking.CopyFrom(self.thinking)
            begin = vocabulary.decode(self.thinking.start_ids, skip_special_tokens=False).strip()
            if (begin and _end(prompt, vocabulary).endswith(begin)) or (
                continues and _is_open(prompt, self.thinking)
            ):
                params.thinking.ClearField("start_ids")


async def constraints_of(
    requested: RequestedSampling, text: LoadedText, owner: bytes
) -> Constraints:
    """Raises TextError or ServiceError that names the field; ServiceError UNAVAILABLE."""
    r = requested
    if r.structure is not None:
        check_structure(r, r.structure)
    words = list(dict.fromkeys(v for word in r.bad_words for v in _as_written(word)))
    after = [r.structure_after] if r.structure is not None and r.structure_after else []
    tags = list(r.thinking_tags or ()) if r.thinking_budget is not None else []
    found: list[list[int]] = []
    if texts := [*words, *after, *tags]:
        found = await text.processes.sequences(owner, texts)
    ids = dict(zip(texts, found, strict=True))
    if any(len(ids[word]) > MAX_SEQUENCE_IDS for word in words):
        raise TextError(f"a bad word may have {MAX_SEQUENCE_IDS} tokens at most", "bad_words")
    grammar = None
    if r.structure is not None:
        for tag in after:
            _check_tag(tag, ids[tag], text.vocabulary, r.structure.param)
        source = await text.processes.grammar(owner, r.structure)
        grammar = Grammar(source=source, begins_after=ids[after[0]] if after else ())
    thinking = None
    if r.thinking_budget is not None:
        start, end = (ids[tag] for tag in tags)
        if start:
            _check_tag(tags[0], start, text.vocabulary, r.thinking_budget_field)
        _check_tag(tags[1], end, text.vocabulary, r.thinking_budget_field)
        thinking = ThinkingBudget(max_tokens=r.thinking_budget, start_ids=start, end_ids=end)
    return Constraints(
        bad_words=list(dict.fromkeys(tuple(ids[word]) for word in words)),
        grammar=grammar,
        begins_after=r.structure_after,
        thinking=thinking,
    )


def _as_written(word: str) -> tuple[str, str]:
    """A bad word within a text: after a space, and after what is none."""
    bare = word.lstrip()
    return bare, f" {bare}"


def _check_tag(tag: str, ids: Sequence[int], vocabulary: Vocabulary, param: str) -> None:
    """Raises TextError if a model cannot write a tag of its thinking."""
    if len(ids) > MAX_SEQUENCE_IDS:
        raise TextError(f"{param}: {tag[:MAX_SEQUENCE_IDS]!r} has too many tokens", param)
    if not ids or vocabulary.decode(ids, skip_special_tokens=False).strip() != tag.strip():
        raise TextError(f"{param}: the model cannot write {tag!r}", param)


def _end(prompt: Sequence[int], vocabulary: Vocabulary) -> str:
    """What a prompt ends with, but for spaces."""
    return vocabulary.decode(prompt[-LAST:], skip_special_tokens=False).rstrip()


def _is_open(prompt: Sequence[int], thinking: ThinkingBudget) -> bool:
    """Whether a text begins a thinking that it does not end."""
    end = list(prompt[-NEAR_END:])
    return _last(end, thinking.start_ids) > _last(end, thinking.end_ids)


def _last(ids: Sequence[int], part: Sequence[int]) -> int:
    """Where a sequence occurs last; -1 if it does not, or is empty."""
    if not part:
        return -1
    data, wanted = array("I", ids).tobytes(), array("I", part).tobytes()
    size = array("I").itemsize
    at = data.rfind(wanted)
    while at > 0 and at % size:
        at = data.rfind(wanted, 0, at + len(wanted) - 1)
    return at // size if at >= 0 else -1
