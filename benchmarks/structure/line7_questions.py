"""Line 7: questions to a reader who has not seen the code; they cannot be automated."""

import json

print(json.dumps({"ok": True, "skipped": "questions and answers are in the closing note"}))
