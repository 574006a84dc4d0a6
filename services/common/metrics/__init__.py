"""Prometheus metrics of every process."""

from pdserve.services.common.metrics.observations import Observations
