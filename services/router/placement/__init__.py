"""The placement policy, and the facts that it decides by."""

from pdserve.services.router.placement.facts import FactsOfWorkers, destination
from pdserve.services.router.placement.policy import PromptFacts, Rules, decide, decode_costs
from pdserve.services.router.placement.promises import PickedPrompts, PromisedChains, prompt_key
from pdserve.services.router.placement.rebalance import Pressure, Running, drain_order, relief_order
from pdserve.services.router.placement.recompute_budget import RecomputeBudget
from pdserve.services.router.placement.waiting import WaitingQueue, WaitReason
