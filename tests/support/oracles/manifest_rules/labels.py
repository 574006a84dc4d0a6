"""Labels by which our objects know each other, and roles."""

NAME, INSTANCE = "app.kubernetes.io/name", "app.kubernetes.io/instance"
COMPONENT, POOL = "app.kubernetes.io/component", "pdserve.internal/pool"
WORKERS = ("prefill", "decode")
