"""A config.json of any known architecture."""

import json
from pathlib import Path
from random import Random

from builders.tiny_models import ARCHITECTURES, MULTIMODAL, write_tiny

from fuzz.mutate import change
from pdserve.engine.architectures import parse_config
from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.models import UnsupportedModel


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        folders = [write_tiny(folder / name, name) for name in (*ARCHITECTURES, *MULTIMODAL)]
        self._configs = [json.loads((one / "config.json").read_text()) for one in folders]

    def case(self, rng: Random) -> str:
        config = rng.choice(self._configs)
        for _ in range(rng.randint(1, 3)):
            config = change(rng, config)
            if not isinstance(config, dict):
                config = {}
        try:
            parse_config(config)
        except UnsupportedModel:
            return "unsupported"
        except CheckpointError:
            return "refused"
        return "read"
