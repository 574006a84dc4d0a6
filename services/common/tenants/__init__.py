"""API keys, rate limits, and fairness between them."""

from pdserve.services.common.tenants.keys import EVERYBODY, ApiKeys, Tenant, hashed, make_keys
from pdserve.services.common.tenants.rate_limits import (
    FILE,
    MEMORY,
    RateLimits,
    RateSettings,
    make_rate_limits,
)
