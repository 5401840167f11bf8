"""Everything of this repository that needs a GPU, in one run: what CI, which has none, cannot see.

    python tools/on_gpu.py --into out                      # all, some minutes; first what is timed, by itself
    python tools/on_gpu.py --into out --only doctor,bench  # only these
    python tools/on_gpu.py --into out-01 --devices 0,1     # where there are two: kits, exits, runs, P7 and P8 over both
    python tools/on_gpu.py --list

Each step is a command with a limit of its own; what it printed lies in ``out/NAME.txt``, below the command as a user
would type it, and what it writes beside it.  A line per step says how it ended; the exit status is 0 where all did as
they should.  Steps that measure run one after the other with nothing beside them, then the others side by side.
Nothing is installed: the workspace's packages, torch with CUDA, transformers, NIXL and UCXX must be importable.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: A Llama of about 1 B parameters, whose weights are random: as large as the kernels and the cache need.
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
TRANSPORTS = ("nixl", "cuda_ipc", "ucx")


@dataclass(frozen=True)
class Step:
    """``words``: of ``kvbaton`` where it begins with that, else of Python.  ``limit``: seconds.  ``alone``: it
    measures.  ``statuses``: with which it may end."""

    name: str
    words: Sequence[str]
    limit: float
    alone: bool = False
    statuses: tuple[int, ...] = (0,)

    def command(self) -> list[str]:
        if self.words[0] == "kvbaton":
            return [sys.executable, "-c", "from kvbaton.cli import main; main()", *self.words[1:]]
        return [sys.executable, *self.words]

    def typed(self) -> str:
        return shlex.join(self.words if self.words[0] == "kvbaton" else ["python", *self.words])


def steps(into: Path, devices: str = "0,0") -> list[Step]:
    """In the order in which they are worth most.  ``devices``: of prefill and decode, where a step asks for them."""

    def at(name: str) -> str:
        return str(into / name)

    model = str(into / "model")
    engine = [
        word
        for option in ("dtype=bfloat16", "device=cuda", "batching=isolated", "blocks=1024")
        for word in ("--engine-option", option)
    ]
    run = [
        "kvbaton",
        "run",
        "--model",
        f"random:{model}",
        "--launch",
        "process",
        "--set",
        f"stages.devices={devices}",
        *engine,
    ]
    run += ["--prompts", str(into / "prompts.jsonl"), "--transport", "cuda_ipc"]
    two = ("--devices", devices) if devices != "0,0" else ()  # as typed by somebody who has one
    exits = ("--memory", "cuda", *two, "--count", "50", "--jobs", "8")
    tests = ("-m", "pytest", "-q", "-c", os.devnull, "--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir")
    folder = str(ROOT / "plugins" / "cuda_ipc" / "tests")
    found = [
        Step("p4", ("benchmarks", "--only", "P4", "--json", at("P4.json")), 90, alone=True, statuses=(0, 1)),
        Step("doctor", ("kvbaton", "doctor"), 150, alone=True, statuses=(0, 1)),
        Step("doctor-cuda", ("kvbaton", "doctor", "--memory", "cuda"), 150, alone=True, statuses=(0, 1)),
    ]
    for name in TRANSPORTS:
        words = ("kvbaton", "bench", name, "--memory", "cuda", "--seconds", "6", "--plot", at(f"bench-{name}.svg"))
        found.append(Step(f"bench-{name}", words, 100, alone=True))
    sweep = ("--part", "transport", "--sweep", "--seconds", "8", "--plot", at("bench-sweep.svg"))
    found += [
        Step("bench-sweep", ("kvbaton", "bench", "cuda_ipc", "--memory", "cuda", *sweep), 100, alone=True),
        Step("p7", ("benchmarks", "--only", "P7", *two, "--json", at("P7.json")), 240, alone=True, statuses=(0, 1)),
        Step("p8", ("benchmarks", "--only", "P8", *two, "--json", at("P8.json")), 240, alone=True, statuses=(0, 1)),
        Step("plugins", ("kvbaton", "plugins"), 60),
        Step("lanes-nixl", ("kvbaton", "lanes", "nixl", "--memory", "cuda"), 90),
        Step("trace", (*run, "--trace", at("trace.json")), 240),
        Step("compare", (*run, "--compare"), 300),
        Step("exits", ("-m", "kvbaton_conformance.exits", "--transport", "cuda_ipc", *exits), 300),
    ]
    for name, transport, *level in (
        ("cuda_ipc", "cuda_ipc"),
        ("ucx-connector", "ucx", "--level", "connector"),
        ("ucx-handoff", "ucx", "--level", "handoff"),
    ):
        kit = ["kvbaton", "conformance", transport, "--memory", "cuda", *two, "--require-env", *level]
        found.append(Step(f"kit-{name}", (*kit, "--report", at(f"kit-{name}")), 600))
    agreement = ("plugins/transformers/tests/agreement.py", "--transport", "cuda_ipc", "--device", "cuda")
    found.append(Step("agreement", (*agreement, "--requests", "4"), 400))
    # the longest, and the kit has looked at the same from without
    return [*found, Step("device-tests", (*tests, folder, f"{folder}/test_device.py"), 420)]


def carry_out(step: Step, into: Path, until: float) -> bool:
    """Whether it ended as it should."""
    limit = min(step.limit, until - time.monotonic())
    began = time.monotonic()
    output = into / f"{step.name}.txt"
    status: int | str
    with output.open("w") as file:
        file.write(f"$ {step.typed()}\n")
        file.flush()
        if limit <= 0:
            status = "not begun: the time is over"
        else:
            child = subprocess.Popen(
                step.command(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = child.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                child.wait()
                status = f"not over within {limit:.0f} s"
    good = status in step.statuses
    # as a page shows it: no blanks that nobody sees, no paths of this machine
    lines = [line.rstrip().replace(f"{into}/", "") for line in output.read_text(errors="replace").splitlines()]
    output.write_text("".join(f"{line}\n" for line in lines))
    last = [line for line in lines if line][-1:]
    ended = status if isinstance(status, str) else f"status {status}"
    shown = f"{'ok  ' if good else 'FAIL'} {step.name}: {ended}, {time.monotonic() - began:.0f} s"
    print(shown if good else f"{shown}\n     {last[0][:300]}", flush=True)
    return good


def has_gpu() -> bool:
    look = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", look], capture_output=True, check=False).returncode == 0


def prepare(into: Path) -> None:
    """The model's description, and prompts for it."""
    (into / "model").mkdir(parents=True, exist_ok=True)
    (into / "model" / "config.json").write_text(json.dumps(MODEL))
    draw = random.Random(0)
    lines = [
        {
            "prompt": "".join(chr(draw.randrange(32, 127)) for _ in range(2048)),
            "max_tokens": 16,
            "ignore_eos": True,
        }
        for _ in range(4)
    ]
    (into / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 where every step did as it should, 1 where one did not, 2 for no GPU, or no such step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--into", type=Path, default=Path("on-gpu"), help="folder of the outputs")
    parser.add_argument("--only", default="", help="names of steps, with commas")
    parser.add_argument(
        "--devices", metavar="I,J", default="0,0", help="of prefill and decode, where a step has two ends"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="for everything")
    parser.add_argument("--jobs", type=int, default=4, help="steps side by side, of those that measure nothing")
    parser.add_argument("--list", action="store_true", help="say what the steps are")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"\d+,\d+", given.devices):
        print(f"--devices {given.devices}: two numbers are wanted, as in 0,1", file=sys.stderr)
        return 2
    into = given.into.resolve()
    known = steps(into, given.devices)
    wanted = [name for name in given.only.split(",") if name] or [step.name for step in known]
    strange = [name for name in wanted if name not in {step.name for step in known}]
    if strange:
        print(f"no such step: {', '.join(strange)}; --list says which there are", file=sys.stderr)
        return 2
    chosen = [step for step in known if step.name in wanted]
    if given.list:
        print("\n".join(f"{step.name}: {step.typed()}" for step in chosen))
        return 0
    if not has_gpu():
        print("torch sees no CUDA device here: there is nothing for this to look at", file=sys.stderr)
        return 2
    prepare(into)
    until = time.monotonic() + given.seconds
    good = [carry_out(step, into, until) for step in chosen if step.alone]
    with ThreadPoolExecutor(given.jobs) as pool:
        good += pool.map(lambda step: carry_out(step, into, until), [step for step in chosen if not step.alone])
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
