"""A box for what must not leave the parameter server: everything computed from momenta before noise is added.

The type, not the care of whoever writes a log line or a report, keeps it in: a box has no text, no JSON, no number, no
array and no pickle of its content. One function opens it, and only the mechanism that adds the noise calls that; a
second is the wiretap's, whose runs are not private and say so.
"""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar, final

__all__ = ["Unreleased", "open_for_mechanism", "open_for_wiretap"]

T = TypeVar("T")

_REFUSAL = (
    "an un-noised value cannot be {}: only the mechanism opens it. Report the released aggregate, or something "
    "computed from it, instead"
)


@final
class Unreleased(Generic[T]):
    """Holds a tensor or a scalar that was not made private yet.

    >>> Unreleased(3.25)
    <unreleased>
    """

    __slots__ = ("__content",)
    __array_ufunc__ = None  # numpy leaves arithmetic with a box to us, and we have none

    def __init__(self, content: T) -> None:
        self.__content = content

    def __repr__(self) -> str:
        return "<unreleased>"

    def __format__(self, spec: str) -> NoReturn:
        raise TypeError(_REFUSAL.format("formatted"))

    def __bool__(self) -> NoReturn:
        raise TypeError(_REFUSAL.format("tested for truth"))

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(_REFUSAL.format("turned into an array"))

    def __reduce__(self) -> NoReturn:
        raise TypeError(_REFUSAL.format("pickled or copied"))

    def __getstate__(self) -> NoReturn:
        raise TypeError(_REFUSAL.format("pickled or copied"))


def open_for_mechanism(box: Unreleased[T]) -> T:
    """The content. Whoever calls this adds the noise before anything leaves; a test lists the callers.

    Raises
    ------
    TypeError
        Not a box.
    """
    if not isinstance(box, Unreleased):
        raise TypeError(f"expected an Unreleased box, given {type(box).__name__}: nothing here is waiting for noise")
    content: T = box._Unreleased__content  # type: ignore[attr-defined]
    return content


def open_for_wiretap(box: Unreleased[T]) -> T:
    """The content, for an omniscient adversary: whoever runs the service that calls this gives up the claim."""
    return open_for_mechanism(box)
