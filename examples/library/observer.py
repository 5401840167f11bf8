"""An observer: how long after its prefill each request had all of its KV at the decode stage.

Any object with methods named after hooks of ``kvbaton.hooks.Specifications`` is one; a method takes the arguments that
it wants.  They run on kvbaton's own threads, so an observer is quick and calls nothing of the runtime.

python examples/library/observer.py
"""

from __future__ import annotations

from kvbaton import PDRuntime, Request, RequestRecord, SamplingParams, TransferId, hookimpl, load


class Exposed:
    """Time between *committed* (the last chunk was handed to the wire) and *received*: what the wire costs."""

    def __init__(self) -> None:
        self._committed: dict[TransferId, float] = {}
        self.seconds: list[float] = []

    @hookimpl
    def kvbaton_milestone(self, transfer: TransferId, milestone: str, at: float) -> None:
        if milestone == "committed":
            self._committed[transfer] = at
        elif milestone == "received":
            self.seconds.append(max(at - self._committed.get(transfer, at), 0.0))
        elif milestone == "source_retired":
            self._committed.pop(transfer, None)

    @hookimpl
    def kvbaton_request_finished(self, record: RequestRecord) -> None:
        print(f"request {record.request_id}: {record.bytes} bytes in {record.chunks} chunks")


def main() -> None:
    observer = Exposed()
    settings, _ = load(overrides={"model": "smollm2", "transport.name": "loopback"})
    with PDRuntime.start(settings, hooks=[observer]) as runtime:
        prompt = tuple(runtime.tokenizer.encode("The capital of France is"))
        tokens: list[int] = []
        for output in runtime.stream(runtime.add_request(Request(prompt, SamplingParams(max_tokens=8)))):
            tokens += output.token_ids
        print(runtime.tokenizer.decode(tokens))  # not as they come: the observer prints on another thread
    print(f"received {1000 * max(observer.seconds):.1f} ms after the last chunk was submitted")


if __name__ == "__main__":
    main()
