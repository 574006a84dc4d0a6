"""Line 7: questions to a reader who has not seen the code; no program can ask them."""

import json

print(json.dumps({"ok": True, "skipped": "questions and answers are in the closing note"}))
