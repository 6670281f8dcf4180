"""Small hand-made results of a comparison."""

from cost_samples import sample_coefficients, sample_model
from evenload.bench.results import (
    BatchRun,
    BenchInputs,
    BenchResult,
    MachineLoad,
    PackErrors,
    RecordedBatch,
    StrategyRuns,
    option_tables_of,
)
from evenload.cost.memory import HostMemory
from evenload.planning.problem import PlanOptions
from evenload.types.layout import even_layout
from ledger import COLUMNS, FACTS, LedgerRow


def batch_run(measured_s=(1.0,), predicted_s=1.0, loss=2.0, tokens=100, batch=0) -> BatchRun:
    return BatchRun(
        batch=batch,
        plan_digest="d",
        documents=3,
        tokens=tokens,
        num_packs=2,
        measured_s=measured_s,
        predicted_s=predicted_s,
        packs=PackErrors(
            median=0.0, median_abs=0.0, p90_abs=0.0, total=0.0, measured_s=0.2, predicted_s=0.2, repeat_p90=0.1
        ),
        measured_peak_bytes=1000,
        predicted_peak_bytes=900,
        loss=loss,
    )


def runs(strategy: str, *batches: BatchRun) -> StrategyRuns:
    return StrategyRuns(strategy=strategy, batches=batches)


def result_of(*strategies: StrategyRuns, **changes) -> BenchResult:
    fields = {
        "facts": tuple((key, f"some {key}, with a comma") for key in (*FACTS, "tokenizer")),
        "runs": strategies,
        "left_out": (),
        "loss_difference": 0.0,
        "load": MachineLoad(demand=1.0, waited_share=0.01),
        "coefficients": sample_coefficients(),
        "inputs": BenchInputs(
            model=sample_model(),
            layout=even_layout(3, pp=2),
            options=option_tables_of(PlanOptions(max_pack_tokens=64)),
            memory_cap_bytes=1 << 40,
            batches=(RecordedBatch(step=0, documents=((0, 20, 19), (1, 30, 29), (2, 7, 6))),) * 2,
            host=HostMemory(1, 1 << 40),
        ),
    }
    return BenchResult(**{**fields, **changes})


def ledger_row(**changes) -> LedgerRow:
    """Texts "x", numbers 0, a machine that is quiet."""
    texts = {name: "x" for name, kind in LedgerRow.__annotations__.items() if kind is str}
    numbers = {name: 0 for name in COLUMNS if name not in texts}
    return LedgerRow(**{**texts, **numbers, **changes})
