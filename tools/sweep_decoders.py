"""Train every causal type of transformers, tiny, plainly and by our stages, and compare: rows and a page.

    python tools/sweep_decoders.py                 types without a row, two processes; then the page
    python tools/sweep_decoders.py TYPE ...        these again; a result (FAILS, WRONG, refused ...) is all its types
    python tools/sweep_decoders.py --page          the page of the rows there are

Plain training is transformers' own model, document by document. Ours cuts the documents differently forward and
backward; whole ones where the proof at start asks for that. Loss and every gradient must be equal to 1e-9. A row is a
line of benchmarks/results/decoders.jsonl, written when its type is done, so that a sweep can be stopped and goes on.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS, PAGE = ROOT / "benchmarks" / "results" / "decoders.jsonl", ROOT / "docs" / "decoders.md"
LIMIT_S = 240
TOLERANCE = 1e-9
LENGTHS = (26, 11, 1, 17)

CLASSES = {
    "cut": "equal, documents cut differently forward and backward",
    "whole": "equal, documents whole",
    "refused": "refused by name",
    "not built": "the tiny model is not built, or does not train plainly",
    "WRONG": "**not equal**",
    "FAILS": "**stops by an error that is not ours**",
}


def row_of(model_type: str) -> dict[str, Any]:
    """Compare one type, at most for a limit."""

    def too_long(*_: Any) -> None:
        raise TimeoutError(f"more than {LIMIT_S} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_S)
    start = time.monotonic()
    try:
        row = _compared(model_type)
    except Exception as error:
        row = {"class": "FAILS", "why": _said(error)}
    finally:
        signal.alarm(0)
    return {"type": model_type} | row | {"seconds": round(time.monotonic() - start, 1)}


def _said(error: Exception) -> str:
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]} ({Path(frame.filename).name}:{frame.lineno})"


def _compared(model_type: str) -> dict[str, Any]:
    import torch

    from causal_types import plain_training, tiny_causal_config
    from evenload.check.smaller_run import exact_casts
    from evenload.errors import EvenloadError
    from evenload.runtime.model.narrow import Float64Casts, build_narrow
    from evenload.runtime.model.probe import probe
    from reference_training import make_tokens

    torch.set_num_threads(1)
    tokens = {doc: ids.clamp(min=2) for doc, ids in make_tokens(list(LENGTHS), 97, seed=5).items()}
    with exact_casts():
        try:
            config = tiny_causal_config(model_type)
            model = build_narrow(config)
            with Float64Casts():
                plain_training(model, {0: tokens[0]})
        except Exception as error:
            return {"class": "not built", "why": _said(error)}
        text = config.get_text_config(decoder=True)
        plans = [name for name in ("pp", "tp", "ep") if getattr(text, f"base_model_{name}_plan", None)]
        row: dict[str, Any] = {"model": type(model).__name__, "plans": plans}
        try:
            with tempfile.TemporaryDirectory() as folder:
                findings = probe(config, Path(folder))
            row["probe"] = sorted({f"{one.module}: {one.why}" for layer in findings.mixers for one in layer})
            is_whole = bool(findings.whole_documents)
            stage, buffers = _stage_with_weights_of(model, config)
            own_loss, own = _replayed(stage, buffers, tokens, is_whole=is_whole)
        except EvenloadError as error:
            return row | {"class": "refused", "why": " ".join(str(error).split())}
        with Float64Casts():
            loss, gradients = plain_training(model, tokens)
    errors = {name: _error(own.get(name), gradient, gradients) for name, gradient in gradients.items()}
    errors["the loss"] = abs(own_loss - loss) / abs(loss)
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    if not errors[worst] <= TOLERANCE:
        return row | {"class": "WRONG", "why": f"{worst} is off by {errors[worst]:.0e}"}
    return row | {"class": "whole" if is_whole else "cut", "error": float(f"{errors[worst]:.0e}")}


def _error(own: Any, gradient: Any, gradients: dict[str, Any]) -> float:
    """The largest difference, of the largest value; a gradient that is nearly zero is compared with all others."""
    if own is None:
        return float("inf") if float(gradient.abs().max()) else 0.0
    scale = max(float(one.abs().max()) for one in gradients.values())
    return float((own - gradient).abs().max()) / max(float(gradient.abs().max()), 1e-6 * scale)


def _stage_with_weights_of(model: Any, config: Any) -> tuple[Any, Any]:
    """A stage of all layers, and its buffers. The one place that knows how a stage is built. The plain model gets the
    stage's computed constants, such as frequencies: it rounds some of them otherwise."""
    import torch

    from evenload.attention.reference import ReferenceAttention
    from evenload.runtime.model.around import find_layers
    from single_stage import stage_of, trained

    layers = (0, len(model.get_submodule(find_layers(model))))
    stage, buffers = stage_of(config, torch.float64, backend=ReferenceAttention(), layers=layers)
    weights, own = model.state_dict(), stage.model
    units = {own.structure.layer_path(at): layer for at, layer in own.layers.items()} | own.prologue | own.epilogue
    with torch.no_grad():
        for name, weight in (trained(buffers) | own.constants()).items():
            weight.copy_(weights[name])
        for path, module in {"": own.whole.model, **units}.items():
            for name, constant in module.named_buffers(prefix=path):
                # The model's own module lies in the one that gives a pack's values in its place.
                model.get_buffer(name.replace(".own.", ".")).copy_(constant)
    return stage, buffers


