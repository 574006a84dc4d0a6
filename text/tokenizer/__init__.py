"""Tokenizers: convert text to token ids, and token ids to text."""

from pdserve.text.tokenizer.choice_text import ChoiceText, StopMatcher, TextUpdate
from pdserve.text.tokenizer.vocabulary import (
    Frames,
    StoredTokens,
    TextModelInfo,
    Vocabulary,
    store_tokens,
    stored_vocabulary,
)
