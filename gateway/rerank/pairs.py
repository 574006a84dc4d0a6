"""The pairs of query and document to score, and the prompt from which a model scores each pair.

A model with a classification head reads a pair as its tokenizer frames it, as BERT between [CLS]
and [SEP]. If the tokenizer puts nothing between two texts, and for a reranker that answers yes or
no, the prompt is that of Qwen3-Reranker's model card.

Query, document and the fixed text around them are tokenized separately, so that a client's text
never becomes a special token. In the prompt of Qwen3-Reranker the document follows a line break,
where Qwen's tokenizer always starts a new token.
"""

import asyncio
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.model_texts import ModelTexts, check_room
from pdserve.gateway.sampling import refuse
from pdserve.services.common.capabilities import Scoring, scoring_of

BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QUERY_END = "\n"
LABEL = "<Document>:"
ANSWER_TOKENS = 1  # yes or no
MAX_CALL_TOKENS = 1 << 22  # of all prompts of a call


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Documents to score for queries: one query for all documents, or one query per document."""

    api: str  # name in errors
    operation: str  # name in traces
    model: str
    queries: Sequence[str]
    documents: Sequence[str]
    names: tuple[str, str]  # of the fields with queries and documents
    instruction: str | None = None  # to a reranker
    kept_tokens: int | None = None  # in a prompt; -1: as many as fit; None: nothing is cut
    cache_salt: bytes = b""
    priority: int = 0


class PairIds(Collection[int]):
    """The token ids of a pair's prompt, as parts that the prompts of one call share: separate
    copies for 2,048 prompts with a long query would take gigabytes."""

    def __init__(self, *parts: Sequence[int]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts)

    def __contains__(self, token: object) -> bool:
        return any(token in part for part in self._parts)


@dataclass(frozen=True, slots=True)
class PairFrame:
    """The fixed parts of a prompt: token ids before, between and after the texts, and text that is
    tokenized together with a query or a document."""

    before: Sequence[int]
    between: Sequence[int]
    after: Sequence[int]
    query_start: str = ""
    query_end: str = ""
    query_len: int = 0  # of query_start and query_end, in tokens
    keeps_query: bool = False  # only the document may be cut
    label: str = ""  # before a document
    label_len: int = 0  # in tokens

    @property
    def num_ids(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    @property
    def min_texts(self) -> int:
        """Number of tokens of the shortest texts: one of the query, one of the document, and those
        of the text around them."""
        return self.query_len + self.label_len + 2

    def cut(
        self, query: Sequence[int], document: Sequence[int], room: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Cut the ends of a query and a document to `room` tokens together: that of the document
        alone if the frame keeps the query, otherwise the longer of both first, as transformers'
        strategy longest_first does."""
        if len(query) + len(document) <= room:
            return query, document
        if self.keeps_query:
            return query, document[: room - len(query)]
        half = room // 2
        if len(query) <= len(document):
            num_query = min(len(query), half)
        else:
            num_query = room - min(len(document), half)
        return query[:num_query], document[: room - num_query]


