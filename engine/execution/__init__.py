"""Runs the steps that the scheduler plans: batch, forward pass, sampling."""

from pdserve.engine.execution.batch import Batch, GroupTable, Ints, UnreadTokens
from pdserve.engine.execution.memory import HOST_SHARE, free_host_bytes, keep_freed_memory
from pdserve.engine.execution.runner import DeviceLost, DeviceModel, Model, ModelRunner, with_states
from pdserve.engine.execution.sampler import Sampler, plan_ahead
