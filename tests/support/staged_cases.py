"""Plans of two and four ranks whose transfers are of every kind."""

from context_plans import merged_plan
from varied_plans import varied_plan

LAYERS = 4


def _varied(**layout):
    return [
        varied_plan(41 + seed, num_layers=LAYERS, schedule=name, num_documents=12, max_budget=20, **layout)
        for seed, name in enumerate(("list", "list_split"))
    ]


CASES = {
    "pipeline, fifo": lambda: (_varied(pp=2, dp=2, virtual=1), {"channels": "fifo"}),
    "parts of matrices": lambda: (_varied(pp=1, dp=1, tp=2), {}),
    "virtual stages, fifo": lambda: (_varied(pp=2, dp=1, virtual=2)[:1], {"channels": "fifo"}),
    "pipeline, directed": lambda: (_varied(pp=2, dp=1, virtual=1), {"channels": "directed"}),
    "shared documents": lambda: ([merged_plan(3, dp=2, pp=1)], {}),
    "shared documents in a ring": lambda: ([merged_plan(3, dp=2, pp=1)], {"exchange": "ring"}),
}
