"""A parameter server that answers what no parameter server would, and then comes to its senses and ends the run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

import grpc
from fuzz_messages import METHODS, RIGHT_ANSWERS, Live, Part, parts_of, wrong_once
from grpc.aio import ServicerContext
from hypothesis import strategies as st

from common.rpc.methods import PARAMETER_SERVER

USUAL: dict[str, tuple[tuple[str, ...], ...]] = {
    "Join": (("joined",), ("joined",), ("not joined",), ("over",)),
    "Attend": (("beat",), ("beat", "beat"), ("evicted",), ("finished",), ("event refusal",)),
    "PullModel": (
        ("model",),
        ("model header", "model payload", "model trailer"),
        ("model header", "model payload"),
        ("not yet",),
        ("model finished",),
        ("model refusal",),
        ("model", "model"),
        (),
    ),
    "PushMomentum": (("accepted",), ("push refusal",)),
    "Leave": (("left",),),
}
CODES = (
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.ABORTED, grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED,
)  # fmt: skip
SILENCE_S = 60.0
ROUNDS = 2
"""Right rounds after which the run ends, once the script is over."""


class Answer(NamedTuple):
    """What one call is answered with: messages, and then an end, an error, or silence."""

    parts: tuple[Part, ...]
    ending: str = "end"


class Script(NamedTuple):
    """The answers to the first calls of each method; further ones are answered as they should be."""

    answers: dict[str, tuple[Answer, ...]]


@st.composite
def _answers(draw: st.DrawFn, method: str) -> Answer:
    kinds = draw(st.sampled_from(USUAL[method]))
    if draw(st.integers(0, 9)) == 0:
        kinds = (draw(st.sampled_from(list(RIGHT_ANSWERS))),)
    parts = tuple(
        draw(st.one_of(st.just(Part(kind)), wrong_once(kind), wrong_once(kind), parts_of(kind))) for kind in kinds
    )
    return Answer(parts, draw(st.sampled_from(["end"] * 12 + ["silence"] + [code.name for code in CODES])))


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """A joining that mostly succeeds, and a few answers of every kind after it."""
    counts = {"Join": 2, "Attend": 2, "PullModel": 5, "PushMomentum": 3, "Leave": 1}
    answers = {}
    for method, most in counts.items():
        right = method == "Join" and draw(st.booleans())
        answers[method] = tuple(
            Answer((Part("joined"),)) if right else draw(_answers(method)) for _ in range(draw(st.integers(0, most)))
        )
    return Script(answers)


class HostileServer:
    """Serves one script on a port of its own. An asynchronous context manager."""

    def __init__(self, script: Script, live: Live) -> None:
        self._script, self._live = script, live
        self.calls: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.bytes_received = 0
        self._models = 0
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    PARAMETER_SERVER,
                    {
                        name: grpc.stream_stream_rpc_method_handler(self._handler(name))
                        for name in METHODS
                        if METHODS[name].path.startswith(f"/{PARAMETER_SERVER}/")
                    },
                ),
            )
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def __aenter__(self) -> HostileServer:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def _handler(self, name: str) -> Any:
        async def answer(requests: AsyncIterator[bytes], context: ServicerContext[Any, Any]) -> None:
            number = self.calls[name]
            self.calls[name] += 1
            reading = asyncio.create_task(self._read(name, requests))
            try:
                if name != "Attend":
                    await reading
                script = self._script.answers.get(name, ())
                if number < len(script):
                    await self._act(script[number], context)
                else:
                    await self._behave(name, context)
            finally:
                reading.cancel()

        return answer

    async def _read(self, name: str, requests: AsyncIterator[bytes]) -> None:
        async for request in requests:
            self.received[name] += 1
            self.bytes_received += len(request)

    async def _act(self, answer: Answer, context: ServicerContext[Any, Any]) -> None:
        for part in answer.parts:
            await context.write(part.bytes(self._live))
        if answer.ending == "silence":
            await asyncio.sleep(SILENCE_S)
        elif answer.ending != "end":
            await context.abort(grpc.StatusCode[answer.ending], "as the script has it \x1b[2J")

    async def _behave(self, name: str, context: ServicerContext[Any, Any]) -> None:
        live = self._live
        match name:
            case "Join":
                await context.write(Part("joined").bytes(live))
            case "Attend":
                while True:
                    await context.write(Part("beat").bytes(live))
                    await asyncio.sleep(0.1)
            case "PullModel":
                self._models += 1
                round_id = live.round_id + self._models
                kind = "model" if self._models <= ROUNDS else "model finished"
                await context.write(Part(kind).bytes(replace(live, round_id=round_id)))
            case "PushMomentum":
                await context.write(Part("accepted").bytes(live))
            case "Leave":
                await context.write(Part("left").bytes(live))
