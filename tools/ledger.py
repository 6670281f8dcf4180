"""The ledger of a comparison: one row a strategy and batch, appended to a CSV file that only grows.

Whoever reads it can tell cases apart: what was run (plan digest, strategy, layout, model), on what (device, threads,
versions, costs), when, how busy the machine was, and the signed errors of step time, pack times and memory. Rows of
other columns are refused, so that a file never holds two formats.

Beside the file, in `costs/` and `inputs/`, lie the cost file and the batches of every comparison, named by their
content as the rows name them: what plans and predictions are made from again. Planning is pure, so these decide both;
whether a later version still makes the plan that was measured, and its prediction can be held against the measurement,
is told by the plan's digest.
"""

import csv
import hashlib
import io
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from evenload.bench.results import BatchRun, BenchInputs, BenchResult, MachineLoad
from evenload.config.keys import plan_options
from evenload.cost.coefficients import CostCoefficients, read_coefficients
from evenload.errors import ConfigError, DataError, unreadable
from evenload.planning.planner import StepPlanner
from evenload.planning.strategies.registry import decide_dp_merge
from evenload.types.base import Frozen
from evenload.types.document import Document
from evenload.types.model import model_tree
from evenload.types.plan import StepPlan

FACTS = ("model", "parameters", "layout", "device", "costs", "versions")
"""Facts of a result that every row repeats."""


class LedgerRow(Frozen):
    """One global batch under one strategy; errors are predicted / measured - 1.

    Args:
        case: what was compared, in the words of who ran it; rows of the same case, layout, strategy and batch supersede
            earlier ones, which stay.
        commit: of the sources that ran, where they are known.
        costs: where predictions come from: "calibrated", "analytic".
        device, versions: that it was measured on and with.
        forward_packs: of the replica that has most.
        rounds: of which step and pack times are medians; `spread` is what they differ by, (slowest - fastest) / median.
        pack_time_s: the median pack, measured.
        pack_time_error_total: of all packs' seconds together.
        demand, waited_share: as in `MachineLoad`.
        pack_repeat_p90: as in `PackErrors`.
        inputs: name of the files beside the ledger from which the plan is made again.
    """

    date: str
    case: str
    commit: str
    model: str
    parameters: str
    layout: str
    device: str
    costs: str
    versions: str
    strategy: str
    batch: int
    plan_digest: str
    documents: int
    tokens: int
    forward_packs: int
    rounds: int
    step_time_s: float
    predicted_step_time_s: float
    step_time_error: float
    pack_time_s: float
    pack_time_error_median: float
    pack_time_error_median_abs: float
    pack_time_error_p90_abs: float
    pack_time_error_total: float
    peak_memory_bytes: int
    predicted_peak_memory_bytes: int
    memory_error: float
    spread: float
    demand: float
    waited_share: float
    pack_repeat_p90: float
    inputs: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What a later row supersedes."""
        return self.case, self.layout, self.strategy, self.batch

    @property
    def is_quiet(self) -> bool:
        """Nothing else kept the machine busy while it was measured."""
        return MachineLoad(demand=self.demand, waited_share=self.waited_share).is_quiet(self.spread)


COLUMNS = LedgerRow.__struct_fields__


def append_result(path: Path, result: BenchResult, case: str, commit: str = "") -> int:
    """Append a result's rows, and leave its cost file and batches beside them; returns how many rows.

    Raises:
        ConfigError: the file exists and is no ledger with these columns, or something cannot be written.
    """
    require_ledger(path)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not path.exists() or not path.stat().st_size:
        writer.writerow(COLUMNS)
    costs = msgspec.json.format(msgspec.json.encode(result.coefficients), indent=2) + b"\n"
    inputs = msgspec.json.encode(result.inputs) + b"\n"
    name = hashlib.sha256(costs + inputs).hexdigest()[:12]
    known = dict(result.facts) | {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "case": case,
        "commit": commit,
        "demand": f"{result.load.demand:.3g}",
        "waited_share": f"{result.load.waited_share:.4f}",
        "inputs": name,
    }
    rows = [known | {"strategy": one.strategy} | _cells(run) for one in result.runs for run in one.batches]
    writer.writerows([row[column] for column in COLUMNS] for row in rows)
    try:
        for kind, content in (("costs", costs), ("inputs", inputs)):
            file = _beside(path, kind, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        with path.open("a", newline="") as file:
            file.write(text.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write the ledger {path}: {error.strerror or error}") from error
    return len(rows)


def require_ledger(path: Path) -> None:
    """Check that rows can be appended, before the work.

    Raises:
        ConfigError: the file holds something else.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open(newline="", errors="replace") as file:
        result = next(csv.reader(file), [])
    if tuple(result) != COLUMNS:
        raise ConfigError(
            f"{path} is no ledger of this version: its first line has {len(result)} columns, not the "
            f"{len(COLUMNS)} that start with {', '.join(COLUMNS[:3])}; choose another file"
        )


