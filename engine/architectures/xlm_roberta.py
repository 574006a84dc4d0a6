"""RoBERTa and XLM-RoBERTa: BERT whose positions begin after the id of padding (arXiv:1907.11692,
arXiv:1911.02116)."""

from pdserve.engine.architectures.bert import UNUSED, parse_bert, stored_bert
from pdserve.engine.checkpoints import Checkpoint, View
from pdserve.engine.models import ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import HfConfig, integer

PREFIX = "roberta."


def parse(hf: HfConfig) -> ModelConfig:
    return parse_bert(hf, integer(hf, "pad_token_id", 1, minimum=0) + 1)


def stored(config: ModelConfig) -> dict[str, View]:
    return stored_bert(config, PREFIX)


def is_unused(config: ModelConfig, checkpoint: Checkpoint, name: str) -> bool:
    return name.removeprefix(PREFIX).startswith(UNUSED) or name.endswith("position_ids")


SPEC = ModelSpec(("XLMRobertaModel", "RobertaModel"), parse, stored=stored, unused=is_unused)
