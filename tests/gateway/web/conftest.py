"""One browser for the tests of both pages."""

from collections.abc import Iterator

import pytest
from pages.browser import Browser


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser
