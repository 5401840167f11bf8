"""A policy of one's own: requests of one customer go to one decode stage, as long as it can take them.

It is asked before the built-in policy, with the pairs that have room for the request; None leaves the choice to the
next one.  Here a request's id begins with its customer's name.

python examples/library/policy.py
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from kvbaton import PDRuntime, Request, RequestKey, SamplingParams, hookimpl, load


class Pinned:
    """The decode stage follows from the customer; of the prefill stages the one with the least load is taken."""

    def __init__(self, decode: int) -> None:
        self._decode = decode

    @hookimpl
    def kvbaton_choose_pair(self, request: RequestKey, pairs: Sequence[tuple[str, str]], prefill) -> tuple | None:
        customer = request.partition("/")[0]
        wanted = f"decode-{zlib.crc32(customer.encode()) % self._decode}"
        load = {stage.name: stage.load for stage in prefill}
        return min((pair for pair in pairs if pair[1] == wanted), key=lambda pair: load[pair[0]], default=None)


def main() -> None:
    settings, _ = load(overrides={"model": "smollm2", "transport.name": "loopback", "stages.decode": 2})
    with PDRuntime.start(settings, hooks=[Pinned(settings.stages.decode)]) as runtime:
        prompt = tuple(runtime.tokenizer.encode("The capital of France is"))
        for name in ("anna/1", "anna/2", "bert/1"):
            key = runtime.add_request(Request(prompt, SamplingParams(max_tokens=4)), name)
            *_, last = runtime.stream(key)
            assert last.record is not None
            print(f"{name} was decoded by {last.record.decode}")


if __name__ == "__main__":
    main()
