"""The picture of a hand-off: who speaks, when bytes move, and who holds which memory until what.

``python -m tools.pages.idea`` draws the copy that a clone shows, ``docs/idea.svg``; the site has one of its own.
"""

from __future__ import annotations

from pathlib import Path

COORDINATOR, PREFILL, DECODE = 2.0, 1.0, 0.0
LANES = {COORDINATOR: "coordinator", PREFILL: "prefill stage", DECODE: "decode stage"}
#: Time, from, to, what is said.  One line of the protocol each (docs/protocol.md).
WORDS = (
    (0.6, COORDINATOR, DECODE, "Reserve"),
    (1.5, DECODE, COORDINATOR, "Reserved"),
    (2.3, COORDINATOR, PREFILL, "Prefill"),
    (6.1, PREFILL, COORDINATOR, "Commit"),
    (6.7, COORDINATOR, DECODE, "Commit"),
    (8.3, DECODE, COORDINATOR, "Received"),
    (8.9, COORDINATOR, PREFILL, "Ack"),
    (9.7, PREFILL, COORDINATOR, "Retired"),
    (11.0, DECODE, COORDINATOR, "Output"),
    (12.1, DECODE, COORDINATOR, "Output"),
    (13.2, DECODE, COORDINATOR, "Retired"),
)
#: When a chunk leaves, and when its receipt is there.
CHUNKS = ((3.8, 4.5), (4.8, 5.5), (5.8, 7.7))
#: Lane, from, to, which memory is held: none of it is anybody else's before its end.
HOLDS = (
    (DECODE, 1.2, 13.0, "the request's blocks: nobody else's until no writer can touch them"),
    (PREFILL, 2.6, 9.4, "the prompt's KV: kept until received and quiet"),
)
COMPUTES = ((PREFILL, 2.8, 5.7, "prefill"), (DECODE, 10.2, 12.9, "decode"))


def draw(file: Path) -> None:
    """Write the picture as an SVG.  The same code gives the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "idea", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot
    from matplotlib.patches import FancyArrowPatch, Rectangle

    figure, axes = pyplot.subplots(figsize=(11, 4.8))
    for y, name in LANES.items():
        axes.plot([0, 14], [y, y], color="#9aa5b8", lw=1)
        axes.text(-0.15, y, name, ha="right", va="center", fontsize=10)
    for lane, start, end, what in HOLDS:
        axes.add_patch(Rectangle((start, lane - 0.34), end - start, 0.2, fc="#dfe9f7", ec="#3b5b92", lw=0.8))
        axes.text((start + end) / 2, lane - 0.24, what, ha="center", va="center", fontsize=7.4, color="#12233f")
    for lane, start, end, what in COMPUTES:
        axes.add_patch(Rectangle((start, lane - 0.07), end - start, 0.14, fc="#f1dfb4", ec="#8a6d3b", lw=0.8))
        axes.text((start + end) / 2, lane, what, ha="center", va="center", fontsize=7.4)
    for start, end in CHUNKS:
        arrow = FancyArrowPatch((start, PREFILL - 0.36), (end, DECODE + 0.1), arrowstyle="-|>", mutation_scale=14)
        arrow.set(linewidth=3.2, color="#b4552d")
        axes.add_patch(arrow)
    axes.text(3.85, 0.38, "bytes", fontsize=9, color="#b4552d", ha="right")
    for number, (at, source, target, word) in enumerate(WORDS):
        up = target > source
        arrow = FancyArrowPatch(
            (at, source + (0.04 if up else -0.04)), (at + 0.25, target + (-0.04 if up else 0.04)), arrowstyle="-|>",
            mutation_scale=10, linewidth=1.0, color="#3b5b92",
        )  # fmt: skip
        axes.add_patch(arrow)
        axes.text(at + 0.27, 1.75 - 0.17 * (number % 4), word, fontsize=7.8, ha="left", color="#3b5b92")
    axes.text(13.9, -0.62, "time", ha="right", fontsize=8, color="#777777")
    axes.set_xlim(-2.1, 14.2)
    axes.set_ylim(-0.75, 2.25)
    axes.axis("off")
    figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).resolve().parents[2] / "docs" / "idea.svg")
