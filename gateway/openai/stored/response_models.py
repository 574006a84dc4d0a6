"""Answers and URL parameters of the routes of files, batches and usage, for their description."""

from typing import Any, Literal

from pydantic import Field

from pdserve.gateway.http import AnswerModel


class FileUpload(AnswerModel):
    """A form with a file and its purpose. Send `purpose` before the file if possible."""

    purpose: Literal["batch"]
    file: bytes


class FileObject(AnswerModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(AnswerModel):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(AnswerModel):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class RequestCounts(AnswerModel):
    total: int
    completed: int
    failed: int


class BatchErrors(AnswerModel):
    object: Literal["list"]
    data: list[dict[str, Any]]


class BatchObject(AnswerModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    cancelling_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(AnswerModel):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class UsageSum(AnswerModel):
    """One row; dimensions not grouped by are null."""

    object: Literal["usage.result"]
    num_model_requests: int
    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    model: str | None
    api_key_id: str | None
    session_id: str | None


class UsageBucket(AnswerModel):
    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[UsageSum]


class UsagePage(AnswerModel):
    object: Literal["page"]
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class BatchesQuery(AnswerModel):
    after: str = ""
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class FilesQuery(AnswerModel):
    after: str = ""
    limit: int = Field(10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    purpose: str = ""


class UsageReportQuery(AnswerModel):
    start_time: int = Field(ge=0, le=1 << 40)
    end_time: int = Field(ge=0, le=1 << 40)
    bucket_width: Literal["1h", "1d"] = "1d"
    group_by: list[Literal["model", "api_key_id", "session_id"]] = Field(max_length=3)
    limit: int = Field(ge=1, le=168)
    page: int = Field(ge=0, le=1 << 40)
    models: list[str] = Field(max_length=100)
    session_ids: list[str] = Field(max_length=100)