def _replayed(stage: Any, buffers: Any, tokens: dict, *, is_whole: bool) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of packs that differ forward and backward."""
    from evenload.runtime.replay.store import ActivationStore
    from plan_building import greedy_packs
    from single_stage import pack_tokens, trained

    lengths = {doc: len(ids) for doc, ids in tokens.items()}
    forward = greedy_packs(lengths, [] if is_whole else [0.3, 0.6], 34, last_first=False)
    backward = greedy_packs(lengths, [] if is_whole else [0.5], 40, last_first=True)
    stage.begin_step(lengths)
    store = ActivationStore(lengths, [tuple(pack_tokens(pack, tokens).ranges) for pack in backward])
    for pack in forward:
        stage.forward(pack_tokens(pack, tokens), None, store)
    labels = sum(length - 1 for length in lengths.values())
    loss = sum(stage.backward(pack_tokens(pack, tokens), None, store, labels)[1].item() for pack in backward)
    store.check_empty()
    return loss, {name: parameter.main_grad for name, parameter in trained(buffers).items()}


# ---- rows and page --------------------------------------------------------------------------------------------------


def read_rows(path: Path = ROWS) -> dict[str, dict[str, Any]]:
    """The newest row of every type."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def page_of(rows: dict[str, dict[str, Any]]) -> str:
    """The page, from nothing but rows."""
    counts = Counter(row["class"] for row in rows.values())
    lines = [
        "# Decoders",
        "",
        "Every causal type of transformers, as a tiny model with random weights in float64: trained plainly by "
        "transformers, document by document, and by Evenload's stages. *Equal* is the loss and every gradient to 1e-9. "
        "Made by `make test-decoders`.",
        "",
        "| | types |",
        "|---|---|",
        *(f"| {said} | {counts[name]} |" for name, said in CLASSES.items() if counts[name]),
        "",
        "*Plans*: what transformers itself has a plan for: pipelines (pp), tensor parallelism (tp), experts (ep). "
        "Evenload's pipelines need none; its `parallel.tp` says at the start what a plan lacks. *Probe*: "
        "modules that mix a document's tokens in a way of their own, for which documents stay whole.",
        "",
        "| type | result | plans | error | probe, or why not |",
        "|---|---|---|---|---|",
    ]
    order = list(CLASSES)
    for row in sorted(rows.values(), key=lambda one: (order.index(one["class"]), one["type"])):
        why = row.get("why") or "; ".join(row.get("probe", ()))
        error = f"{row['error']:.0e}" if "error" in row else ""
        cells = (f"`{row['type']}`", row["class"], " ".join(row.get("plans", ())), error, why.replace("|", "/"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def sweep(types: list[str], processes: int) -> None:
    """Add a row of every type."""
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=8) as pool, ROWS.open("a") as file:
        for row in pool.imap_unordered(row_of, types):
            said = f"{row['type']:28} {row['class']:10} {row['seconds']:6} {row.get('why', '')[:150]}"
            sys.stdout.write(f"{said}\n")
            sys.stdout.flush()
            file.write(json.dumps(row) + "\n")
            file.flush()
    rows = read_rows()
    ROWS.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))


def main() -> int:
    """Sweep, write the page, and return 1 where a type is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if not options.page:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        sys.path[:0] = [str(ROOT / "tests" / "support")]
        # Imported once, before processes are forked.
        import single_stage  # noqa: F401
        from causal_types import CAUSAL_TYPES

        known = read_rows()
        again = [name for name, row in known.items() if {name, row["class"]} & set(options.types)]
        again += [name for name in options.types if name in CAUSAL_TYPES and name not in known]
        sweep(again if options.types else [one for one in CAUSAL_TYPES if one not in known], options.processes)
    rows = read_rows()
    PAGE.write_text(page_of(rows))
    counts = Counter(row["class"] for row in rows.values())
    sys.stdout.write(", ".join(f"{count} {name}" for name, count in counts.most_common()) + "\n")
    return 1 if counts["WRONG"] or counts["FAILS"] else 0


if __name__ == "__main__":
    sys.exit(main())
