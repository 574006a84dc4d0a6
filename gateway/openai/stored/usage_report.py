"""/v1/usage: the usage of the client's key, in the format of OpenAI's usage API.

Times are seconds since the epoch. Sums are kept by the hour, so a bucket is an hour or a day (UTC).
"""

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.datastructures import QueryParams

from pdserve.gateway.http import (
    ErrorShape,
    JsonPieces,
    Reply,
    array_json,
    caller_of,
    described,
    list_json,
    object_json,
)
from pdserve.gateway.metrics.usage_log import UsageLog, UsageQuery
from pdserve.gateway.openai.stored.lists import whole_number
from pdserve.gateway.openai.stored.response_models import UsagePage, UsageReportQuery
from pdserve.gateway.sampling import refuse
from pdserve.gateway.storage import check_text

# Width -> (seconds, buckets of a page by default, at most)
WIDTHS = {"1h": (3600, 24, 168), "1d": (86400, 7, 31)}
# OpenAI's names of the dimensions that results may be grouped by -> columns
GROUPS = {"model": "model", "api_key_id": "key_name", "session_id": "session"}
KNOWN = (
    "start_time", "end_time", "bucket_width", "group_by", "limit", "page", "models", "session_ids",
)  # fmt: skip
MAX_NAMED = 100  # models or sessions
MAX_RESULTS = 10_000  # of a page
MAX_TIME = 1 << 40


def add_usage_routes(app: APIRouter, errors: ErrorShape, usage: UsageLog) -> None:
    @app.get("/v1/usage", **described(answer=UsagePage, query=UsageReportQuery))
    async def report(request: Request) -> Response:
        """Report the usage of this key by hour or day."""
        query, limit_s = _query(request.query_params, int(time.time()))
        return Reply(usage_page(usage, caller_of(request).tenant.id.hex(), query, limit_s), errors)


async def usage_page(usage: UsageLog, tenant: str, query: UsageQuery, limit_s: int) -> JsonPieces:
    """Return the JSON text of a page, made piece by piece, since all of its results at once would
    block the loop. Raises ServiceError."""
    rows = await usage.report(tenant, query, MAX_RESULTS + 1)
    if len(rows) > MAX_RESULTS:
        text = f"a page would have more than {MAX_RESULTS} results; lower the limit"
        raise refuse("limit", text)
    by_start: dict[int, list[Any]] = {}
    for row in rows:
        by_start.setdefault(int(row.bucket), []).append(row)
    buckets = [
        object_json(
            {
                "object": "bucket",
                "start_time": start,
                "end_time": start + query.bucket_s,
                "results": await list_json(
                    by_start.get(start, ()), partial(_result, group_by=query.group_by)
                ),
            }
        )
        for start in range(query.start, query.end, query.bucket_s)
    ]
    has_more = query.end < limit_s
    return object_json(
        {
            "object": "page",
            "data": array_json(buckets),
            "has_more": has_more,
            "next_page": str(query.end) if has_more else None,
        }
    )


def _query(params: QueryParams, now: int) -> tuple[UsageQuery, int]:
    """Return the report of one page, and where the last page ends. Raises ServiceError."""
    params = QueryParams([(n.removesuffix("[]"), v) for n, v in params.multi_items()])
    for name in params:
        if name not in KNOWN:
            raise refuse(name[:40], f"{name[:40]!r} is not a parameter of this report")
    width = params.get("bucket_width", "1d")
    if width not in WIDTHS:
        raise refuse("bucket_width", f"bucket_width must be one of {', '.join(WIDTHS)}")
    bucket_s, default, max_limit = WIDTHS[width]
    limit = whole_number(params.get("limit", str(default)), "limit", 1, max_limit)
    end = whole_number(params.get("end_time", str(now + 1)), "end_time", 0, MAX_TIME)
    last_bucket = (end - 1) // bucket_s * bucket_s
    first = params.get("start_time", str(max(0, last_bucket - (limit - 1) * bucket_s)))
    name, value = ("page", params["page"]) if "page" in params else ("start_time", first)
    start = whole_number(value, name, 0, MAX_TIME)
    if start >= end:
        raise refuse(name, f"{name} must be before end_time")
    groups = params.getlist("group_by")
    for group in groups:
        if group not in GROUPS:
            raise refuse("group_by", f"group_by must be one of {', '.join(GROUPS)}")
    filters = [tuple(params.getlist(name)) for name in ("models", "session_ids")]
    if max(map(len, filters)) > MAX_NAMED:
        raise refuse("models", f"at most {MAX_NAMED} models and session_ids")
    for name in ("models", "session_ids"):
        for value in params.getlist(name):
            check_text(value, name)
    start -= start % bucket_s
    query = UsageQuery(
        start,
        min(start + limit * bucket_s, end),
        bucket_s,
        tuple(GROUPS[group] for group in dict.fromkeys(groups)),
        *filters,
    )
    return query, end


def _result(row: Any, group_by: tuple[str, ...]) -> dict[str, Any]:
    """Return one sum; dimensions not grouped by are null."""
    groups = {n: getattr(row, c) if c in group_by else None for n, c in GROUPS.items()}
    return {
        "object": "usage.result",
        "num_model_requests": int(row.requests),
        "input_tokens": int(row.prompt_tokens),
        "input_cached_tokens": int(row.cached_tokens),
        "output_tokens": int(row.completion_tokens),
        **groups,
    }
