"""The dashboard for Grafana, made from a table of panels: ``python -m kvbaton.observe.dashboard > dashboard.json``.

Import the file in Grafana (Dashboards, New, Import) and choose the Prometheus that scrapes kvbaton.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, Final

_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24
_HEIGHT: Final = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """``queries``: expression and legend.  ``unit`` in Grafana's words; ``width`` in 24ths."""

    title: str
    text: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    width: int = 8
    kind: str = "timeseries"


def _rate(name: str, by: str) -> str:
    return f"sum by ({by}) (rate(kvbaton_{name}[$__rate_interval]))"


def _quantile(share: float, name: str, by: str) -> str:
    return f"histogram_quantile({share}, sum by (le, {by}) (rate(kvbaton_{name}_bucket[$__rate_interval])))"


def _mean(name: str, by: str) -> str:
    return f"{_rate(f'{name}_sum', by)} / {_rate(f'{name}_count', by)}"


ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "At a glance": (
        Panel("Runtime", "1: it answers.", (("min(kvbaton_up)", ""),), width=3, kind="stat"),
        Panel("Stages up", "Of those configured.", (("sum(kvbaton_peer_up)", "up"), ("count(kvbaton_peer_up)", "of")),
              width=3, kind="stat"),
        Panel("Not in the last scrape", "Stages that did not answer in time.",
              (("count(kvbaton_scrape_ok == 0) or vector(0)", ""),), width=3, kind="stat"),
        Panel("Failed per minute", "Requests that failed.",
              (('60 * sum(rate(kvbaton_transfers_total{outcome="failed"}[$__rate_interval])) or vector(0)', ""),),
              width=3, kind="stat"),
        Panel("First token, p95", "From add_request to the first token.",
              ((('histogram_quantile(0.95, sum by (le) '
                '(rate(kvbaton_transfer_phase_seconds_bucket{phase="first_token"}[$__rate_interval])))'), ""),),
              "s", 3, "stat"),
        Panel("Quarantined", "Memory that nobody can prove quiet.", (("sum(kvbaton_quarantined_bytes)", ""),),
              "bytes", 3, "stat"),
        Panel("Unfenced", "Lost stages whose end is not proven.", (("sum(kvbaton_unfenced_peers)", ""),), width=3,
              kind="stat"),
        Panel("Violations", "Since start; above 0 is a defect.", (("sum(kvbaton_violations_total) or vector(0)", ""),),
              width=3, kind="stat"),
    ),
    "Requests": (
        Panel("Requests per second, by how they ended", "Added against ended.",
              (("sum(rate(kvbaton_requests_added_total[$__rate_interval]))", "added"),
               (_rate("transfers_total", "outcome"), "{{outcome}}")), "reqps"),
        Panel("Why requests failed or were cancelled", "The log has the text.",
              (('sum by (role, cause) (rate(kvbaton_transfers_total{cause!="none"}[$__rate_interval]))',
                "{{role}} {{cause}}"),), "reqps"),
        Panel("Requests now", "Waiting, running, draining.", (("sum by (state) (kvbaton_requests)", "{{state}}"),)),
        Panel("Phases, p50", "Where the time goes.",
              ((_quantile(0.5, "transfer_phase_seconds", "phase"), "{{phase}}"),), "s"),
        Panel("Phases, p95", "Where the time goes.",
              ((_quantile(0.95, "transfer_phase_seconds", "phase"), "{{phase}}"),), "s"),
        Panel("Oldest", "Of each state.", (("max by (state) (kvbaton_oldest_transfer_seconds)", "{{state}}"),), "s"),
        Panel("Tokens per second", "Of requests that ended.", ((_rate("tokens_total", "kind"), "{{kind}}"),)),
        Panel("Refused and requeued", "Refused by add_request; waiting again.",
              ((_rate("requests_refused_total", "reason"), "{{reason}}"),
               ("sum(rate(kvbaton_requeued_total[$__rate_interval]))", "requeued")), "reqps"),
        Panel("Routing", "The policy's own figures.", (("sum by (figure) (kvbaton_routing)", "{{figure}}"),)),
    ),
    "Transport": (
        Panel("Bytes per second", "By the stage that sends.", ((_rate("bytes_total", "stage"), "{{stage}}"),), "Bps"),
        Panel("Chunk, p50 and p95", "Submission to done.",
              ((_quantile(0.5, "chunk_seconds", "stage"), "{{stage}} p50"),
               (_quantile(0.95, "chunk_seconds", "stage"), "{{stage}} p95")), "s"),
        Panel("In flight", "Bytes handed to the transport.",
              (("sum by (stage) (kvbaton_inflight_bytes)", "{{stage}}"),), "bytes"),
        Panel("Segments per chunk, before and after coalescing", "Fewer is cheaper.",
              ((("sum by (stage, coalescing) (rate(kvbaton_segments_total[$__rate_interval])) / on (stage) group_left"
                " sum by (stage) (rate(kvbaton_chunks_total[$__rate_interval]))"), "{{stage}} {{coalescing}}"),)),
        Panel("Chunks that did not end well", "By outcome.",
              (('sum by (stage, outcome) (rate(kvbaton_chunk_outcomes_total{outcome!="done"}[$__rate_interval]))',
                "{{stage}} {{outcome}}"),), "cps"),
        Panel("Back-pressure", "Share of the time in which ready chunks found no room.",
              ((_rate("backpressure_seconds_total", "stage"), "{{stage}}"),), "percentunit"),
        Panel("Refusals for want of room", "Ready chunks that found none, per second.",
              ((_rate("transport_full_total", "stage"), "{{stage}}"),), "cps"),
        Panel("Faults and refused events of the transport", "Of the plugin.",
              ((_rate("transport_faults_total", "stage"), "{{stage}} faults"),
               (_rate("transport_dropped_total", "stage, reason"), "{{stage}} {{reason}}")), "cps"),
        Panel("Unproven and quarantined chunks", "Held until they are proven.",
              (("sum by (stage) (kvbaton_unproven_chunks)", "{{stage}} unproven"),
               ("sum by (stage) (kvbaton_quarantined_chunks)", "{{stage}} quarantined"))),
        Panel("The plugin's own figures", "See its page.",
              (("sum by (stage, figure) (kvbaton_connector)", "{{stage}} {{figure}}"),)),
    ),
    "Memory": (
        Panel("Blocks promised", "The coordinator's books, as a share of capacity.",
              ((('kvbaton_credits{kind="blocks", state="reserved"} / ignoring (state)'
                ' kvbaton_credits{kind="blocks", state="capacity"}'), "{{peer}}"),), "percentunit"),
        Panel("Slots promised", "The coordinator's books, as a share of capacity.",
              ((('kvbaton_credits{kind="slots", state="reserved"} / ignoring (state)'
                ' kvbaton_credits{kind="slots", state="capacity"}'), "{{peer}}"),), "percentunit"),
        Panel("Blocks measured", "The engines' own count.",
              (("sum by (stage, state) (kvbaton_blocks)", "{{stage}} {{state}}"),)),
        Panel("Oldest lease", "Memory held for a transfer that is not over, or not imported.",
              (("max by (stage) (kvbaton_oldest_lease_seconds)", "{{stage}}"),), "s"),
    ),
    "Stages": (
        Panel("Up", "0 while lost, starting or given up.", (("kvbaton_peer_up", "{{peer}}"),)),
        Panel("Lost, fenced, restarted", "Since start.",
              (("sum by (peer) (kvbaton_peers_lost_total)", "{{peer}} lost"),
               ("sum by (peer) (kvbaton_peers_fenced_total)", "{{peer}} fenced"),
               ("sum(kvbaton_restarts_total)", "restarts"))),
        Panel("Engine step, mean and p95", "",
              ((_mean("engine_step_seconds", "stage"), "{{stage}} mean"),
               (_quantile(0.95, "engine_step_seconds", "stage"), "{{stage}} p95")), "s"),
        Panel("Pump pass, p95", "Passes that found something to do.",
              ((_quantile(0.95, "pump_pass_seconds", "stage"), "{{stage}}"),), "s"),
        Panel("Pump lag, p95", "How late it came back from a pause.",
              ((_quantile(0.95, "pump_lag_seconds", "stage"), "{{stage}}"),), "s"),
        Panel("Dropped messages, ignored events, faults", "Per second.",
              ((_rate("dropped_messages_total", "stage, family, reason"), "{{stage}} {{family}} {{reason}}"),
               (_rate("ignored_events_total", "stage"), "{{stage}} ignored"),
               (_rate("faults_total", "stage"), "{{stage}} faults")), "cps"),
        Panel("Scrape", "What asking the stages takes.", (("max(kvbaton_scrape_seconds)", "seconds"),), "s"),
        Panel("What runs", "", (("kvbaton_build_info", "{{version}} {{engine}} {{transport}} {{launch}}"),), width=16),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, members in ROWS.items():
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row, "collapsed": False, "gridPos": place})
        top += 1
        left = height = 0
        for panel in members:
            if left + panel.width > _COLUMNS:
                left, top = 0, top + height
            height = _HEIGHT // 2 if panel.kind == "stat" else _HEIGHT
            place = {"h": height, "w": panel.width, "x": left, "y": top}
            panels.append(_panel(panel, len(panels) + 1, place))
            left += panel.width
        top += height
    variable = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "title": "kvbaton", "uid": "kvbaton", "tags": ["kvbaton"], "schemaVersion": 39, "version": 1,
        "description": "Hand-offs of KV cache between prefill and decode stages.",
        "editable": True, "graphTooltip": 1, "refresh": "10s", "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable]}, "panels": panels,
    }  # fmt: skip


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend or "__auto", "datasource": _DATASOURCE}
        for i, (expression, legend) in enumerate(panel.queries)
    ]
    made: dict[str, Any] = {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.text, "gridPos": place,
        "datasource": _DATASOURCE, "targets": targets, "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0},
                                                                       "overrides": []},
    }  # fmt: skip
    if panel.kind == "stat":
        made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    else:
        made["options"] = {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return made


def main() -> None:
    """Write the dashboard to standard output."""
    json.dump(dashboard(), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
