"""Several requests at once with asyncio, one of which is given up: leaving its iterator aborts it.

python examples/library/with_asyncio.py
"""

from __future__ import annotations

import asyncio
import contextlib

from kvbaton import PDRuntime, Request, SamplingParams, load

PROMPTS = ("The capital of France is", "Water boils at", "The three primary colours are")


async def answer(runtime: PDRuntime, text: str, most: int) -> str:
    """The answer to one prompt; no more than ``most`` tokens of it are waited for."""
    request = Request(tuple(runtime.tokenizer.encode(text)), SamplingParams(max_tokens=16))
    tokens: list[int] = []
    # aclosing: the request is aborted here, and not when the iterator happens to be collected
    async with contextlib.aclosing(runtime.generate(request)) as outputs:
        async for output in outputs:
            tokens += output.token_ids
            if len(tokens) >= most:
                break
    return runtime.tokenizer.decode(tokens)


async def serve(runtime: PDRuntime) -> None:
    answers = await asyncio.gather(
        *(answer(runtime, text, most) for text, most in zip(PROMPTS, (16, 4, 16), strict=True))
    )
    for text, said in zip(PROMPTS, answers, strict=True):
        print(f"{text} ->{said!r}")


def main() -> None:
    settings, _ = load(overrides={"model": "smollm2", "transport.name": "loopback"})
    with PDRuntime.start(settings) as runtime:
        asyncio.run(serve(runtime))


if __name__ == "__main__":
    main()
