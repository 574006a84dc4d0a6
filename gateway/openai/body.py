"""What every request body of the OpenAI API is, and every object in one."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """Strict types: no "5" for 5, no true for 1, no NaN."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    generates: ClassVar[bool] = False  # otherwise only what changes a prompt is looked at
