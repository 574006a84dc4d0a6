"""Line 6: the shipped model's first answers make sense at default settings: each of five simple
questions is sent 20 times, and every answer must contain the right fact and end.

The model has 135 million parameters: a sixth question, which it is known to get wrong, is also sent
and not judged.
"""

import json
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from systems.fleet import Fleet

MODEL = "SmolLM2-135M-Instruct"
TRIES = 20
AT_ONCE = 4
MOST_REPEATS = 3  # of one sentence in an answer
MODEL_CARD = {"temperature": 0.2, "top_p": 0.9}
# question -> text in a right answer
QUESTIONS = {
    "What is the capital of Japan?": r"\btokyo\b",
    "What is the boiling point of water?": r"\b(100|212)",
    "What is the chemical symbol for water?": r"\bh2o\b|\bh₂o\b",
    "How many days are there in a week?": r"\b(7|seven)\b",
    "What is the opposite of hot?": r"\bcold\b",
}
MOST_BESIDE = 100  # tokens: it repeats itself up to the end of its context
BESIDE = {"What is the capital of France?": r"\bparis\b"}


def fault(answer: str, finish: str, right: str) -> str:
    """The fault of an answer; empty if it makes sense."""
    if not re.search(right, answer.lower()):
        return "says something else"
    if finish != "stop":
        return f"ends with {finish}"
    sentences = Counter(s.strip() for s in re.split(r"[.!?\n]", answer) if s.strip())
    if sentences and max(sentences.values()) > MOST_REPEATS:
        return "repeats itself"
    return ""


def ask(client: httpx.Client, question: str, **more: int) -> tuple[str, str]:
    """(answer, finish reason). The request has only the question: every setting is the default."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], **more}
    choice = client.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
    return choice["message"]["content"] or "", choice["finish_reason"]


def tries(client: httpx.Client, question: str, right: str, **more: int) -> dict[str, Any]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda _: ask(client, question, **more), range(TRIES)))
    faults = [fault(answer, finish, right) for answer, finish in answers]
    wrong = [answer[:200] for (answer, _), why in zip(answers, faults, strict=True) if why]
    return {
        "sense": faults.count(""),
        "of": TRIES,
        "faults": dict(Counter(filter(None, faults))),
        "example": answers[0][0][:120],
        **({"wrong": wrong[0]} if wrong else {}),
    }


def measure() -> dict[str, Any]:
    with Fleet() as fleet, httpx.Client(base_url=fleet.url, timeout=600) as client:
        first = ask(client, "Hello!")  # the text processes have loaded the model by now
        shown = client.get("/v1/models").json()["data"][0]["default_sampling_params"]
        judged = {q: tries(client, q, right) for q, right in QUESTIONS.items()}
        beside = {q: tries(client, q, right, max_tokens=MOST_BESIDE) for q, right in BESIDE.items()}
    return {
        "ok": all(found["sense"] == TRIES for found in judged.values()) and shown == MODEL_CARD,
        "default_sampling_params": shown,
        "hello": first[0][:120],
        "questions": judged,
        "not_judged": beside,
    }


def main() -> int:
    figures = measure()
    print(json.dumps(figures))
    return not figures["ok"]


if __name__ == "__main__":
    sys.exit(main())
