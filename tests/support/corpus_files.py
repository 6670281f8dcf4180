"""Small corpora on disk in every format, a naive reading of them, and minimal plans, for the data tests."""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from evenload.data.batches import GlobalBatch, encode_state
from evenload.data.config import DataConfig
from evenload.data.loader import GlobalBatchLoader
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.plan import LeftOut, Prediction, StepPlan

FORMATS = ("text", "jsonl", "jsonl.gz", "parquet")
EOS = 256


def write_corpus(root: Path, format: str, texts: list[str], num_files: int = 2) -> str:
    """Deal the texts over files of a format; returns the directory."""
    root.mkdir(parents=True, exist_ok=True)
    if format == "text":
        for index, text in enumerate(texts):
            (root / f"{index:03}.txt").write_text(text, encoding="utf-8", newline="")
        return str(root)
    for index in range(num_files):
        part = texts[index::num_files]
        if format == "parquet":
            table = pa.table({"id": list(range(len(part))), "text": pa.array(part, pa.string())})
            pq.write_table(table, root / f"{index}.parquet", row_group_size=3)
            continue
        rows = [{"id": number, "text": text} for number, text in enumerate(part)]
        if format == "prompts":
            rows = [{"prompt": text, "completion": f"-{text}!"} for text in part]
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (root / f"{index}.{'jsonl' if format == 'prompts' else format}").write_bytes(
            gzip.compress(lines) if format.endswith("gz") else lines
        )
    return str(root)


def naive_documents(texts: list[str], limit: int, overlong: str) -> list[tuple[int, ...]]:
    """Token documents of one epoch in reading order, by the plainest means."""
    documents = []
    for text in texts:
        tokens = [*text.encode(), EOS] if text else []
        if not tokens or (overlong == "drop" and len(tokens) > limit):
            continue
        pieces = [tokens[at : at + limit] for at in range(0, len(tokens), limit)]
        documents += [tuple(piece) for piece in (pieces[:1] if overlong == "truncate" else pieces)]
    return documents


def data_config(source: str, **changes: object) -> DataConfig:
    settings: dict = {"sources": (source,), "max_document_tokens": 64, "epochs": 1, "shuffle_window": 4, "workers": 0}
    if "batch_tokens" not in changes:
        settings["batch_documents"] = 3
    return DataConfig(**(settings | changes))


def all_batches(loader: GlobalBatchLoader) -> list[GlobalBatch]:
    return list(iter(loader.next_batch, None))


def documents_of(batch: GlobalBatch) -> list[tuple[int, ...]]:
    return [tuple(batch.tokens[document.doc_id].tolist()) for document in batch.documents]


def fingerprint_of(batch: GlobalBatch) -> tuple:
    table = batch.tokens
    tokens = {
        doc_id: (
            values.dtype.str,
            *(one.tobytes() for one in (values, table.labels_of(doc_id), table.label_counts_of(doc_id))),
        )
        for doc_id, values in table.items()
    }
    places = [batch.place(document.doc_id) for document in batch.documents + batch.carried]
    return (batch.step, batch.epoch, batch.documents, batch.carried, batch.is_last, places, tokens)


def train_steps(loader: GlobalBatchLoader, stop: int | None = None, ahead: int = 0) -> Iterator[tuple]:
    """Train `stop` batches (None = all), deferring every third document once; yield batch, state, account and what is
    known of the `ahead` batches that follow."""
    for batch in itertools.islice(iter(loader.next_batch, None), stop):
        known = loader.coming(ahead)
        deferred = {document.doc_id for document in batch.documents if document.doc_id % 3 == 1}
        loader.record_step(batch, plan_for(batch, deferred=deferred))
        loader.check_ledger()
        yield fingerprint_of(batch), encode_state(loader.state()), loader.summary(), known


def plan_for(batch: GlobalBatch, deferred: set[int] = frozenset(), dropped: set[int] = frozenset()) -> StepPlan:
    """A plan that trains everything but the documents named (its packs are left out: the loader ignores them)."""
    documents: tuple[Document, ...] = batch.documents + batch.carried
    out = deferred | dropped
    left_out = tuple(
        LeftOut(
            doc_id=one.doc_id, num_tokens=one.num_tokens, reason="deferred" if one.doc_id in deferred else "too_long"
        )
        for one in documents
        if one.doc_id in out
    )
    return StepPlan(
        step=batch.step,
        strategy="test",
        layout=even_layout(1),
        documents=tuple(document for document in documents if document.doc_id not in out),
        num_label_tokens=1,
        pack_plans=(),
        schedules=(),
        times=(),
        predicted=Prediction(step_time_s=0.0, per_replica_s=(), peak_memory_bytes=0),
        left_out=left_out,
    )
