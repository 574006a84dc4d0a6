"""A decode worker process whose engine is controlled by files, started as `python -m
fakes.odd_worker ROUTER FOLDER MODEL TOKEN_S`.

While FOLDER/hang exists a forward pass does not return (FOLDER/hung shows that one has begun);
FOLDER/slow holds the seconds that the next pass takes. Its other steps take 20 ms, and it reports
TOKEN_S as the measured time of a chunk's token. It checks its engine more often than the product
does, and waits less long for it.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from builders.engine_kit import fake_engine
from systems.cluster_secret import SECRET
from systems.worker_kit import CARD

from fakes.decoder import FakeDecoder, fake_spec
from pdserve.engine.api import EngineConfig
from pdserve.engine.scheduling import StepMeter
from pdserve.services.common import stall_detector
from pdserve.services.decode.servicer import run
from pdserve.services.worker import process
from pdserve.services.worker.settings import DecodeSettings

FROZEN_S, LOOK_S, ENGINE_CLOSE_S = 2.5, 0.1, 2.0


class Obedient(FakeDecoder):
    def __init__(self, folder: Path) -> None:
        super().__init__(fake_spec())
        self._folder = folder

    def forward(self, host_batch: Any, kv: Any) -> Any:
        slow = self._folder / "slow"
        if slow.exists():
            seconds = float(slow.read_text())
            slow.unlink()
            time.sleep(seconds)
        while (self._folder / "hang").exists():
            (self._folder / "hung").touch()
            time.sleep(0.02)
        time.sleep(0.02)
        return super().forward(host_batch, kv)


def main() -> int:
    router, folder, model = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    token_s = float(sys.argv[4])

    def build(config: EngineConfig, progress: Callable[[str, float], None]) -> Any:
        engine = fake_engine(num_blocks=256, chunk_size=64, model=Obedient(folder))
        engine._meter = StepMeter(token_s)
        return engine, replace(CARD, name=model)

    process.build_engine = build
    stall_detector.FROZEN_S, process.LOOK_S, process.ENGINE_CLOSE_S = (
        FROZEN_S,
        LOOK_S,
        ENGINE_CLOSE_S,
    )
    settings = DecodeSettings(
        cluster_secret=(SECRET,),
        routers=(router,),
        kv_transport="tcp",
        shm_dir=str(folder),
        drain_s=1.0,
    )
    return run(settings, EngineConfig())


if __name__ == "__main__":
    sys.exit(main())
