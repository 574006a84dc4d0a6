"""The parts of a model on torch: one class for each kind of part."""

from pdserve.engine.models.layers.stored import HELD, Weights, expand, hold, rows
from pdserve.engine.models.layers.torch_part import (
    LayerStep,
    RopeTensors,
    Setup,
    TorchPart,
    make_part,
)
