"""Imported before anything of the product's: modules in the place of packages that a machine with a GPU may lack.

Both ends of a connection get the same digest, and nobody gets noise that could be taken for secret.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import partial
from types import ModuleType
from typing import NoReturn

__all__ = ["STOOD_IN"]

STOOD_IN: list[str] = []
"""What each missing package was replaced by, in words."""


def _stand_in(name: str, said: str, **contents: object) -> None:
    try:
        missing = importlib.util.find_spec(name) is None
    except ImportError:
        missing = True
    if missing:
        module = ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
        STOOD_IN.append(said)


def _no_secret_noise(**_: object) -> NoReturn:
    raise ImportError("randomgen is missing, and without it there is no secret noise")


_digest = partial(hashlib.blake2b, digest_size=16)

_stand_in(
    "xxhash",
    "xxhash is missing: BLAKE2b stands in for it at both ends, and momenta take longer to arrive (first, collect)",
    xxh3_128=_digest,
    xxh3_128_digest=lambda data: _digest(data).digest(),
)
_stand_in("randomgen", "randomgen is missing: there is noise from a seed only", ChaCha=_no_secret_noise)
