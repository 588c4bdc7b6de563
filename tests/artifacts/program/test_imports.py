"""While a program imports, no garbage is looked for; afterwards it is, whatever came of it."""

import gc

import pytest

from artifacts.program.lifetime import importing


def test_garbage_is_looked_for_again_after_the_imports() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_and_after_one_that_failed() -> None:
    with pytest.raises(ModuleNotFoundError), importing():
        import no_such_module  # noqa: F401
    assert gc.isenabled()
