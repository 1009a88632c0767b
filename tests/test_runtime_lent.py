"""What a module has just made is lent out instead of copied, and nobody can tell: kept values stay, edits land."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from adapters.engines.module import WrappedModule
from adapters.errors import NeverRanError, StaleWriteError, UnknownModuleError
from adapters.handed import ALONE, LENT
from tests.engines import our_hooks


class Zeroes(torch.nn.Module):
    """Multiplies its input in place by zero, and goes on with ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0).add(1)


class Keeps(torch.nn.Module):
    """Gives out something that it also keeps, in the way that `how` says, and changes it in its next call."""

    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.how, self.kept = how, torch.zeros(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x + 1
        return self.how(self.kept)


class Spoils(torch.nn.Module):
    """Changes what another module kept."""

    def __init__(self, of: Keeps) -> None:
        super().__init__()
        self.of = [of]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        self.of[0].kept.fill_(77)
        return out


class Counted(torch.nn.Linear):
    """Remembers the inputs that it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given = x
        return super().forward(x)


X = torch.arange(8.0).view(2, 4)


@pytest.fixture
def stack() -> Iterator[WrappedModule]:
    torch.manual_seed(0)
    wrapped = WrappedModule(torch.nn.Sequential(torch.nn.Linear(4, 4), Counted(4, 4), torch.nn.Linear(4, 4)))
    yield wrapped
    assert not our_hooks(wrapped.model)
    assert not any("forward" in vars(m) for m in wrapped.model.modules())


def test_lending_is_on() -> None:
    """With the torch that we pin, both counts can be told; where they cannot, every read is a copy."""
    assert ALONE
    assert LENT


def test_what_is_read_is_what_the_model_goes_on_with(stack: WrappedModule) -> None:
    """No copy is made: the next module is given the very memory that was handed out."""
    with stack.trace(X) as m:
        where = m.at("0").output.data_ptr()
    assert stack.model[1].given.data_ptr() == where


KEEPING: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    lambda x: x[0],
    lambda x: x[:, 1:3],
    lambda x: x.detach(),
    lambda x: x.data,
    lambda x: x.view(4, 2).detach()[1],
    lambda x: x.T,
]


@pytest.mark.parametrize("keep", KEEPING)
def test_a_kept_value_never_changes_without_a_save(keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """case 2: the successor multiplies its input in place by 0; what was kept of it, however, equals a clone."""
    wrapped = WrappedModule(torch.nn.Sequential(torch.nn.Linear(4, 4), Zeroes()))
    with torch.no_grad():
        expected = keep(wrapped.model[0](X).clone())
    with wrapped.trace(X) as m:
        kept = keep(m.at("0").output)
        clone = kept.clone()
        after = m.at("1").output
    assert torch.equal(kept, clone)
    assert torch.equal(kept, expected)
    assert torch.equal(after, torch.ones(2, 4))


def test_a_kept_array_never_changes(stack: WrappedModule) -> None:
    wrapped = WrappedModule(torch.nn.Sequential(torch.nn.Linear(4, 4), Zeroes()))
    with wrapped.trace(X) as m:
        kept = m.at("0").output.numpy()
        m.at("1").output  # noqa: B018
    with torch.no_grad():
        assert torch.equal(torch.from_numpy(kept), wrapped.model[0](X))


def test_saves_before_and_after_an_edit_differ_by_it(stack: WrappedModule) -> None:
    """case 93: save before, edit in place, save after."""

    def fn(m: Any) -> None:
        m.save("before", m.at("0").output)
        m.at("0").output += 2.5
        m.save("after", m.at("0").output)
        m.save("end", m.at("2").output)

    saves = stack.forward([X], fn)[0].saves
    with torch.no_grad():
        plain = stack.model[0](X)
        end = stack.model[2](stack.model[1](plain + 2.5))
    assert torch.equal(saves["before"][0], plain)
    assert torch.equal(saves["after"][0], plain + 2.5)
    assert torch.equal(saves["end"][0], end)


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("through", [lambda x: x, lambda x: x.data, lambda x: x.detach()])
def test_an_edit_lands_whether_what_was_edited_is_kept_or_not(
    stack: WrappedModule, hold: bool, through: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Also one that torch does not count: what was lent is what the model goes on with."""
    held = []
    with stack.trace(X) as m:
        value = m.at("0").output
        through(value).mul_(3)
        if hold:
            held.append(value)
        del value
        end = m.at("2").output
    with torch.no_grad():
        edited = stack.model[0](X) * 3
        assert torch.equal(end, stack.model[2](stack.model[1](edited)))
    assert all(torch.equal(h, edited) for h in held)


def test_an_edit_that_comes_too_late_is_an_error_and_changes_nothing(stack: WrappedModule) -> None:
    left = {}

    def late() -> None:
        with stack.trace(X) as m:
            held = m.at("0").output
            after = m.at("1").output
            held += 1
            left.update(after=after, end=m.at("2").output)

    with pytest.raises(StaleWriteError, match=r"at\('0'\).output was edited in place after"):
        late()
    with torch.no_grad():
        assert torch.equal(left["end"], stack.model[2](left["after"]))


def test_a_late_edit_of_a_detached_alias_is_noticed_too(stack: WrappedModule) -> None:
    def late() -> None:
        with stack.trace(X) as m:
            held = m.at("0").output.detach()
            m.at("1").output  # noqa: B018
            held += 1

    with pytest.raises(StaleWriteError):
        late()


@pytest.mark.parametrize("how", [lambda x: x, lambda x: x[:], lambda x: x.view(2, 4)])
def test_what_a_module_keeps_for_itself_is_not_lent(how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Nobody but the intervention may have what was lent: here the model spoils its own copy afterwards."""
    keeps = Keeps(how)
    wrapped = WrappedModule(torch.nn.Sequential(keeps, Spoils(keeps)))
    with wrapped.trace(X) as m:
        kept = m.at("0").output
        after = m.at("1").output
    assert torch.equal(kept, X + 1)
    assert torch.equal(after, X + 1)


def test_a_secret_alias_is_an_error_and_no_wrong_number() -> None:
    """An alias that a module keeps by `detach` cannot be told beforehand: that it was spoilt is noticed."""
    keeps = Keeps(lambda x: x.detach())
    wrapped = WrappedModule(torch.nn.Sequential(keeps, Spoils(keeps)))

    def read() -> torch.Tensor:
        with wrapped.trace(X) as m:
            held: torch.Tensor = m.at("0").output
            m.at("1").output  # noqa: B018
        return held

    with pytest.raises(StaleWriteError):
        read()


def test_an_error_after_a_read_leaves_what_was_kept_alone() -> None:
    wrapped = WrappedModule(torch.nn.Sequential(torch.nn.Linear(4, 4), Zeroes()))
    kept: list[torch.Tensor] = []

    def fails(m: Any) -> None:
        kept.append(m.at("0").output)
        raise RuntimeError("mine")

    result = wrapped.forward([X], fails)[0]
    assert str(result.error) == "mine"

    def traced() -> None:
        with wrapped.trace(X) as m:
            kept.append(m.at("0").output)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        traced()
    with torch.no_grad():
        assert all(torch.equal(k, wrapped.model[0](X)) for k in kept)


def test_a_gradient_that_the_user_adds_stays_his(stack: WrappedModule) -> None:
    vector = torch.ones(4, requires_grad=True)
    with stack.trace(X) as m:
        value = m.at("0").output
        value += vector
        assert not m.at("1").output.requires_grad
        end = m.at("2").output
    assert value.requires_grad
    value.sum().backward()
    assert torch.equal(vector.grad, torch.full((4,), 2.0))
    with torch.no_grad():
        assert torch.equal(end, stack.model[2](stack.model[1](stack.model[0](X) + 1)))


def test_two_interventions_at_one_place_see_each_other(stack: WrappedModule) -> None:
    """The first keeps what it was lent, so the second is given another, with the first one's edit in it."""
    kept: list[torch.Tensor] = []

    def first(m: Any) -> None:
        value = m.at("0").output
        value *= 2
        kept.append(value)

    def second(m: Any) -> None:
        m.at("0").output += 1
        m.save("end", m.at("2").output)

    from adapters.engines.module import Input

    result = stack.run([Input("r", X, (first, second))])[0]
    with torch.no_grad():
        plain = stack.model[0](X)
        assert torch.equal(kept[0], plain * 2)
        assert torch.equal(result.saves["end"][0], stack.model[2](stack.model[1](plain * 2 + 1)))


def test_after_a_caught_error_the_place_before_is_read_again_or_is_gone(stack: WrappedModule) -> None:
    """A refusal before the model moves leaves the place as it was; a pass that ended meanwhile leaves nothing."""

    def fn(m: Any) -> None:
        first = m.at("0").output
        with pytest.raises(UnknownModuleError):
            m.at("nope").output  # noqa: B018
        m.save("still", torch.equal(m.at("0").output, first))
        m.at("2").output  # noqa: B018
        for path in ("1", "2", "2"):
            with pytest.raises(NeverRanError):
                m.at(path).output  # noqa: B018

    result = stack.forward([X], fn)[0]
    assert result.error is None
    assert result.saves["still"] == [True]


# ---- what listens


def test_a_forward_of_the_users_own_is_called_and_put_back(stack: WrappedModule) -> None:
    calls = []
    linear = stack.model[1]
    plain = linear.forward
    linear.forward = own = lambda x: (calls.append("mine"), plain(x) * 2)[1]  # type: ignore[method-assign,assignment,misc,func-returns-value]
    try:
        with stack.trace(X) as m:
            doubled = m.at("1").output
        assert linear.forward is own
        assert calls == ["mine"]
        with torch.no_grad():
            assert torch.equal(doubled, plain(stack.model[0](X)) * 2)
    finally:
        del linear.forward


def test_a_module_that_was_replaced_between_runs_is_found(stack: WrappedModule) -> None:
    with stack.trace(X) as m:
        before = m.at("1").output
    stack.model[1] = other = torch.nn.Linear(4, 4)
    with stack.trace(X) as m:
        after = m.at("1").output
    with torch.no_grad():
        assert torch.equal(after, other(stack.model[0](X)))
    assert not torch.equal(before, after)


def test_a_class_whose_forward_was_patched_between_runs_is_listened_to_anew(stack: WrappedModule) -> None:
    plain = Counted.forward
    with stack.trace(X) as m:
        before = m.at("1").output
    try:
        Counted.forward = lambda self, x: plain(self, x) + 10  # type: ignore[method-assign]
        with stack.trace(X) as m:
            after = m.at("1").output
    finally:
        Counted.forward = plain  # type: ignore[method-assign]
    assert torch.equal(after, before + 10)


@pytest.mark.parametrize("everywhere", [False, True])
def test_what_a_hook_of_the_users_gives_out_is_what_is_read(stack: WrappedModule, everywhere: bool) -> None:
    """case 57."""
    with stack.trace(X) as m:
        plain = m.at("1").output
    if everywhere:
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, output: output + 5 if module is stack.model[1] else None
        )
    else:
        handle = stack.model[1].register_forward_hook(lambda module, args, output: output + 5)
    try:
        for _ in range(2):
            with stack.trace(X) as m:
                hooked = m.at("1").output.clone()
                m.at("1").output *= 2
                end = m.at("2").output
            assert torch.equal(hooked, (plain + 5))
            with torch.no_grad():
                assert torch.equal(end, stack.model[2]((plain + 5) * 2))
    finally:
        handle.remove()
    with stack.trace(X) as m:
        assert torch.equal(m.at("1").output, plain)


def test_a_module_around_a_point_answers_after_it() -> None:
    """It is asked for when its call has begun already."""
    wrapped = WrappedModule(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))))
    with wrapped.trace(X) as m:
        m.at("0.0").output += 1
        inner = m.at("0").output
        outer = m.at("").output
    with torch.no_grad():
        expected = wrapped.model[0][1](wrapped.model[0][0](X) + 1)
    assert torch.equal(inner, expected)
    assert torch.equal(outer, expected)


