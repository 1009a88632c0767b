"""Stated interventions served by plain calls: `Capture` and `Add` know beforehand what they wait for, so they need no
greenlet to be parked in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit

from adapters.declared import Add, is_stated
from adapters.errors import NotInRowsError
from adapters.exchange import lent, take
from adapters.modes import is_any_autocast_enabled
from adapters.points import LOGITS_KEY, SAMPLED_KEY, Location

if TYPE_CHECKING:
    from adapters.intervention import Pass


class Served:
    """Stands where a function's greenlet would: `switch` is given what the model holds and returns the next location.

    `places` are (name, location) in the model's order; `do` is called with the pass, a place of these, and the payload.
    """

    __slots__ = ("_asked", "_at", "_do", "_m", "_places", "dead")

    def __init__(self, places: Sequence[tuple[str, Location]], do: Callable[[Pass, str, Location, Any], None]) -> None:
        self._places, self._do = places, do
        self._m: Pass | None = None
        self._at = self._asked = 0
        self.dead = False

    def again(self) -> Served:
        """Ready for another pass of the same request."""
        self._m, self._at, self.dead = None, 0, False
        return self

    def switch(self, given: Any) -> Location | None:
        """Begin, where `given` is the pass itself; else do what there is to do at the location that was waited for."""
        places, at = self._places, self._at
        name, loc = places[at]
        m: Pass = given if self._m is None else self._m
        try:
            if m is given:
                self._m = m
            else:
                m._key = key = loc.key
                while loc.key == key:
                    self._do(m, name, loc, given)
                    at += 1
                    if at == len(places):
                        self._end()
                        return None
                    name, loc = places[at]
                self._at = at
            if not m.draws and loc.key in (LOGITS_KEY, SAMPLED_KEY):
                self._end()  # an early chunk of a long prompt: nobody's logits
                return None
            if at >= self._asked:  # an engine listens as long as there are requests
                m._il.host.attach(loc.key)
                self._asked = at + 1
            return loc
        except BaseException as error:
            given = m._payload = None  # a whole batch's
            self._end()
            if isinstance(error, NotInRowsError):
                raise NotInRowsError(f"{loc}: {error}") from None
            raise

    def throw(self, error: BaseException) -> None:
        """What ends a function while it waits."""
        self._end()
        if not isinstance(error, GreenletExit):
            raise error

    def _end(self) -> None:
        self.dead, self._m = True, None


def served(m: Pass) -> Served | None:
    """Who serves this pass of what is stated; None for a function, where every read is to be looked at, and for what is
    refused: as a function it raises that as an error of its own request."""
    if type(m.thread) is Served:
        return m.thread.again()
    fn, live = m.fn, m.live
    if not is_stated(fn):
        return None
    if live.check_finite or live.trail is not None or m._il.grad or is_any_autocast_enabled():
        return None
    try:
        if isinstance(fn, Add):
            return Served([(fn.point, m._points.parse(fn.point))], _add)
        return Served(fn.places(m._points), _capture)
    except Exception:
        return None


def _capture(m: Pass, name: str, loc: Location, payload: Any) -> None:
    value, back = take(loc, payload, m._rows, m._index, (m._first, m._n), m._il)
    if back is lent:
        value = value.clone()
    m.live.keep(name, loc, value)


def _add(m: Pass, name: str, loc: Location, payload: Any) -> None:
    assert isinstance(m.fn, Add)
    m._payload = payload
    value, m._back = take(loc, payload, m._rows, m._index, (m._first, m._n), m._il)
    value += m.fn.amount(loc, value.shape[1:], value)
    m._edited(loc, value, True)
    m._payload = None
