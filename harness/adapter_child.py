"""The child of `tapgrid adapter check`: makes one adapter, boots it on the tiny model, and sends the suite's lines."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from adapters.work import Adapter, MissingLibrary, Settings
from harness.worker import speak
from validation.conformance import METHODS, conform

Send = Callable[..., None]


def serve(spec: dict[str, Any], send: Send) -> None:
    def attempt(what: str, run: Callable[[], object]) -> bool:
        try:
            run()
        except MissingLibrary as missing:
            send("line", what=what, verdict="refused", reason=f"no-library: {missing}")
            return False
        except Exception as error:
            traceback.print_exc()
            send("line", what=what, verdict="wrong", reason=f"{type(error).__name__}: {error}"[:500])
            return False
        send("line", what=what, verdict="holds", reason="")
        return True

    def make() -> None:
        made.append(_class_of(spec["target"], send)())
        made[0].close()

    made: list[Adapter] = []
    model, settings = Path(spec["model"]), Settings(**spec["settings"])
    send("phase", phase="boot", row=None)
    if not attempt("made, and closed before any boot", make):
        return
    (adapter,) = made
    try:
        if attempt("boot", lambda: adapter.boot(model, settings)):
            send("phase", phase="check", row=None)
            conform(adapter, model, spec["new"], lambda found: send("line", **asdict(found)))
    finally:
        send("phase", phase="close", row=None)
        attempt("closed", adapter.close)


def _class_of(target: str, send: Send) -> Callable[[], Adapter]:
    """The adapter class that "module:Class" names; in a module alone, the one class that has the protocol's methods."""
    name, _, cls = target.partition(":")
    module = importlib.import_module(name)
    found = {
        n: c
        for n, c in vars(module).items()
        if isinstance(c, type) and c.__module__ == module.__name__ and all(hasattr(c, m) for m in METHODS)
    }
    if cls:
        if not hasattr(module, cls):
            _usage(send, f"{name} has no {cls!r}; adapters in it: {', '.join(found) or 'none'}")
        made: Callable[[], Adapter] = getattr(module, cls)
        return made
    if len(found) != 1:
        many = f"{len(found)} adapters ({', '.join(found)}): name one, as {name}:Class" if found else "no adapter"
        _usage(send, f"{name} holds {many}" + ("" if found else f": no class with {', '.join(METHODS)}"))
    return next(iter(found.values()))


def _usage(send: Send, reason: str) -> NoReturn:
    send("usage", reason=reason)
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(speak(serve))
