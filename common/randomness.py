"""Public random streams: reproducible, independent, keyed by what they are for.

Every choice that is not meant to be secret (which samples a batch holds, how data is dealt, how a model starts)
comes from a stream keyed by (seed, purpose, client, round). So a run is a function of its seed alone, whatever the
order in which messages arrive and however clients are spread over processes. Noise that carries privacy is the
exception: see :mod:`common.noise`.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np

__all__ = ["stream", "stream_key"]


def stream_key(seed: int, purpose: str, *, client: int = -1, round_id: int = -1) -> int:
    """A 128-bit key; -1 stands for "of no client" and "of no round"."""
    words = f"byzuldp/1\0{seed}\0{purpose}\0{client}\0{round_id}".encode()
    return int.from_bytes(sha256(words).digest()[:16], "little")


def stream(seed: int, purpose: str, *, client: int = -1, round_id: int = -1) -> np.random.Generator:
    """The generator of one purpose (Philox, counter-based), at its beginning."""
    return np.random.Generator(np.random.Philox(key=stream_key(seed, purpose, client=client, round_id=round_id)))
