"""Line 3: the openai client against every endpoint and field, and the shape of every error."""

import json

from pytest_line import run_tests

scripted = run_tests("tests/gateway/http", "tests/gateway/test_grpc_text.py")
real = run_tests("tests/system/test_clients.py")
print(json.dumps({"ok": scripted["ok"] and real["ok"], "scripted": scripted, "real": real}))
