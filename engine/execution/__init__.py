"""Runs the steps that the scheduler plans: builds the batch, runs the model's forward pass, samples
tokens."""

from pdserve.engine.execution.memory import HOST_SHARE, free_host_bytes, keep_freed_memory
from pdserve.engine.execution.runner import (
    Batch,
    DeviceLost,
    DeviceModel,
    GroupTable,
    Ints,
    Model,
    ModelRunner,
    UnreadTokens,
    with_states,
)
from pdserve.engine.execution.sampler import Sampler, plan_ahead