def read_ledger(path: Path) -> tuple[LedgerRow, ...]:
    """All rows, oldest first; () where there is no file.

    Raises:
        ConfigError: the file is no ledger of this version.
        DataError: a row has a value that its column cannot hold.
    """
    require_ledger(path)
    if not path.is_file():
        return ()
    with path.open(newline="") as file:
        # Numbers are read without the plus of signed errors.
        rows = [{key: value.removeprefix("+") for key, value in row.items()} for row in csv.DictReader(file)]
    try:
        return tuple(msgspec.convert(row, LedgerRow, strict=False) for row in rows)
    except msgspec.ValidationError as error:
        raise DataError(f"ledger {path}: {error}; restore the row, rows are only ever added") from error


def current_rows(rows: tuple[LedgerRow, ...]) -> tuple[LedgerRow, ...]:
    """Of every case, layout, strategy and batch the newest row, and the newest quiet one where there is any."""
    newest: dict[tuple[str, str, str, int], LedgerRow] = {}
    for row in rows:
        before = newest.get(row.key)
        if before is None or row.is_quiet or not before.is_quiet:
            newest[row.key] = row
    return tuple(newest.values())


def read_inputs(path: Path, name: str) -> tuple[BenchInputs, CostCoefficients]:
    """From what the rows of a ledger that name them were predicted.

    Raises:
        ConfigError: a file is missing or of another version.
    """
    file = _beside(path, "inputs", name)
    try:
        tree = msgspec.json.decode(file.read_bytes())
        inputs = msgspec.convert(tree | {"model": model_tree(tree.get("model"))}, BenchInputs)
        return inputs, read_coefficients(_beside(path, "costs", name))
    except OSError as error:
        raise unreadable(str(file), error) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file} is not valid: {error}; measure the case again") from error


def plan_again(inputs: BenchInputs, coefficients: CostCoefficients, strategy: str, batch: int) -> StepPlan:
    """What the running version plans and predicts for a recorded batch.

    Raises:
        ConfigError, DataError, InfeasiblePlanError: it cannot be planned any more.
    """
    options, _ = decide_dp_merge(plan_options(inputs.options), strategy, inputs.model, inputs.layout, coefficients)
    planner = StepPlanner(inputs.model, coefficients, inputs.layout, inputs.memory_cap_bytes, options, host=inputs.host)
    result = inputs.batches[batch]
    documents = tuple(
        Document(doc_id=doc_id, num_tokens=num_tokens, num_label_tokens=num_label_tokens)
        for doc_id, num_tokens, num_label_tokens in result.documents
    )
    return planner.plan(result.step, documents, strategy)


def _beside(path: Path, kind: str, name: str) -> Path:
    return path.parent / kind / f"{name}.json"


def _cells(run: BatchRun) -> dict[str, object]:
    errors = run.packs
    return {
        "batch": run.batch,
        "plan_digest": run.plan_digest,
        "documents": run.documents,
        "tokens": run.tokens,
        "forward_packs": run.num_packs,
        "rounds": len(run.measured_s),
        "step_time_s": f"{run.step_time_s:.6f}",
        "predicted_step_time_s": f"{run.predicted_s:.6f}",
        "step_time_error": f"{run.error:+.4f}",
        "pack_time_s": f"{errors.measured_s:.6f}",
        "pack_time_error_median": f"{errors.median:+.4f}",
        "pack_time_error_median_abs": f"{errors.median_abs:.4f}",
        "pack_time_error_p90_abs": f"{errors.p90_abs:.4f}",
        "pack_time_error_total": f"{errors.total:+.4f}",
        "peak_memory_bytes": run.measured_peak_bytes,
        "predicted_peak_memory_bytes": run.predicted_peak_bytes,
        "memory_error": f"{run.memory_error:+.4f}",
        "spread": f"{run.spread:.4f}",
        "pack_repeat_p90": f"{errors.repeat_p90:.4f}",
    }
