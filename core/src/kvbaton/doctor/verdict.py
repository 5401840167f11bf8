"""Whether a transport is fit on this machine: judged by what was tried, and by what its plugin expects.

A plugin says so with ``advice``, see :class:`~kvbaton.connector.WithAdvice`.  What every transport is measured by
besides is plain copying in the same run: one that is slower by :data:`FAR_SLOWER` has fallen to something slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from kvbaton.connector import Advice, ConnectorPlugin, SelfTest, WithAdvice
from kvbaton.doctor import foreign
from kvbaton.doctor.machine import Machine
from kvbaton.doctor.trial import ENOUGH, Trial
from kvbaton.quantities import duration, rate, size

#: A transport with less than this share of the rate of plain copying is degraded.  Copying within a device is so fast
#: that what is started from Python comes nowhere near it.
FAR_SLOWER: Final[Mapping[str, float]] = {"host": 1 / 100, "cuda": 1 / 200}

Standing = Literal["fit", "degraded", "unusable"]

#: What a command ends with.
STATUSES: Final[Mapping[Standing, int]] = {"fit": 0, "degraded": 1, "unusable": 2}


class Finding(msgspec.Struct, frozen=True):
    """One sentence for an operator; ``expected`` and ``remedy`` may be empty."""

    level: Literal["unusable", "degraded", "note"]
    text: str
    expected: str = ""
    remedy: str = ""

    def sentence(self) -> str:
        """All of it."""
        expected = f"; expected {self.expected}" if self.expected else ""
        return f"{self.text}{expected}{'; ' + self.remedy if self.remedy else ''}"


class Verdict(msgspec.Struct, frozen=True):
    standing: Standing
    summary: str
    findings: tuple[Finding, ...] = ()


def judge(name: str, plugin: ConnectorPlugin, options: Any, trial: Trial, machine: Machine) -> Verdict:
    """Never raises: a plugin whose advice fails has said nothing but that."""
    findings = _of_failure(name, trial)
    if trial.measured and trial.failure is None:
        if trial.whole:
            findings += _of_rate(name, trial, _advice(name, plugin, options, trial, machine))
        if trial.left_out:
            findings.append(_of_time(name, trial))
    if trial.closing:
        findings.append(
            Finding(
                "degraded", f"it does not end as it must: {'; '.join(trial.closing)}", "",
                f"kvbaton conformance {_with_memory(name, trial)} -k teardown --partial looks closer",
            )
        )  # fmt: skip
    levels = {finding.level for finding in findings}
    standing: Standing = "unusable" if "unusable" in levels else "degraded" if "degraded" in levels else "fit"
    return Verdict(standing, _summary(trial), tuple(findings))


def _summary(trial: Trial) -> str:
    if trial.failure is not None or not trial.measured:
        return ""
    share = trial.rate / trial.plain if trial.plain else 0.0
    return (
        f"{rate(trial.rate)}, {share:.2f} of plain copying ({rate(trial.plain)});"
        f" {duration(trial.latency)} for the smallest"
    )


def _with_memory(name: str, trial: Trial) -> str:
    """What a command takes that is to look at the same."""
    return name if trial.memory == "host" else f"{name} --memory {trial.memory}"


def _of_failure(name: str, trial: Trial) -> list[Finding]:
    failure = trial.failure
    if failure is None:
        return []
    judged = _with_memory(name, trial)
    remedy = {
        "refused": "",
        "failed": "",
        "late": "look whether the two processes reach each other: containers, firewalls, UCX_TLS",
        "hung": f"kvbaton conformance {judged} says in which situations it does",
        "died": f"kvbaton conformance {judged} says in which situations it does",
        "wrong": f"do not use it: kvbaton conformance {judged} says which clause it breaks",
    }[failure.cause]
    return [Finding("unusable", failure.text, "", remedy)]


def _of_rate(name: str, trial: Trial, advice: list[Advice]) -> list[Finding]:
    found = [Finding(one.level, one.text, one.expected, one.remedy) for one in advice]
    if (
        trial.plain
        and trial.rate < FAR_SLOWER[trial.memory] * trial.plain
        and not any(one.level == "degraded" for one in found)
    ):
        found.append(
            Finding(
                "degraded", f"{trial.memory} memory moves at {rate(trial.rate)}: {trial.plain / trial.rate:.0f} times"
                f" slower than plain copying", f"a good part of {rate(trial.plain)}",
                f"look by which ways it goes: kvbaton lanes {_with_memory(name, trial)}" if trial.lanes else "",
            )
        )  # fmt: skip
    return found


def _of_time(name: str, trial: Trial) -> Finding:
    count = len(trial.measured) + len(trial.left_out)
    text = f"{name} was slow: {len(trial.left_out)} of {count} measurements were not begun"
    if trial.whole:
        return Finding("note", text)
    largest = size(max(trial.left_out))
    return Finding(
        "degraded", f"{text}, and none of {largest} was made", f"all of them within {ENOUGH:g} s",
        f"run it again where less else runs; kvbaton bench {_with_memory(name, trial)} takes as long as it"
        " is told",
    )  # fmt: skip


def _advice(name: str, plugin: ConnectorPlugin, options: Any, trial: Trial, machine: Machine) -> list[Advice]:
    if not isinstance(plugin, WithAdvice):
        return []
    found = SelfTest(
        trial.memory, trial.devices, trial.rate, trial.plain, trial.latency, trial.lanes, machine.environment,
        _reach(machine, trial), None if machine.may_ptrace else machine.ptrace_scope,
    )  # fmt: skip
    try:
        return foreign.values(plugin.advice(options, found), Advice)
    except Exception as error:
        return [Advice("note", f"the plugin {name} could not say what to expect: {type(error).__name__}: {error}")]


def _reach(machine: Machine, trial: Trial) -> bool | None:
    """Whether the two devices of a trial reach each other; as they are numbered where all are visible."""
    one, other = sorted(trial.devices)
    if one == other:
        return True
    if "CUDA_VISIBLE_DEVICES" in machine.environment:
        return None
    known = {(a, b): how for a, b, how in machine.gpu_peers}
    return known[one, other] != "none" if (one, other) in known else None
