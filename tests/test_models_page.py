"""docs/models.md says what the code knows, and what it says is tested."""

from models_page import MAPPINGS_TEST, PAGE, ROOT, models_page

from pdserve.engine.architectures import known_specs


def test_the_page_is_as_the_code() -> None:
    assert PAGE.read_text() == models_page(), "`make docs` writes docs/models.md anew"


def test_every_architecture_stands_in_it() -> None:
    page = PAGE.read_text()
    assert all(f"`{name}`" in page for spec in known_specs() for name in spec.architectures)
    assert (ROOT / MAPPINGS_TEST).exists()
