"""Every pair of features in some planned step, equal to plain transformers, or refused at start (axes: matrix.py)."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_equality import assert_ranks_equal
from evenload.cli.measure import BenchRequest
from evenload.cli.measure_worker import bench_task
from evenload.cli.worker_setup import require_runnable
from evenload.config.train_config import load_train_config
from evenload.errors import ConfigError, EvenloadError
from evenload.planning.strategies.registry import STRATEGIES
from evenload.types.plan import encode_plan
from matrix import (
    AXES,
    LAYOUTS,
    MODELS,
    NONE,
    REFUSALS,
    WITH_EXPERTS,
    can_be_completed,
    matrix_rows,
    may_run,
    refused_pairs,
    rows_in_bf16,
    shares_documents,
    sizes_before,
)
from matrix_cases import RowTask, expected_in_bf16, expected_of, run_rows
from matrix_plans import case_of, grouped, layout_before, model_of, plan_of
from reference_training import tiny_config
from stored_bytes import assert_bytes_match_the_memory_model
from sweeps import LOOKS_FURTHER

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

# Named without making the rows, which takes seconds: every process that collects tests would.
PLACES = [
    (layout, virtual)
    for layout, virtual in itertools.product(sorted(AXES["layout"]), AXES["virtual"])
    if can_be_completed({"layout": layout, "virtual": virtual})
]


OVERLAPS = ("reduction", "gather")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Where the adapter of models that have one lies."""
    return tmp_path_factory.mktemp("adapter")


def test_every_pair_of_values_that_may_meet_meets_in_some_row():
    """The generator's own word is not taken for it: pairs are counted from the axes and rules alone."""
    rows = [row._asdict() for row in matrix_rows()]
    assert all(may_run(row) for row in rows)
    for one, other in itertools.combinations(AXES, 2):
        seen = {(row[one], row[other]) for row in rows}
        for values in itertools.product(AXES[one], AXES[other]):
            allowed = can_be_completed(dict(zip((one, other), values, strict=True)))
            assert (values in seen) == allowed, f"{one} {values[0]} with {other} {values[1]}"


def test_every_value_is_trained_in_bf16_too():
    left_out = {(axis, value) for axis in AXES for value in AXES[axis]}
    left_out -= {pair for row in rows_in_bf16() for pair in row._asdict().items()}
    assert left_out == {("model", name) for name in WITH_EXPERTS}


def test_the_axes_hold_everything_that_training_accepts():
    assert set(AXES["strategy"]) == {one.name for one in STRATEGIES.values()}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    """A run's configuration; models of all rows lie beside it."""
    directory = tmp_path_factory.mktemp("run")
    for name, case in MODELS.items():
        # With an embedding for every byte and the end of a document, which the runs' tokeniser gives.
        tiny_config(case.kind, **{"vocab_size": 257, **case.changes}).save_pretrained(directory / name)
    groups = '{"text": "a", "prompt_id": 1}\n'
    (directory / ".groups.jsonl").write_text(groups)  # not read where it is not named
    file = directory / "config.toml"
    file.write_text(
        f"""
        model = {{ path = "{directory / "llama"}", random_init = true, dtype = "float64" }}
        data = {{ sources = ["{directory}"], max_document_tokens = 64, batch_documents = 9 }}
        train = {{ output_dir = "{directory / "run"}", steps = 1 }}
        """
    )
    return file


