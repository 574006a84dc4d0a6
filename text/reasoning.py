"""The reasoning formats of model families: a row for each, found by name or by chat template."""

from collections.abc import Callable, Sequence

from pdserve.text.parsing import (
    HarmonyStream,
    ReasoningFamily,
    ReasoningStream,
    harmony,
)

THINK, THINK_END = "<think>", "</think>"
# Tags around the text of an answer.
KIMI_K3_ANSWER_TAGS = (
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    "<|close|>message<|sep|>",
)
MUSE_MESSAGE = "<|message|>"
_MUSE_NEXT = "<|eom|><|start|>assistant"
_MUSE_SELF, _MUSE_USER = f"to=self{MUSE_MESSAGE}", f"to=user{MUSE_MESSAGE}"
MUSE_ANSWER_TAGS = _MUSE_NEXT, "<|eot|>", f" {_MUSE_USER}", _MUSE_USER
_SOLAR_THINK, _SOLAR_NEXT, _SOLAR_CONTENT = "<|think|>", "<|end|><|begin|>assistant", "<|content|>"
SOLAR_ANSWER_TAGS = _SOLAR_CONTENT, _SOLAR_NEXT, "<|end|>", "<|tool_calls|>", "<|calls|>"


def _between(
    name: str,
    begin: str,
    end: str,
    matches: str | Callable[[str], bool] = "",
    *,
    special: Sequence[str] | None = None,
    answers: Sequence[str] = (),
    answer_tags: Sequence[str] = (),
) -> ReasoningFamily:
    """Return a family with reasoning between two tags.

    `matches`: a text in its chat templates, by default the end tag, or a function that recognizes a
    template. `special`: by default both tags. `answers` as for ReasoningStream, `answer_tags` as
    for ReasoningFamily.
    """
    text = "" if callable(matches) else matches or end
    return ReasoningFamily(
        name,
        matches if callable(matches) else lambda template: text in template,
        lambda open: ReasoningStream(begin, end, open=open, answers=answers),
        begin,
        end,
        after=end,
        special=(begin, end) if special is None else special,
        answer_tags=answer_tags,
    )


def _around_lines(name: str) -> tuple[str, ...]:
    """Return the tags around an answer's text, each of which may be on a line by itself."""
    begin, end = f"<{name}>", f"</{name}>"
    return f"{begin}\n", begin, f"\n{end}\n", f"\n{end}", end


_FAMILIES = (
    _between("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    # Sentences instead of tags.
    _between("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", special=()),
    _between(  # Command R7B and Command A
        "command_a",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answer_tags=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    _between(  # ERNIE 4.5 and Granite 3.3; templates of MiniMax have results of tools in this tag
        "ernie45",
        THINK,
        THINK_END,
        lambda t: THINK_END in t and "<response>" in t and "minimax" not in t,
        answer_tags=_around_lines("response"),
    ),
    _between("gemma4", "<|channel>thought", "<channel|>", answer_tags=("<channel|>",)),
    ReasoningFamily(  # Harmony messages on the channel "analysis"
        "gpt_oss",
        harmony.is_template,
        lambda open: HarmonyStream(calls=False),
        THINK,
        THINK_END,
        after=f"{harmony.CHANNEL}final",  # <|constrain|>json may follow
        lead=harmony.MESSAGE,
        special=harmony.SPECIAL,
        written=(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.END),
        opening=harmony.FINAL,
    ),
    _between(
        "hunyuan_a13b",
        THINK,
        THINK_END,
        lambda template: THINK_END in template and "<answer>" in template,
        answer_tags=_around_lines("answer"),
    ),
    _between(
        "hy3",
        "<think:opensource>",
        "</think:opensource>",
        lambda template: "</think{" in template or "</think:opensource>" in template,
    ),
    _between(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|open|>",
        special=("<|open|>", "<|close|>", "<|sep|>"),
        answers=KIMI_K3_ANSWER_TAGS[:1],
        answer_tags=KIMI_K3_ANSWER_TAGS,
    ),
    _between("minimax_m3", "<mm:think>", "</mm:think>"),
    _between("mistral", "[THINK]", "[/THINK]", "[THINK]"),  # Magistral and Ministral
    ReasoningFamily(  # messages to the model itself, before those to the user
        "muse_glimmer",
        lambda template: "<|eom|>" in template and "to=self" in template,
        lambda open: ReasoningStream(_MUSE_SELF, _MUSE_NEXT, open=open, several=True),
        _MUSE_SELF,
        _MUSE_NEXT,
        after=_MUSE_USER,
        special=(MUSE_MESSAGE, "<|eom|>", "<|start|>"),
        answer_tags=MUSE_ANSWER_TAGS,
    ),
    _between("seed_oss", "<seed:think>", "</seed:think>", "<seed:think>"),
    _between(  # a message before the answer's message
        "solar",
        _SOLAR_THINK,
        _SOLAR_NEXT,
        lambda t: f"assistant{_SOLAR_THINK}" in t and _SOLAR_CONTENT in t,
        special=(_SOLAR_THINK, "<|end|>", "<|begin|>"),
        answer_tags=SOLAR_ANSWER_TAGS,
    ),
    _between("think", THINK, THINK_END),  # Qwen 3, DeepSeek, GLM, MiniMax, Kimi and many others
)
_BY_NAME = {family.name: family for family in sorted(_FAMILIES, key=lambda family: family.name)}


def reasoning_parser_names() -> tuple[str, ...]:
    """Return the names of all reasoning parsers, sorted."""
    return tuple(_BY_NAME)


def reasoning_family(name: str) -> ReasoningFamily | None:
    """Return the family of that name, or None."""
    return _BY_NAME.get(name)


def reasoning_family_of(template: str) -> str:
    """Return the name of a chat template's family; empty if its model does not reason."""
    return next((name for name, family in _BY_NAME.items() if family.matches(template)), "")
