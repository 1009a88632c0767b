"""What is mapped while a model is loaded goes onto huge pages, and nothing else does."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from adapters.engines import huge_pages
from adapters.engines.huge_pages import SIZE, collapse, mapped, on_huge_pages, without
from harness.engine_facts import huge_bytes

ROOT = Path(__file__).resolve().parent.parent
MAPS = """\
00400000-00600000 r-xp 00000000 fe:00 1234   /usr/bin/python3
00600000-00800000 rw-p 00200000 fe:00 1234   /usr/bin/python3
01000000-03000000 rw-p 00000000 00:00 0      [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f0000400000-7f0000500000 r--p 00000000 00:00 0
7f0000600000-7f0000800000 rw-p 00000000 00:00 0      [anon: torch]
7f0000a00000-7f0000b00000 rw-s 00000000 00:01 77   /dev/shm/x
7ffd00000000-7ffd00200000 rw-p 00000000 00:00 0      [stack]
"""


def test_only_private_writable_memory_of_no_file_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "maps"
    file.write_text(MAPS)
    assert mapped(file) == [
        (0x01000000, 0x03000000),
        (0x7F0000000000, 0x7F0000400000),
        (0x7F0000600000, 0x7F0000800000),
    ]
    assert mapped(tmp_path / "another system") == []


@pytest.mark.parametrize(
    ("ranges", "others", "left"),
    [
        ([(0, 4)], [], [(0, 4)]),
        ([], [(0, 4)], []),
        ([(0, 4)], [(0, 4)], []),
        ([(0, 8)], [(2, 3), (5, 6)], [(0, 2), (3, 5), (6, 8)]),
        ([(0, 4), (4, 8)], [(2, 6)], [(0, 2), (6, 8)]),
        ([(2, 6)], [(0, 8)], []),
        ([(2, 6)], [(0, 2), (6, 8)], [(2, 6)]),
        ([(0, 2), (8, 9)], [(0, 1), (8, 9)], [(1, 2)]),
    ],
)
def test_what_was_there_before_is_taken_away(
    ranges: list[tuple[int, int]], others: list[tuple[int, int]], left: list[tuple[int, int]]
) -> None:
    assert without(ranges, others) == left


def test_only_whole_huge_pages_inside_of_the_range_are_asked_for() -> None:
    assert collapse(SIZE + 1, 2 * SIZE + 5) == 0, "there is none, and nothing at this address to be hurt"
    assert collapse(3 * SIZE, 3 * SIZE) == 0


def test_memory_that_is_not_there_is_no_error() -> None:
    assert collapse(1 << 46, (1 << 46) + 2 * SIZE) == 0


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(huge_pages, "collapse", lambda start, stop: asked.append((start, stop)))
    ranges = iter([[(0, 4 * SIZE)], [(0, 6 * SIZE)]])
    monkeypatch.setattr(huge_pages, "mapped", lambda: next(ranges))
    monkeypatch.setenv(huge_pages.VARIABLE, "0")
    with on_huge_pages():
        pass
    assert asked == []
    monkeypatch.delenv(huge_pages.VARIABLE)
    with on_huge_pages():
        pass
    assert asked == [(4 * SIZE, 6 * SIZE)]


def test_an_error_while_loading_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "collapse", lambda start, stop: pytest.fail("nothing was loaded"))
    with pytest.raises(ValueError, match="no such model"), on_huge_pages():
        raise ValueError("no such model")


CODE = """
import torch
from adapters.engines.huge_pages import on_huge_pages
from harness.engine_facts import huge_bytes
old = torch.arange(8 << 20, dtype=torch.int32)  # 32 MiB
start = huge_bytes()
with on_huge_pages():
    new = torch.arange(16 << 20, dtype=torch.int32)  # 64 MiB
grown = huge_bytes() - start
assert torch.equal(new, torch.arange(16 << 20, dtype=torch.int32))
assert torch.equal(old, torch.arange(8 << 20, dtype=torch.int32))
print(grown >> 20)
"""


def kernel() -> tuple[int, ...]:
    return tuple(map(int, platform.release().split("-")[0].split(".")[:2])) if sys.platform == "linux" else (0,)


@pytest.mark.skipif(kernel() < (6, 1) or huge_bytes() is None, reason="no MADV_COLLAPSE before Linux 6.1")
def test_a_tensor_that_is_made_inside_is_on_huge_pages_and_one_from_before_stays() -> None:
    run = [sys.executable, "-c", CODE]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100)
    assert 60 <= int(done.stdout) <= 80