@pytest.mark.parametrize("path", ["nope", "0.nope", "nope.0.nope"])
def test_a_path_that_is_not_there_is_named_whole(stack: WrappedModule, path: str) -> None:
    with pytest.raises(UnknownModuleError, match=rf"no module '{path}'"), stack.trace(X) as m:
        m.at(path).output  # noqa: B018


# ---- greenlets that are used again


def test_a_function_finds_no_trace_of_the_one_before_it(stack: WrappedModule) -> None:
    """The same greenlet runs one function after another: no context variable goes from one to the next."""
    from contextvars import ContextVar

    own: ContextVar[str] = ContextVar("own", default="none")
    seen: list[tuple[str, str]] = []

    def fn(m: Any) -> None:
        seen.append((m.request, own.get()))
        own.set(m.request)
        m.at("1").output  # noqa: B018
        assert own.get() == m.request

    for _ in range(3):
        results = stack.forward([X, X[:1]], fn)
        assert [r.error for r in results] == [None, None]
    assert seen == [("0", "none"), ("1", "none")] * 3


def test_errors_do_not_use_up_greenlets(stack: WrappedModule) -> None:
    """One that failed is let go of; the next run makes another."""

    def fn(m: Any) -> None:
        m.at("0").output  # noqa: B018
        if m.request == "0":
            raise RuntimeError("mine")
        m.save("x", m.at("1").output)

    for _ in range(5):
        failed, fine = stack.forward([X, X], fn)
        assert str(failed.error) == "mine"
        assert fine.error is None
        with torch.no_grad():
            assert torch.allclose(fine.saves["x"][0], stack.model[1](stack.model[0](X)))


def test_threads_do_not_share_greenlets(stack: WrappedModule) -> None:
    import threading

    found: list[Any] = []

    def work() -> None:
        found.append(stack.forward([X], lambda m: m.save("x", m.at("1").output))[0])

    for _ in range(3):
        work()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [r.error for r in found] == [None] * 6
    assert all(torch.equal(r.saves["x"][0], found[0].saves["x"][0]) for r in found)


def test_a_debugger_that_is_attached_later_sees_every_line(stack: WrappedModule) -> None:
    """The greenlet that runs the function began before the debugger was there."""
    import sys

    def fn(m: Any) -> None:
        m.at("0").output  # noqa: B018
        m.at("1").output  # noqa: B018

    lines: list[int] = []

    def tracer(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is fn.__code__ and event == "line":
            lines.append(frame.f_lineno - fn.__code__.co_firstlineno)
        return tracer

    before = sys.gettrace()
    stack.forward([X], fn)
    try:
        sys.settrace(tracer)
        stack.forward([X], fn)
    finally:
        sys.settrace(before)
    stack.forward([X], fn)
    assert lines == [1, 2]
