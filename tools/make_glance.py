"""The README's picture: one predicted step under best-fit packing and under `auto`, on one time axis.

    python tools/make_glance.py        part of `make docs`; some seconds

The guide's example (llama-13b on 64 H100, documents of up to 128K tokens): the first of its global batches, of either
strategy the replica that ends last. All ranks of a pipeline, a bar an action: blue forward, orange backward, grey where
the rank computes nothing. A test compares the committed picture.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.memory import host_memory
from evenload.data.hub import model_from
from evenload.data.lengths import read_length_table
from evenload.explore.batches import BatchRule
from evenload.explore.timelines import detailed_timeline
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout
from evenload.types.timeline import KINDS

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "pictures" / "glance.svg"
LENGTHS = ROOT / "examples" / "lengths" / "github_dirs.npy.gz"
MODEL, CLUSTER, CONTEXT, DOCUMENTS = "llama-13b", "h100x64", 131_072, 512
DP, PP, TP = 4, 4, 4
STRATEGIES = ("best_fit", "auto")
WIDTH, LEFT, ROW, GAP, TOP = 960, 70, 22, 54, 40
COLOURS = {"F": "#3f7cc4", "B": "#e08a2e", "I": "#e08a2e", "W": "#f2c27f"}


class Panel(NamedTuple):
    """A step of a strategy: seconds, and (rank, kind, start, end) of every action of its slowest replica."""

    strategy: str
    step_s: float
    bars: list[tuple[int, str, float, float]]

    @property
    def idle_share(self) -> float:
        """Of the time of these ranks, up to the end of the step."""
        return 1 - sum(end - start for _, _, start, end in self.bars) / (PP * self.step_s)


def panels() -> list[Panel]:
    """The same global batch under each strategy."""
    model, cluster = model_from(MODEL), cluster_from(CLUSTER)
    layout = even_layout(model.num_layers, dp=DP, pp=PP, tp=TP)
    costs = analytic_coefficients(model, cluster, layout)
    planner = StepPlanner(
        model,
        costs,
        layout,
        cluster.device.usable_bytes,
        PlanOptions(max_pack_tokens=CONTEXT),
        host=host_memory(cluster),
    )
    rule = BatchRule(num_documents=DOCUMENTS, context=CONTEXT, overlong="truncate")
    (batch,) = rule.sample(read_length_table(str(LENGTHS)).lengths, steps=1, seed=0)
    result = []
    for strategy in STRATEGIES:
        proposal = planner.propose(0, batch.documents, strategy)
        timeline = detailed_timeline(proposal.plan, proposal.costs)
        last = int(timeline.dp_rank[np.argmax(timeline.end_s)])
        bars = [
            (int(timeline.rank[at]), KINDS[timeline.kind[at]], float(timeline.start_s[at]), float(timeline.end_s[at]))
            for at in np.flatnonzero(timeline.dp_rank == last)
        ]
        result.append(Panel(strategy, proposal.plan.predicted.step_time_s, bars))
    return result


def picture(result: list[Panel]) -> str:
    """As SVG; both panels have the axis of the longer step."""
    longest_s = max(panel.step_s for panel in result)
    scale = (WIDTH - LEFT - 20) / longest_s
    height = TOP + len(result) * (PP * ROW + GAP) + 18
    gain = result[0].step_s / result[-1].step_s
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="The same step takes {result[0].step_s:.1f} seconds under best fit and '
        f'{result[-1].step_s:.1f} under auto, predicted">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">One global batch, the same gradient: '
        f"{gain:.2f} times as fast (predicted)</text>",
    ]
    for number, panel in enumerate(result):
        top = TOP + number * (PP * ROW + GAP) + 22
        end = LEFT + panel.step_s * scale
        parts.append(
            f'<text x="{LEFT}" y="{top - 7}">{panel.strategy}: {panel.step_s:.1f} s, ranks idle '
            f"{panel.idle_share:.0%}</text>"
        )
        for rank in range(PP):
            y = top + rank * ROW
            parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end" fill="#444">stage {rank}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{ROW - 3}" fill="#d9d9d9"/>')
        parts += [
            f'<rect x="{LEFT + start * scale:.2f}" y="{top + rank * ROW}" width="{(stop - start) * scale:.2f}" '
            f'height="{ROW - 3}" fill="{COLOURS[kind]}"/>'
            for rank, kind, start, stop in panel.bars
        ]
        parts.append(
            f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{top - 4}" y2="{top + PP * ROW + 2}" stroke="#b00020" '
            'stroke-width="2"/>'
        )
        parts.append(f'<text x="{end:.1f}" y="{top + PP * ROW + 17}" text-anchor="end">{panel.step_s:.1f} s</text>')
    parts.append(
        f'<text x="{LEFT}" y="{height - 10}" fill="#444">the slowest of {DP} replicas: blue forward, orange backward, '
        f"grey idle; {MODEL} on {CLUSTER}, dp={DP} pp={PP} tp={TP}, documents of up to 128K tokens</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(picture(panels()), encoding="utf-8")
