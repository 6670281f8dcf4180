"""Hugging Face data sets handed over in Python."""

import pickle

import pytest

from evenload.data.part_files import dataset_file, open_reader
from evenload.errors import ConfigError, DataError
from format_files import check_parts_and_offsets, format_config, read_all, tokens_source, values_of

datasets = pytest.importorskip("datasets")

TEXTS = [f"text {row}" for row in range(23)]
TOKENS = [[row] * (row % 4) for row in range(23)]
SHARDS = [["a", "b", "c"], [], ["d"], ["e", "f"], ["g"]]


def open_dataset(dataset, **changes):
    return open_reader(dataset_file(dataset, "mine"), format_config("unused", **changes), dataset)


def generate(shards):
    for shard in shards:
        for text in shard:
            yield {"id": 1, "text": text, "input_ids": [len(text)]}


def sharded():
    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": SHARDS})


@pytest.fixture
def rows():
    return datasets.Dataset.from_dict({"id": list(range(23)), "text": TEXTS, "input_ids": TOKENS})


@pytest.mark.parametrize("count", [1, 2, 5, 23, 30])
def test_rows_of_a_dataset_in_parts_and_from_every_offset(rows, count):
    check_parts_and_offsets(open_dataset(rows), count, TEXTS)
    check_parts_and_offsets(open_dataset(rows, record="tokens"), count, TOKENS)


def test_a_selected_and_shuffled_dataset_keeps_its_order(rows):
    order = [5, 3, 22, 0, 3]
    check_parts_and_offsets(open_dataset(rows.select(order)), 2, [TEXTS[row] for row in order])
    shuffled = rows.shuffle(seed=4)
    check_parts_and_offsets(open_dataset(shuffled), 3, shuffled["text"][:])


def test_formats_do_not_change_what_is_read_and_transforms_do(rows):
    formatted = rows.with_format("numpy", columns=["id"])
    assert values_of(read_all(open_dataset(formatted, record="tokens"))) == TOKENS
    loud = rows.with_transform(lambda batch: {"text": [text.upper() for text in batch["text"]]})
    check_parts_and_offsets(open_dataset(loud), 2, [text.upper() for text in TEXTS])
    ids = rows.with_transform(lambda batch: {"input_ids": [[len(text)] for text in batch["text"]]})
    result = values_of(read_all(open_dataset(ids, record="tokens")))
    assert result == [[len(text)] for text in TEXTS]


def test_a_dataset_on_disk_is_read_from_its_memory_map(rows, tmp_path):
    rows.save_to_disk(str(tmp_path / "saved"))
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    reader = pickle.loads(pickle.dumps(open_dataset(loaded, record="tokens")))
    check_parts_and_offsets(reader, 3, TOKENS)
    # Its cache file is a source as well.
    (cache,) = (tmp_path / "saved").glob("*.arrow")
    assert values_of(read_all(tokens_source(str(cache)))) == TOKENS


def test_number_of_parts_follows_bytes_and_never_exceeds_rows(rows):
    reader = open_dataset(rows)
    assert reader.file.size_bytes
    assert reader.num_parts(reader.file.size_bytes // 2 + 1) == 2
    assert reader.num_parts(1) == 23


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_shards_of_an_iterable_dataset_are_its_parts(count):
    reader = pickle.loads(pickle.dumps(open_dataset(sharded())))
    assert reader.num_parts(10) == len(SHARDS)
    check_parts_and_offsets(reader, count, [text for shard in SHARDS for text in shard])
    records = read_all(reader)
    assert reader.origin(records[5].offset) == "mine:shard 3, example 2"


def test_an_iterable_dataset_of_files_and_maps_is_read_from_any_offset(rows, tmp_path):
    for index in range(3):
        rows.shard(3, index, contiguous=True).to_parquet(str(tmp_path / f"{index}.parquet"))
    files = str(tmp_path / "*.parquet")
    streamed = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    mapped = streamed.map(lambda row: {"text": row["text"] + "!"}).filter(lambda row: row["id"] != 4)
    expected = [f"{text}!" for row, text in enumerate(TEXTS) if row != 4]
    check_parts_and_offsets(open_dataset(mapped), 3, expected)
    check_parts_and_offsets(open_dataset(mapped.with_format("numpy"), record="tokens"), 3,
                            [ids for row, ids in enumerate(TOKENS) if row != 4])  # fmt: skip


def test_wrong_columns_and_types_are_named(rows):
    iterable = sharded()
    for dataset in (rows, iterable):
        reader = open_dataset(dataset, text_column="body")
        with pytest.raises(DataError, match=r"mine has no column 'body', only id, text, input_ids; set data.text_col"):
            read_all(reader)
    with pytest.raises(DataError, match="'id' is int64, not text"):
        read_all(open_dataset(rows, text_column="id"))
    (record, *_) = read_all(open_dataset(iterable, text_column="id"))
    assert record.values is None
    assert record.problem == "column 'id': int 1 is not text"


def test_what_a_generator_raises_names_the_dataset():
    def broken():
        yield {"text": "a"}
        raise KeyError("lost")

    reader = open_dataset(datasets.IterableDataset.from_generator(broken))
    with pytest.raises(DataError, match="mine cannot be read: KeyError: 'lost'"):
        read_all(reader)


def test_other_objects_are_refused(rows):
    with pytest.raises(ConfigError, match="splits train; hand over one"):
        dataset_file(datasets.DatasetDict({"train": rows}))
    with pytest.raises(ConfigError, match="is a list"):
        dataset_file([{"text": "a"}])
