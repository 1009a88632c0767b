"""When a round may not count: a rule fixed beforehand that never looks at a measured value.

Others' load (where wall time is judged), a throttled device, another process on the device. A contaminated round is
dropped whole, for every column, by the judge; nothing is deleted.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable

from harness.grid import Grid
from harness.store import Line

# nvidia-smi's reasons that mean "slower than this card can": heat and power braking, not a user's own clock limit.
_THROTTLE = ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")


def load_limit(grid: Grid, cores: int) -> float | None:
    """The 1-minute load above which a run is not alone: its own threads and half of the cores. None: load is no
    reason, because CPU time is judged, which others' load hardly touches."""
    if grid.metric != "wall":
        return None
    return grid.settings.threads * grid.settings.tensor_parallel + 0.5 * cores


def by_load(runs: Iterable[Line], limit: float | None) -> list[str]:
    """Why these runs' round is contaminated, by the load that was stored with each.

    >>> by_load([{"load": 9.0, "column": "hf", "row": "steer"}, {"load": 1.0, "column": "hf", "row": "lens"}], 4.0)
    ['load 9.0 while hf ran steer, above 4']
    """
    if limit is None:
        return []
    loud = [r for r in runs if r.get("load") is not None and r["load"] > limit]
    worst = max(loud, key=lambda r: r["load"], default=None)
    return [f"load {worst['load']:.1f} while {worst['column']} ran {worst['row']}, above {limit:g}"] if worst else []


def device_strangers() -> list[str]:
    """Processes on the device just now; asked when none of ours is alive."""
    out = _smi("--query-compute-apps=pid,process_name")
    return [f"another process is on the device: {line}" for line in out if line]


def throttled() -> list[str]:
    """Whether the device is braking just now."""
    out = _smi("--query-gpu=" + ",".join(f"clocks_event_reasons.{r}" for r in _THROTTLE))
    active = {
        reason
        for line in out
        for reason, state in zip(_THROTTLE, line.split(","), strict=False)
        if state.strip() == "Active"
    }
    return [f"the device throttled: {', '.join(sorted(active))}"] if active else []


def _smi(query: str) -> list[str]:
    if not os.path.exists("/dev/nvidiactl") and "TAPGRID_SMI" not in os.environ:
        return []
    try:
        command = [os.environ.get("TAPGRID_SMI", "nvidia-smi"), query, "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