class PairPrompts:
    """Builds the prompts of a request to one model. Methods raise ServiceError that names a
    field."""

    def __init__(
        self, texts: ModelTexts, model: ServedModel, request: ScoreRequest, owner: bytes
    ) -> None:
        self._texts = texts
        self._model = model
        self._request = request
        self._owner = owner
        self._has_head = scoring_of(model.card) is Scoring.HEAD
        self._answer_len = 0 if self._has_head else ANSWER_TOKENS

    async def build(self) -> Sequence[Collection[int]]:
        """Return the token ids of the prompt of each pair, in the order of the documents."""
        request = self._request
        query_field, document_field = request.names
        frame = await self._frame()
        room = self._room(frame)
        query_ids: dict[str, Sequence[int]] = {}  # by query
        prompts: list[PairIds] = []
        num_tokens = 0
        for number, document in enumerate(request.documents):
            query = request.queries[number if len(request.queries) > 1 else 0]
            if query not in query_ids:
                text = f"{frame.query_start}{query}{frame.query_end}"
                query_ids[query] = await self._ids(text, query_field)
                self._check_query(frame, query_ids[query], room)
            ids: Sequence[int] = await self._ids(f"{frame.label}{document}", document_field)
            pair = query_ids[query], ids
            if room is not None:
                pair = frame.cut(*pair, room)
            prompt = PairIds(frame.before, pair[0], frame.between, pair[1], frame.after)
            check_room(len(prompt), self._answer_len, self._model, document_field)
            num_tokens += len(prompt)
            if num_tokens > MAX_CALL_TOKENS:
                raise refuse(
                    document_field,
                    f"the prompts of all {document_field} have more than {MAX_CALL_TOKENS} tokens "
                    "in total",
                )
            prompts.append(prompt)
            await asyncio.sleep(0)
        return prompts

    async def _frame(self) -> PairFrame:
        before, between, after = self._model.text.frames.pair
        frame = PairFrame(before, between, after)
        if self._has_head and frame.between:
            if self._request.instruction is not None:
                raise refuse(
                    "instruction", "instruction: this reranker does not support an instruction"
                )
            return frame
        instruction, (query_field, document_field) = self._request.instruction, self._request.names
        field = query_field if instruction is None else "instruction"  # for errors
        query_start = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: "
        frame = PairFrame(
            await self._special_ids(BEFORE),
            (),
            await self._special_ids(AFTER),
            query_start=query_start,
            query_end=QUERY_END,
            query_len=len(await self._ids(f"{query_start}{QUERY_END}", field)),
            keeps_query=True,
            label=f"{LABEL} ",
            label_len=len(await self._ids(LABEL, document_field)),
        )
        check_room(frame.num_ids + frame.min_texts, self._answer_len, self._model, field)
        return frame

    async def _special_ids(self, text: str) -> "array[int]":
        return await self._ids(text, "model", special=True)

    async def _ids(self, text: str, param: str, *, special: bool = False) -> "array[int]":
        ids = await self._texts.text_ids(
            self._model,
            text,
            param,
            self._owner,
            add_special_tokens=False,
            parse_special=special,
        )
        return array("I", ids)

    def _room(self, frame: PairFrame) -> int | None:
        """Return how many tokens query and document may have together; None if they are not cut.
        Raises ServiceError if the request's limit is out of range."""
        kept = self._request.kept_tokens
        if kept is None:
            return None
        min_len, max_len = frame.num_ids + frame.min_texts, self._max_len
        if kept != -1 and not min_len <= kept <= max_len:
            allowed = f"-1, or from {min_len} to {max_len}"
            raise refuse("truncate_prompt_tokens", f"truncate_prompt_tokens must be {allowed}")
        return max(frame.min_texts, (max_len if kept == -1 else kept) - frame.num_ids)

    @property
    def _max_len(self) -> int:
        """Maximum number of tokens of a prompt."""
        return self._model.card.context_len - self._answer_len

    def _check_query(self, frame: PairFrame, ids: Sequence[int], room: int | None) -> None:
        """Check that a query leaves room for a document."""
        field = self._request.names[0]
        if room is None:
            check_room(frame.num_ids + len(ids), self._answer_len, self._model, field)
        elif frame.keeps_query and len(ids) + frame.label_len >= room:
            min_len = frame.num_ids + len(ids) + frame.label_len + 1
            if self._request.kept_tokens != -1 and min_len <= self._max_len:
                raise refuse(
                    "truncate_prompt_tokens",
                    f"truncate_prompt_tokens must be at least {min_len}: {field} is not cut, and "
                    "the document must keep a token",
                )
            raise refuse(
                field,
                f"{field}: instruction and query have {len(ids)} tokens, which leave no room for a "
                f"document: both may have {room} tokens together",
            )
