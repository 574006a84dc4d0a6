"""The scheduler: decides which tokens each engine step computes, and which request owns which KV
blocks."""

from pdserve.engine.scheduling.block_tables import BlockTables
from pdserve.engine.scheduling.fairness import by_priority
from pdserve.engine.scheduling.job_table import JobTable, Reservation, discrepancy
from pdserve.engine.scheduling.limits import EngineLimits
from pdserve.engine.scheduling.plan import Outcome, Plan, Row, SampledToken
from pdserve.engine.scheduling.request_state import RequestState, Sequence
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.stats import EngineStats, StepMeter
from pdserve.engine.scheduling.step_progress import StepProgress, is_in_batch
