"""The digest of a tensor on its way: XXH3-128, in its canonical form of 16 bytes, big end first.

It finds accidents: a byte that was changed, a chunk in the wrong place, a momentum that is sent once more and is not
the same. It is no defence, nor has it to be: whoever could choose the bytes on the way could choose the digest too
(against that there is TLS), and a client that makes two momenta with one digest deceives nobody, since the first one
counts. SHA-256, which costs twelve times what the rest of receiving a momentum does, is for what must be beyond doubt:
the ledger, the models in the run folder, tokens.
"""

from __future__ import annotations

from xxhash import xxh3_128, xxh3_128_digest

__all__ = ["DIGEST_BYTES", "Digest", "digest_of"]

DIGEST_BYTES = 16

Digest = xxh3_128
"""Of bytes that come piece by piece: ``update`` and ``digest``, as in :mod:`hashlib`."""


def digest_of(data: memoryview | bytes) -> bytes:
    """Of all bytes at once."""
    return xxh3_128_digest(data)