def settings_of(axis: str, value: str, models: Path) -> list[str]:
    """A value of an axis as a user writes it; what only planners choose has no setting."""
    if axis == "layout":
        return [f"parallel.{name}={size}" for name, size in LAYOUTS[value].items()]
    if axis == "model":
        lora = ["model.lora={rank=3, alpha=6.0}"] if MODELS[value].lora else []
        return [f"model.path={models / value}", *lora]
    if axis == "trees":
        return [f'data.sources=["{models / ".groups.jsonl"}"]', "data.group_by=prompt_id"] if value == "on" else []
    if axis == "overlap":
        return [f"train.overlap_{name}={'true' if value == 'on' else 'false'}" for name in OVERLAPS]
    keys = {
        "virtual": "parallel.virtual",
        "exchange": "parallel.cp_exchange",
        "sharding": "plan.options.cp_sharding",
        "channels": "parallel.channels",
    }
    if axis in keys:
        return [] if value == NONE else [f"{keys[axis]}={value}"]
    written = {
        "schedule": f"plan.options.schedule={'choose' if value == 'own' else value}",
        "strategy": f"plan.strategy={value}",
        "dp_merge": f"plan.options.dp_merge={'true' if value == 'on' else 'false'}",
        "policy": f"plan.options.policy={'choose' if value == 'mixed' else value}",
    }
    return [written[axis]] if axis in written else []


@pytest.mark.parametrize("rule", REFUSALS, ids=lambda rule: rule.pairs)
def test_refused_pairs_are_refused_at_start_with_their_reason(config_file, rule):
    """Not merely left out here: each pair of settings, before any process starts."""
    pairs = [(one, other) for result, one, other in refused_pairs() if result is rule]
    assert pairs
    for pair in pairs:
        with pytest.raises(EvenloadError, match=rule.message):
            start(config_file, dict(zip(rule.axes, pair, strict=True)))


def start(config_file, values):
    """What a run with these values of axes does before it starts processes."""
    settings = [text for axis, value in values.items() for text in settings_of(axis, value, config_file.parent)]
    layout = values.get("layout", "dp2")
    if "layout" not in values and (values.get("strategy") == "flexpipe" or values.get("switch") == "on"):
        settings += settings_of("layout", layout, config_file.parent)  # there are others
    if values.get("switch") == "on":
        before = ",".join(f"{name}={size}" for name, size in sizes_before(layout).items())
        settings.append(f"plan.layouts={[before]}")
    return require_runnable(load_train_config(config_file, settings))


def test_what_is_tested_is_not_refused(config_file):
    for row in matrix_rows():
        settings = row._asdict()
        if row.sharding == "dacp":
            settings["sharding"] = NONE  # `skrull`'s own, no setting
        if STRATEGIES[row.strategy].needs_one_stage:
            settings["schedule"] = "own"  # nothing to order; the test reorders its packs
        assert start(config_file, settings).world_size <= 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["plan.strategy=flexpipe"], "name the others in plan.layouts"),
        (["plan.strategy=skrull", "plan.options.schedule=list"], "schedule is 'list': strategy skrull has no pipeline"),
        (["plan.options.schedule=interleaved"], "schedule is 'interleaved': strategy auto cuts documents"),
        (["plan.options.schedule=1f1"], "unknown schedule '1f1'; did you mean '1f1b'"),
        (["plan.strategy=wlb", "plan.options.slimpack.cuts=symmetric"], "slimpack is set, which strategy wlb does not"),
        (["data.record=preference", "plan.strategy=wlb"], "strategy wlb does not plan trees of shared prefixes"),
    ],
)
def test_settings_that_no_run_can_follow_are_refused_at_start(config_file, settings, message):
    with pytest.raises(ConfigError, match=message):
        require_runnable(load_train_config(config_file, settings))


def test_a_comparison_leaves_out_what_does_not_plan_trees(config_file):
    groups = settings_of("trees", "on", config_file.parent)
    request = BenchRequest(config=config_file, overrides=tuple(groups))
    (*_, strategies, left_out, _), _ = bench_task(
        config_file.parent / "answer", request, request.load(), None, config_file.parent
    )
    assert {one.name for one in left_out if "does not plan trees" in one.why} >= {"padded", "wlb"}
    assert set(strategies) == {one.name for one in STRATEGIES.values() if one.plans_trees}


def test_every_place_is_run():
    assert set(grouped(matrix_rows())) == set(PLACES)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]} virtual {place[1]}")
