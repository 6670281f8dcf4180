"""Small hand-made results of a comparison."""

from evenload.bench.runs import BatchRun, PackErrors, StrategyRuns


def batch_run(measured_s=(1.0,), predicted_s=1.0, loss=2.0, tokens=100) -> BatchRun:
    return BatchRun(
        batch=0,
        plan_digest="d",
        documents=3,
        tokens=tokens,
        num_packs=2,
        measured_s=measured_s,
        predicted_s=predicted_s,
        packs=PackErrors(median=0.0, median_abs=0.0, p90_abs=0.0),
        measured_peak_bytes=1000,
        predicted_peak_bytes=900,
        loss=loss,
    )


def runs(strategy: str, *batches: BatchRun) -> StrategyRuns:
    return StrategyRuns(strategy=strategy, batches=batches)
