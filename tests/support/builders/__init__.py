"""Make the inputs of tests: models, checkpoints, requests, engines, hostile data."""
