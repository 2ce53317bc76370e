"""Momenta that are not what the model needs: their count, their digest, their type, their schema."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import numpy as np

from adversary.attacks.parameters import choice
from adversary.misbehaviour.breach import Breach, pieces, trailer
from adversary.misbehaviour.misbehaviour import Ground
from client.push import Push
from common.errors import AttackError
from common.rpc.digests import digest_of
from common.rpc.frames import encode_frame, tensor_bytes
from common.rpc.v1 import parameter_server_pb2 as pb

__all__ = ["WrongCount", "WrongDigest", "WrongDtype", "WrongSchema"]


class WrongCount(Breach):
    """Sends more or fewer elements than the model has, or says so in its first or its last message.

    Parameters
    ----------
    where
        "header" or "trailer": that message alone is wrong. "payload": the elements themselves are too many or too few.
    by
        By how many: a positive number is too many.
    """

    name = "wrong_count"

    def __init__(self, ground: Ground, *, where: str = "header", by: int = -1, then_answer: bool = True) -> None:
        super().__init__(ground, then_answer=then_answer)
        self._where = choice(self.name, "where", where, ("header", "trailer", "payload"))
        if isinstance(by, bool) or not isinstance(by, int) or by == 0 or abs(by) > ground.num_parameters:
            raise AttackError(
                f"{self.name}: by = {by!r}: expected an integer other than 0, within the {ground.num_parameters} "
                "parameters of the model"
            )
        self._by = by

    def broken(self, push: Push) -> Iterator[bytes]:
        data, size = tensor_bytes(push.momentum), push.momentum.size
        announced, sent, said = (size + self._by * (self._where == part) for part in ("header", "payload", "trailer"))
        if sent < size:
            data = data[: 4 * sent]
        elif sent > size:
            data = memoryview(bytes(data) + bytes(4 * (sent - size)))
        yield encode_frame(header=push.header(element_count=announced))
        for offset, piece in pieces(push, data):
            yield encode_frame(offset=offset, payload=piece)
        yield trailer(data, said)


class WrongDigest(Breach):
    """Ends each momentum with a digest that is not that of its bytes."""

    name = "wrong_digest"

    def broken(self, push: Push) -> Iterator[bytes]:
        data = tensor_bytes(push.momentum)
        digest = bytes(byte ^ 0xFF for byte in digest_of(data))
        yield encode_frame(header=push.header())
        for offset, piece in pieces(push, data):
            yield encode_frame(offset=offset, payload=piece)
        yield encode_frame(trailer=pb.Trailer(element_count=push.momentum.size, digest=digest))


class WrongDtype(Breach):
    """Sends each momentum as numbers of another type, so that it has too many bytes or too few.

    Parameters
    ----------
    dtype
        "float64" or "float16".
    """

    name = "wrong_dtype"

    def __init__(self, ground: Ground, *, dtype: str = "float64", then_answer: bool = True) -> None:
        super().__init__(ground, then_answer=then_answer)
        self._dtype = np.dtype(choice(self.name, "dtype", dtype, ("float64", "float16"))).newbyteorder("<")

    def broken(self, push: Push) -> Iterator[bytes]:
        with np.errstate(over="ignore"):
            data = push.momentum.astype(self._dtype).tobytes()
        yield encode_frame(header=push.header())
        for offset, piece in pieces(push, data):
            yield encode_frame(offset=offset, payload=piece)
        yield trailer(data, push.momentum.size)


class WrongSchema(Breach):
    """Sends each momentum as that of a model with other names, shapes or types, but as many elements."""

    name = "wrong_schema"

    def broken(self, push: Push) -> Iterator[bytes]:
        data = tensor_bytes(push.momentum)
        yield encode_frame(header=push.header(schema_hash=sha256(push.schema_hash).digest()))
        for offset, piece in pieces(push, data):
            yield encode_frame(offset=offset, payload=piece)
        yield trailer(data, push.momentum.size)
