import evenload.report.chrome_trace as pack_label
from evenload.report.chrome_trace import label_packs
from evenload.types.document import Document, MicroPack, PackPlan, Slice
from evenload.types.layout import ParallelLayout
from evenload.types.plan import Prediction, Schedule, StepPlan


def make_plan() -> StepPlan:
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate([10, 20_000, 5]))
    piece = [Slice(doc_id=0, start=0, stop=10), Slice(doc_id=1, start=0, stop=4096)]
    rest = [Slice(doc_id=1, start=4096, stop=20_000), Slice(doc_id=2, start=0, stop=5)]
    forward = (
        MicroPack(index=0, direction="forward", slices=tuple(piece)),
        MicroPack(index=1, direction="forward", slices=tuple(rest)),
    )
    backward = (MicroPack(index=0, direction="backward", slices=(rest[1], Slice(doc_id=1, start=0, stop=20_000))),)
    return StepPlan(
        step=0,
        strategy="auto",
        layout=ParallelLayout(stage_layers=((0, 2),), stage_to_rank=(0,)),
        documents=documents,
        num_label_tokens=20_012,
        pack_plans=(PackPlan(dp_rank=3, forward=forward, backward=backward),),
        schedules=(Schedule(ranks=((),)),),
        times=(),
        predicted=Prediction(step_time_s=1.0, per_replica_s=(1.0,), peak_memory_bytes=0),
    )


def test_labels_count_documents_pieces_and_tokens():
    labels = label_packs(make_plan())
    assert set(labels) == {(3, "forward", 0), (3, "forward", 1), (3, "backward", 0)}
    assert labels[3, "forward", 0] == {
        "tokens": 4106,
        "documents": 2,
        "slices": 1,
        "content": "doc 0 (10), 1 [0, 4096) of 20.0K",
    }
    assert labels[3, "backward", 0] == {
        "tokens": 20_005,
        "documents": 2,
        "slices": 0,
        "content": "doc 2 (5), 1 (20.0K)",
    }


def test_long_packs_list_only_the_first_documents(monkeypatch):
    monkeypatch.setattr(pack_label, "MAX_DOCUMENTS", 1)
    content = label_packs(make_plan())[3, "forward", 1]["content"]
    assert content == "doc 1 [4096, 20000) of 20.0K, 1 more"
