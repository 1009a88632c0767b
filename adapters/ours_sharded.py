"""Our runtime on an engine that is split over ranks, as columns of a grid with `tensor_parallel` in its settings."""

from __future__ import annotations

from pathlib import Path

from adapters.boot import BackendName, EngineName
from adapters.engines.vllm_sharded import check_divides
from adapters.errors import LoadError
from adapters.ours import Tapgrid
from adapters.work import BootRefused, Settings


class TapgridSharded(Tapgrid):
    """Eager vLLM over several ranks."""

    engine: EngineName = "vllm"
    backend: BackendName = "sharded"

    def boot(self, model: Path, settings: Settings) -> None:
        if settings.tensor_parallel < 2:
            raise BootRefused("this column is split over ranks: say `tensor_parallel = 2` in the grid's [settings]")
        try:
            check_divides(model, settings.tensor_parallel)
        except LoadError as no:
            raise BootRefused(str(no)) from no
        super().boot(model, settings)


class TapgridShardedTaps(TapgridSharded):
    """Compiled vLLM over several ranks, with the points live that the rows need."""

    taps = ("resid_post.*", "z.*")
