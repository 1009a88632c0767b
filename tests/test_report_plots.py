"""Pictures are optional: without matplotlib, one sentence that says what to install."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from reports import plots
from reports.marks import SHAPES, marks
from tests.test_report_parts import ALL_COLUMNS
from tests.test_report_sample import rich


def test_without_matplotlib_the_error_is_the_install_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = importlib.import_module

    def missing(name: str, *more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return whole(name, *more)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(plots.MissingMatplotlib, match="pip install matplotlib"):
        plots.write(rich().cells, tmp_path / "dots.png")
    assert list(tmp_path.iterdir()) == []


def test_no_cells_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tapgrid run"):
        plots.write([], tmp_path / "dots.png")


def test_every_mark_can_be_drawn() -> None:
    assert set(plots._SHAPES) == set(SHAPES)
    assert {m.library.key for m in marks([*ALL_COLUMNS, "a", "b", "c"], {}).values()} <= set(plots.COLOURS)


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_picture_is_written(tmp_path: Path, ending: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib", reason=plots.INSTALL)
    plots.write(rich().cells, tmp_path / f"dots.{ending}")
    assert (tmp_path / f"dots.{ending}").read_bytes().startswith(magic)
