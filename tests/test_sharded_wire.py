"""Many machines: what vLLM's Ray executor would send to a worker and get back, pickled and run in a fresh interpreter.

vLLM refuses Ray on a CPU, so the model there is a small one; the worker's class, the step that carries the request, the
interventions in it and what they leave are the real ones.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from adapters.engines.module import Input, WrappedModule
from adapters.engines.vllm_sharded import WORKER, merged
from adapters.engines.wire import Carried
from tests import ranks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parent.parent

USERS = """
scale = 2.0

class Wanted(Exception):
    pass

def edit(m):
    m.at("qkv").output[:, 1:3] *= scale
    m.save("norm", m.at("norm").output)
    m.save("step", m.step)

def bad(m):
    m.save("qkv", m.at("qkv").output)
    raise Wanted("mine")
"""

THERE = """
import pickle, sys
import cloudpickle
from vllm.utils.import_utils import resolve_obj_by_qualname

from adapters.engines.module import Input, WrappedModule
from adapters.engines.vllm import EXTRA
from adapters.engines.wire import Kept
from adapters.ranks import Trail
from tests import ranks

worker_cls, step, (method, args) = cloudpickle.loads(sys.stdin.buffer.read())
assert callable(getattr(resolve_obj_by_qualname(worker_cls), method))
engine, kept = WrappedModule(ranks.whole()), []
for new in step.scheduled_new_reqs:
    carried = cloudpickle.loads(new.sampling_params.extra_args[EXTRA])
    (result,) = engine.run([Input(new.req_id, ranks.INPUTS[0], carried.fns)])
    trail = Trail(carried.check_ranks)
    trail.add("norm", result.saves)
    kept.append(Kept(result.saves, result.error, False, 1, trail.entries()).packed())
assert [new.req_id for new in step.scheduled_new_reqs] == list(args[0])
sys.stdout.buffer.write(pickle.dumps((False, kept)))
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The user's script: what is in it has to travel by value."""
    path = tmp_path_factory.mktemp("user") / "script.py"
    path.write_text(USERS)
    module = types.ModuleType("__main__")
    exec(compile(USERS, str(path), "exec"), vars(module))
    module.path = path  # type: ignore[attr-defined]
    return module


def there(*fns: Any) -> list[Any]:
    """Each function as a request of one step, on two ranks elsewhere; what came home of it."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    from adapters.engines.vllm import EXTRA

    ids = [f"tapgrid-{i}-0123abcd" for i in range(len(fns))]
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=id,
            prompt_token_ids=[5, 6, 7],
            mm_features=[],
            sampling_params=SamplingParams(
                temperature=0.0, extra_args={EXTRA: Carried((fn,), check_ranks=True).packed()}
            ),
            pooling_params=None,
            block_ids=([0],),
            num_computed_tokens=0,
            lora_request=None,
        )
        for id, fn in zip(ids, fns, strict=True)
    ]
    message = cloudpickle.dumps((WORKER, step, ("tapgrid_collect", (ids,))))
    done = subprocess.run(
        [sys.executable, "-c", THERE],
        input=message,
        capture_output=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    broken, kept = pickle.loads(done.stdout[done.stdout.index(b"\x80\x04") :])
    assert not broken
    return [merged([k, k]) for k in kept]


def test_interventions_saves_and_errors_survive_the_wire(theirs: Any) -> None:
    edited, failed = there(theirs.edit, theirs.bad)
    (here,) = WrappedModule(ranks.whole()).run([Input("0", ranks.INPUTS[0], (theirs.edit,))])
    assert edited.error is None
    assert list(edited.saves) == ["norm", "step"]
    assert torch.equal(edited.saves["norm"][0], here.saves["norm"][0])
    assert edited.saves["step"] == [0]
    assert [where for where, _ in edited.trail] == ["norm"]
    assert type(failed.error).__name__ == "Wanted"
    assert failed.error.args == ("mine",)
    assert any(f'"{theirs.path}", line 14' in note for note in failed.error.__notes__)
    assert failed.saves["qkv"][0].shape == (3, 12)
