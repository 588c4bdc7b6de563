"""Read by Python at its start where this folder is on PYTHONPATH: see `tests.faults`."""

import importlib.abc
import importlib.util
import itertools
import os
import signal
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HOW, MODULE, NAME, CALL = os.environ.get("TEST_FAULT_AT", ":::1").split(":")


class Finder(importlib.abc.MetaPathFinder):
    """Replaces the function once its module is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_replace(module: ModuleType) -> None:
            load(module)
            *owners, function = NAME.split(".")
            place: Any = module
            for owner in owners:
                place = getattr(place, owner)
            replaced, calls = getattr(place, function), itertools.count(1)

            def call(*arguments: Any, **named: Any) -> Any:
                if next(calls) == int(CALL):
                    if HOW == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(86_400)
                return replaced(*arguments, **named)

            setattr(place, function, call)

        spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


if MODULE:
    sys.meta_path.insert(0, Finder())
