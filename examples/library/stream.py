"""The library in a few lines: a real model, one prefill and one decode stage, tokens as they come.

python examples/library/stream.py
"""

from __future__ import annotations

from kvbaton import PDRuntime, Request, SamplingParams, load


def main() -> None:
    settings, _ = load(overrides={"model": "smollm2", "transport.name": "loopback"})
    with PDRuntime.start(settings) as runtime:
        tokenizer = runtime.tokenizer
        prompt = tuple(tokenizer.encode("The capital of France is"))
        for output in runtime.stream(runtime.add_request(Request(prompt, SamplingParams(max_tokens=16)))):
            print(tokenizer.decode(output.token_ids), end="", flush=True)
            if output.record is not None:
                print(f"\n{output.record.bytes} bytes in {output.record.chunks} chunks, {output.finish_reason}")


if __name__ == "__main__":
    main()
