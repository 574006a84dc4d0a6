"""RoBERTa and XLM-RoBERTa: BERT whose positions begin after the id of padding and do not count
padding (arXiv:1907.11692, arXiv:1911.02116)."""

from dataclasses import replace

from pdserve.engine.architectures.bert import UNUSED, parse_bert, stored_bert
from pdserve.engine.checkpoints import Checkpoint, View
from pdserve.engine.models import (
    CLASSIFIER_DENSE,
    CLASSIFIER_OUT,
    Classifier,
    ModelConfig,
    ModelSpec,
)
from pdserve.engine.models.hf_config import HfConfig, has_sigmoid, integer

PREFIX = "roberta."
HEAD = {CLASSIFIER_DENSE: "classifier.dense", CLASSIFIER_OUT: "classifier.out_proj"}


def parse(hf: HfConfig) -> ModelConfig:
    return parse_bert(hf, integer(hf, "pad_token_id", 1, minimum=0))


def parse_scorer(hf: HfConfig) -> ModelConfig:
    """Parse the config of RoBERTa or XLM-RoBERTa with a head that scores pairs of texts."""
    head = Classifier("cls", activation="tanh", sigmoid=has_sigmoid(hf))
    return replace(parse(hf), classifier=head)


def stored(config: ModelConfig) -> dict[str, View]:
    return stored_bert(config, PREFIX, HEAD)


def is_unused(config: ModelConfig, checkpoint: Checkpoint, name: str) -> bool:
    return name.removeprefix(PREFIX).startswith(UNUSED) or name.endswith("position_ids")


SCORER = ModelSpec(
    ("XLMRobertaForSequenceClassification", "RobertaForSequenceClassification"),
    parse_scorer,
    stored=stored,
    unused=is_unused,
)
SPEC = ModelSpec(("XLMRobertaModel", "RobertaModel"), parse, stored=stored, unused=is_unused)
