"""Agreement of speculation and of the FP8 cache on any device: a command, since a GPU is not everywhere.

For each dtype and each way to run the engine, a model with random weights answers prompts that repeat themselves (so
that drafts are made), greedy and seeded: once undisaggregated, once with P and D in two processes over a transport.
Token ids must be equal (A1).  In float32, speculation must also give what the engine gives without it; in bfloat16 a
step that checks several tokens rounds otherwise than several steps of one, so that only the first is claimed (A3), and
how many agree is printed.

    python plugins/transformers/tests/agreement.py --transport nixl --device cuda
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbaton import PDRuntime, Request, RequestRecord, SamplingParams, Settings, load, run_colocated

#: About 0.1 B parameters: enough for every kernel that a larger one of its kind runs.
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 256,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
FP8 = {"kv_dtype": "fp8"}
#: One token that occurred before is enough to guess on: right or wrong, drafts are made all the time.
SPECULATION = {"speculation": "prompt-lookup", "ngram": 1}
#: Name to the engine's options, and the way without drafts that it is compared with.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, ""),
    "speculation": (SPECULATION, "plain"),
    "fp8, block scales": ({**FP8, "kv_scales": "block"}, ""),
    "fp8, head scales": ({**FP8, "kv_scales": "head"}, ""),
    "fp8, tensor scales": ({**FP8, "kv_scales": "tensor"}, ""),
    "fp8, block scales, speculation": ({**FP8, "kv_scales": "block", **SPECULATION}, "fp8, block scales"),
}


def requests(count: int, tokens: int) -> list[Request]:
    """Greedy ones and seeded ones in turn."""
    made = []
    for number in range(count):
        draw = random.Random(number)
        phrase = [draw.randrange(3, 256) for _ in range(40)]
        sampled: dict[str, Any] = {"temperature": 0.3, "seed": number, "top_k": 30} if number % 2 else {}
        prompt = tuple((phrase * 20)[: 300 + 70 * number])
        made.append(Request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, **sampled)))
    return made


def answered(records: list[RequestRecord]) -> list[tuple[int, ...]]:
    for record in records:
        if record.error is not None:
            raise record.error
    return [tuple(record.token_ids) for record in records]


def disaggregated(settings: Settings, asked: list[Request]) -> tuple[list[tuple[int, ...]], int, int]:
    """Tokens, drafted tokens, and those of them that were right."""
    with PDRuntime.start(settings) as runtime:
        keys = [runtime.add_request(request) for request in asked]
        records = [list(runtime.stream(key))[-1].record for key in keys]
        engine = runtime.statistics()["decode-0"]["engine"]
    tokens = answered([record for record in records if record is not None])
    return tokens, engine.get("draft_tokens_total", 0), engine.get("draft_tokens_accepted_total", 0)


def play(transport: str, device: str, dtypes: list[str], count: int, tokens: int, shape: Path) -> Iterator[bool]:
    asked = requests(count, tokens)
    for dtype in dtypes:
        local: dict[str, list[tuple[int, ...]]] = {}
        for way, (options, without) in WAYS.items():
            began = time.monotonic()
            engine = {"device": device, "dtype": dtype, "batching": "isolated", "blocks": 512, **options}
            more = {"stages.devices": [0, 0]} if device == "cuda" else {}
            settings, _ = load(overrides={
                "model": f"random:{shape}", "engine.name": "transformers", "engine.options": engine,
                "transport.name": transport, "stages.launch": "process", **more,
            })  # fmt: skip
            local[way] = answered(run_colocated(settings, asked))
            over, drafted, right = disaggregated(settings, asked)
            equal = sum(a == b for a, b in zip(over, local[way], strict=True))
            text = f"{dtype} {way}: {equal} of {count} equal the undisaggregated run"
            good = over == local[way]
            if without:
                same = sum(a == b for a, b in zip(local[way], local[without], strict=True))
                text += f"; {same} of {count} equal the run without drafts ({right} of {drafted} drafted tokens right)"
                good = good and (dtype != "float32" or same == count) and drafted > 0
            print(f"{text}; {time.monotonic() - began:.0f} s: {'right' if good else 'WRONG'}", flush=True)
            yield good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the command itself")
    given = parser.parse_args()
    shape = {**SHAPE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} if given.small else SHAPE
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        ways = list(
            play(given.transport, given.device, given.dtypes.split(","), given.requests, given.tokens, Path(folder))
        )
    print("HOLDS" if all(ways) else "BROKEN", f"{sum(ways)} of {len(ways)}")
    return 0 if all(ways) else 1


if __name__ == "__main__":
    sys.exit(main())
