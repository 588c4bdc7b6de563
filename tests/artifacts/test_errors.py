"""What an error says, in one line."""

from hypothesis import example, given
from hypothesis import strategies as st

from artifacts.errors import first_line


@given(st.text())
@example("\n\nThe file is cut.\nMore of it.")
@example("\x85")
def test_an_errors_line_is_one_line_and_never_empty(message: str) -> None:
    line = first_line(OSError(message))
    assert line.splitlines() == [line] and line.strip()
    assert line == "OSError" or line in message


def test_an_error_that_says_nothing_is_told_by_its_name() -> None:
    assert first_line(EOFError()) == "EOFError"
