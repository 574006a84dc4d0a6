"""Labels that connect pdserve's objects, and roles."""

NAME, INSTANCE = "app.kubernetes.io/name", "app.kubernetes.io/instance"
COMPONENT, POOL = "app.kubernetes.io/component", "pdserve.internal/pool"
WORKERS = ("prefill", "decode")
