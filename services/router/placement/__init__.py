"""The placement policy, which chooses workers for requests, the facts that it decides by, and the
queue of waiting requests."""

from pdserve.services.router.placement.facts import (
    FactsOfWorkers,
    PickedPrompts,
    PromisedChains,
    destination,
    prompt_key,
)
from pdserve.services.router.placement.policy import PromptFacts, Rules, decide, decode_costs
from pdserve.services.router.placement.waiting import (
    EMBEDDING,
    RecomputeBudget,
    WaitingQueue,
    WaitReason,
    WorkerPool,
)