def test_rows_equal_plain_training(gloo_pool, adapter, place):
    """Loss, every gradient and its norm to 1e-10 in float64; the error in bfloat16 at most twice that of plain bfloat16
    autograd; the loss of every document by forwards alone, in rows that hold every value, or in all where one looks
    further; bytes as predicted, where no documents are shared."""
    rows = grouped(matrix_rows())[place]
    if LOOKS_FURTHER:
        switched = [row._replace(switch="on") for row in rows if row.switch == "off"]
        rows += [row for row in switched if may_run(row._asdict())]
    for row in rows:
        expected_of(case_of(row), adapter)
        if row in rows_in_bf16():
            expected_in_bf16(case_of(row), adapter)
    plans = [plan_of(row) for row in rows]
    in_bf16 = [row in rows_in_bf16() for row in rows]
    tasks = [
        RowTask(
            case_of(row),
            encode_plan(plan),
            str(adapter) if MODELS[row.model].lora else None,
            "all_gather" if row.exchange == NONE else row.exchange,
            row.channels,
            row.overlap == "on",
            layout_before(row),
        )
        for row, plan in zip(rows, plans, strict=True)
    ]
    with_forwards = [LOOKS_FURTHER or row.model in WITH_EXPERTS or row in rows_in_bf16() for row in rows]
    ranks = gloo_pool.run(plans[0].layout.world_size, run_rows, tasks, in_bf16, with_forwards)
    for index, (row, plan) in enumerate(zip(rows, plans, strict=True)):
        results = [rank[index] for rank in ranks]
        expected, found = expected_of(case_of(row), adapter), [result[:3] for result in results]
        config = case_of(row).config()
        assert_ranks_equal(row.describe(), config, found, expected.loss, expected.gradients, limit=1e-10)
        if with_forwards[index]:
            assert_losses_equal(row, plan, results, expected)
        stored = [result.stored for result in results]
        is_shared = shares_documents(row.layout, row.dp_merge)
        # A group may leave a replica out; the others' ranks get something.
        sharing = {packs.dp_rank for packs in plan.pack_plans if any(map(_shares, packs.forward))}
        shares = [replica in sharing for replica in plan.layout.replicas(len(stored))]
        assert [one.context > 0 for one in stored] == shares, row.describe()
        if any("offload" in packs.policies.values() for packs in plan.pack_plans):
            assert max(one.peak_host for one in stored) > 0, row.describe()
        if not is_shared:
            assert_bytes_match_the_memory_model(plan, model_of(row), stored)
        if in_bf16[index]:
            assert_bf16_is_good(row, [result.bf16 for result in results], *expected_in_bf16(case_of(row), adapter))


def _shares(pack):
    return any(piece.cp > 1 for piece in pack.slices)


def assert_losses_equal(row, plan, results, expected):
    outcome = sum(result.document_losses for result in results)
    if expected.document_losses is None:
        assert outcome.sum() == pytest.approx(expected.loss * plan.num_label_tokens, rel=1e-10), row.describe()
        return
    wanted = [expected.document_losses[document.doc_id] for document in plan.documents]
    assert outcome == pytest.approx(np.array(wanted), rel=1e-10, abs=1e-10), f"{row.describe()}: losses of forwards"


def assert_bf16_is_good(row, result, exact, plain):
    tied = case_of(row).config().tie_word_embeddings
    ours = {n: torch.from_numpy(g) for _, gradients in result for n, g in gradients.items()}
    if tied:
        ours.pop("lm_head.weight", None)

    def error(gradients):
        return sum((gradients[n].double() - exact.gradients[n]).square().sum().item() for n in exact.gradients) ** 0.5

    assert 0 < error(ours) <= 2 * error(plain.gradients), row.describe()
    loss = sum(loss for loss, _ in result)
    assert abs(loss - exact.loss) <= 2 * max(abs(plain.loss - exact.loss), 1e-3), row.describe()
