"""The verdict as one self-contained page: the verdict on top, each failure with its clause's text, then every test."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from kvbaton_conformance.report.verdict import OUTCOMES, Result, Verdict, clause_text

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bad: #c62828; --good: #2e7d32; --dim: #8889; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; border-left: .5rem solid var(--colour); padding-left: 1rem; }
h2 { font-size: 1.15rem; margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .7rem; font-size: .85rem; }
blockquote { margin: .5rem 0; padding-left: 1rem; border-left: .25rem solid var(--line); }
dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0; }
section.failure { border: 1px solid var(--bad); border-radius: .4rem; padding: 0 1rem 1rem; margin: 1rem 0; }
.failed, .BROKEN { color: var(--bad); font-weight: 600; } .passed, .holds { color: var(--good); }
.absent, .unavailable, .unrun { color: var(--dim); }
small { color: var(--dim); }
"""


def page(verdict: Verdict) -> str:
    """The page, with nothing to load from elsewhere."""
    colour = "var(--good)" if verdict.conforms else "var(--bad)"
    failures = [result for result in verdict.results if result.outcome == "failed"]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{_text(verdict.sentence)}</title><style>{_STYLE}</style></head><body>",
        f"<h1 style='--colour: {colour}'>{_text(verdict.sentence)}</h1>",
        f"<p>{_text(_figures(verdict))}</p>",
        *(f"<p class='failed'>{_text(problem)}</p>" for problem in verdict.problems),
        *(f"<p class='absent'>{_text(reason)}</p>" for reason in verdict.reasons),
    ]
    if failures:
        parts += [f"<h2>Failures ({len(failures)})</h2>", *map(_failure, failures)]
    parts += ["<h2>Clauses</h2>", _clauses(verdict), "<h2>Tests</h2>", _tests(verdict.results)]
    parts += [
        "<h2>Environment</h2><ul>",
        *(f"<li>{_text(line)}</li>" for line in verdict.header),
        "</ul></body></html>",
    ]
    return "\n".join(parts) + "\n"


def badge(verdict: Verdict) -> str:
    """One line of Markdown for a README, without an image from elsewhere."""
    ran = sum(row.word == "holds" for row in verdict.rows)
    mark = "✅" if verdict.conforms else "❌"
    return f"{mark} kvbaton conformance: {verdict.sentence} ({ran} clauses hold)\n"


def _figures(verdict: Verdict) -> str:
    counts = ", ".join(f"{verdict.count(outcome)} {outcome}" for outcome in OUTCOMES if verdict.count(outcome))
    return f"{counts}; {verdict.seconds:.0f} s"


def _failure(result: Result) -> str:
    entries = [
        (f"{result.broken} of the contract says", f"<blockquote>{_markup(clause_text(result.broken))}</blockquote>"),
        ("expected", _text(result.expected)),
        ("seen", f"<pre>{_text(result.seen)}</pre>" if result.seen else ""),
        ("where to look", _text(result.look)),
        ("what each end had heard", f"<pre>{_text(result.events)}</pre>" if result.events else ""),
        ("such failures are often", f"<pre>{_text(result.troubleshooting)}</pre>" if result.troubleshooting else ""),
        ("to replay it", f"<pre>{_text(result.replay)}</pre>"),
    ]
    what = f"<pre>{_text(result.message)}</pre>"
    listed = "".join(f"<dt>{_text(title)}</dt><dd>{content}</dd>" for title, content in entries if content)
    return f"<section class='failure'><h3>{_text(result.id)}</h3>{what}<dl>{listed}</dl></section>"


def _clauses(verdict: Verdict) -> str:
    head = "".join(f"<th>{outcome}</th>" for outcome in OUTCOMES)
    lines = []
    for row in verdict.rows:
        counts = "".join(f"<td class='n'>{row.counts[outcome] or ''}</td>" for outcome in OUTCOMES)
        word = row.word.split()[0]
        lines.append(
            f"<tr><td>{row.id}</td><td class='{word}'>{_text(row.word)}</td>{counts}"
            f"<td><small>{_markup(clause_text(row.id).splitlines()[0])}</small></td></tr>"
        )
    return f"<table><tr><th>clause</th><th>verdict</th>{head}<th></th></tr>{''.join(lines)}</table>"


def _tests(results: Iterable[Result]) -> str:
    lines = [
        f"<tr><td>{_text(result.id)}</td><td>{' '.join(result.clauses)}</td><td class='{result.outcome}'>"
        f"{result.outcome}</td><td class='n'>{result.seconds:.2f}</td>"
        f"<td><small>{_text(result.message.splitlines()[0] if result.message else '')}</small></td></tr>"
        for result in results
    ]
    return f"<table><tr><th>test</th><th>clauses</th><th>outcome</th><th>s</th><th></th></tr>{''.join(lines)}</table>"


def _text(text: str) -> str:
    return html.escape(text)


def _markup(text: str) -> str:
    """The little Markdown that clauses use."""
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text.split("\n|")[0]))
    return re.sub(r"\*\*([^*]+)\*\*|\*([^*]+)\*", lambda match: f"<em>{match[1] or match[2]}</em>", escaped)
