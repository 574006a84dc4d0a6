"""A tokenizer pool without processes, for tests of its users."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.text import Structure, TemplateInput, TooLong, UnsupportedTokenizer
from pdserve.text.model import TextModel
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import Rendered
from pdserve.text.workers import LoadedTokenizer


class InProcessText:
    """A model's tokenizer on a thread. `rendered`: the last prompt of a conversation."""

    alive = True
    rendered: Rendered

    def __init__(self, model: TextModel) -> None:
        self._model = model

    async def chat_ids(self, owner: bytes, request: TemplateInput, *, max_len: int) -> list[int]:
        def work() -> list[int]:
            template = self._model.template
            assert template is not None
            self.rendered = template.render(request)
            return _within(self._model.tokenizer.encode_rendered(self.rendered), max_len)

        return await asyncio.to_thread(work)

    async def text_ids(
        self,
        owner: bytes,
        text: str,
        *,
        add_special_tokens: bool,
        max_len: int,
        parse_special: bool = True,
    ) -> list[int]:
        def work() -> list[int]:
            ids = self._model.tokenizer.encode(
                text, add_special_tokens=add_special_tokens, parse_special=parse_special
            )
            return _within(ids, max_len)

        return await asyncio.to_thread(work)

    async def sequences(self, owner: bytes, texts: Sequence[str]) -> list[list[int]]:
        return [self._model.tokenizer.encode_within(text) for text in texts]

    async def grammar(self, owner: bytes, structure: Structure) -> str:
        return await asyncio.to_thread(self._model.grammar, structure)

    async def close(self) -> None:
        pass


def _within(ids: list[int], max_len: int) -> list[int]:
    if len(ids) > max_len:
        raise TooLong(f"the prompt has {len(ids)} tokens", len(ids))
    return ids


class InProcessPool:
    """Loads as a fork server does."""

    async def load(self, model_info: TextModelInfo, files: Mapping[str, bytes]) -> LoadedTokenizer:
        try:
            model = await asyncio.to_thread(TextModel, model_info, dict(files))
        except UnsupportedTokenizer:
            raise
        except BaseException as error:
            raise UnsupportedTokenizer(f"{type(error).__name__}: {error}") from None
        processes: Any = InProcessText(model)
        return LoadedTokenizer(
            processes,
            model.tokenizer,
            model.tokenizer.frames,
            model.template is not None,
            model.defaults,
            model.tool_parser,
            model.reasoning_parser,
        )

    async def close(self) -> None:
        pass
