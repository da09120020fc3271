"""`data: {name: streaming}`: every format, and what a user may get wrong."""

import gzip
import json
import os

from evenstep.config_file import load
from evenstep.datasets import _lines, streaming
from evenstep.streams import Streams

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

ROWS = [{"text": f"row {i}, " + "é" * (i % 13)} for i in range(40)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
TXT = "".join(row["text"] + "\n" for row in ROWS)


def built(*sources, **keys):
    given = [source if isinstance(source, dict) else {"name": str(source)} for source in sources]
    config = streaming.Config.model_validate({"name": "streaming", "sources": given, **keys})
    return streaming.build(config)


def epoch(streams, num_streams=2):
    """The rows of an epoch of the first source, over all streams."""
    found = []
    for stream in streams.open(range(num_streams), num_streams, 0, {}):
        row = stream.draw()
        while stream.state()["sources"][0]["epoch"] == 0:
            found.append(row)
            row = stream.draw()
    return sorted(found, key=str)


def write(path, rows=ROWS):
    jsonl = "".join(json.dumps(row) + "\n" for row in rows)
    txt = "".join(row["text"] + "\n" for row in rows)
    name = path.name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif name.endswith(".arrow"):
        with pa.OSFile(str(path), "wb") as sink:
            table = pa.Table.from_pylist(rows)
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress((jsonl if ".jsonl" in name else txt).encode()))
    else:
        path.write_text(txt if name.endswith(".txt") else jsonl, encoding="utf-8")
    return path


KINDS = ["parquet", "arrow", "jsonl", "json", "txt", "jsonl.gz", "txt.gz"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_each_row_once(tmp_path, kind):
    for part in range(3):
        write(tmp_path / f"part-{part}.{kind}", ROWS[part::3])
    splits = built(tmp_path / f"part-*.{kind}", shuffle_buffer=8)
    assert isinstance(splits.train, Streams)
    assert epoch(splits.train) == sorted(ROWS, key=str)
    assert splits.eval is None


def test_a_folder_as_on_the_hub_has_splits(tmp_path):
    write(tmp_path / "train-00000-of-00001.parquet")
    write(tmp_path / "validation-00000-of-00001.parquet", ROWS[:9])
    location = {"name": str(tmp_path), "split": "validation"}
    splits = built(tmp_path, eval=location, eval_rows=5)
    assert epoch(splits.train) == sorted(ROWS, key=str)
    assert isinstance(splits.eval, Dataset)
    assert splits.eval.to_list() == ROWS[:5]


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_ranges_of_bytes_have_each_line_once(tmp_path, monkeypatch, size, end):
    monkeypatch.setattr(_lines, "RANGE", size)
    file = tmp_path / "a.txt"
    lines = ["first", "", "é" * 50, *(row["text"] for row in ROWS), "the end"]
    file.write_bytes(end.join(lines).encode())  # no end after the last line
    source = _lines.dataset([file], as_json=False)
    assert source.num_shards == -(-file.stat().st_size // size)
    assert [row["text"] for row in source] == lines


def test_blank_lines_are_no_objects(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n  \n{"a": 2}')
    assert list(_lines.dataset([tmp_path / "a.jsonl"], as_json=True)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1}\n{"a": \n', "byte 9 is not JSON"),
        (b'{"a": 1}\n[2]\n', "byte 9 is no JSON object"),
        (b'{"a": 1}\n{"a": "\xe9"}\n', "byte 9 is not UTF-8"),
    ],
)
def test_a_broken_line_is_named(tmp_path, content, said):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(RuntimeError, match=f"a.jsonl: the line at {said}"):
        list(_lines.dataset([tmp_path / "a.jsonl"], as_json=True))


def test_a_resume_in_a_large_file_reads_its_range_and_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(_lines, "RANGE", 1000)
    rows = [{"number": i} for i in range(10_000)]  # about 60 lines a range
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = []
    source = _lines.dataset([file], as_json=True).map(lambda row: read.append(1) or row)
    streams = Streams([source], shuffle_buffer=64)
    (stream,) = streams.open([1], 4, 0, {})
    for _ in range(2000):
        stream.draw()
    state, expected = stream.state(), [stream.draw() for _ in range(10)]
    read.clear()
    (resumed,) = streams.open([1], 4, 0, {"1": state})
    assert [resumed.draw() for _ in range(10)] == expected
    assert len(read) <= 60 + 3 * 64


def test_what_is_not_there_or_cannot_be_streamed_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("text\nhello\n")
    with pytest.raises(ValueError, match=r"cannot stream files that end in .csv"):
        built(tmp_path / "a.csv")
    write(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"end in .csv, .txt; give files of one kind"):
        built(tmp_path / "a.*")
    with pytest.raises(ValueError, match="no local file, folder or pattern, and on the hub"):
        built("nobody/nothing-of-this-name")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no rows to evaluate on"):
        built(tmp_path / "a.txt", eval={"name": str(tmp_path / "empty.jsonl")})


def test_the_identity_is_that_of_the_files_and_not_of_their_place_or_time(tmp_path):
    """Names and sizes of what is trained on, and the rows that are evaluated."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for part in range(3):
            write(tmp_path / folder / f"{part}.jsonl", ROWS[part::3])
        write(tmp_path / folder / "train.parquet")
        write(tmp_path / folder / "validation.parquet", ROWS[:9])

    def identity(folder):
        location = {"name": str(folder), "split": "validation"}
        return dict(built(folder / "*.jsonl", folder, eval=location).identity)

    one, two = tmp_path / "a", tmp_path / "b"
    known = identity(one)
    os.utime(two / "1.jsonl", (0, 0))
    assert identity(two) == known
    (two / "1.jsonl").rename(two / "7.jsonl")
    renamed = identity(two)
    assert renamed["files"][0] != known["files"][0]
    assert renamed["files"][1:] == known["files"][1:]
    write(one / "1.jsonl", [*ROWS[1::3], ROWS[0]])
    longer = identity(one)
    assert longer["files"][0] not in (known["files"][0], renamed["files"][0])
    write(one / "train.parquet", ROWS[1:])
    assert identity(one)["files"][1] != longer["files"][1]
    write(one / "validation.parquet", [{"text": "other"}])
    assert identity(one)["eval"] != longer["eval"]


def test_a_split_that_is_not_there_is_named(tmp_path):
    write(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="has no split 'dev'; it has: train"):
        built({"name": str(tmp_path), "split": "dev"})


@pytest.mark.parametrize("whole_folder", [False, True])
def test_an_empty_parquet_file_among_others_is_no_error(tmp_path, whole_folder):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "train-0.parquet")
    write(tmp_path / "train-1.parquet")
    splits = built(tmp_path if whole_folder else tmp_path / "*.parquet")
    assert epoch(splits.train, num_streams=1) == sorted(ROWS, key=str)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_files_leave_no_stream_without_rows(tmp_path, kind):
    (tmp_path / f"a.{kind}").touch()
    with pytest.raises(ValueError, match="nothing but empty files"):
        built(tmp_path / f"*.{kind}")
    write(tmp_path / f"b.{kind}")
    splits = built(tmp_path / f"*.{kind}", shuffle_buffer=8)
    assert epoch(splits.train) == sorted(ROWS, key=str)


@pytest.mark.parametrize(("kind", "end"), [("jsonl", "\n"), ("txt", "\r\n")])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path, kind, end):
    lines = ['{"text": "hello"}' if kind == "jsonl" else "hello"] * 2
    (tmp_path / f"a.{kind}").write_text(end.join(lines), encoding="utf-8-sig", newline="")
    source = _lines.dataset([tmp_path / f"a.{kind}"], as_json=kind == "jsonl")
    assert list(source) == [{"text": "hello"}] * 2


def test_a_broken_file_is_an_error_that_names_the_source(tmp_path):
    """Found where the first rows are read for a tokenizer, on all processes alike."""
    write(tmp_path / "whole.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"text": "hello"}\n{"te')
    train = built(tmp_path / "whole.jsonl", tmp_path / "broken.jsonl").train
    with pytest.raises(ValueError, match=r"source 1 cannot be read: .*broken.jsonl: the line at"):
        train.first_rows(100)
    for name in ("a.jsonl.gz", "a.parquet"):
        (tmp_path / name).write_text("what else")
        with pytest.raises(ValueError, match=rf"{name} cannot be read: "):
            built(tmp_path / name)


def test_evaluation_rows_may_lack_a_column_but_have_values_of_one_kind(tmp_path):
    held_out = write_lines(tmp_path / "some.jsonl", '{"id": 1}', '{"text": "a"}')
    rows = built(write(tmp_path / "a.jsonl"), eval={"name": str(held_out)}).eval
    assert rows["text"] == [None, "a"]
    mixed = write_lines(
        tmp_path / "mixed.jsonl", '{"text": "a", "n": 1}', '{"text": "b", "n": "x"}'
    )
    with pytest.raises(ValueError, match=r"mixed.jsonl: a column has values of several kinds"):
        built(write(tmp_path / "a.jsonl"), eval={"name": str(mixed)})


def write_lines(path, *lines):
    path.write_text("\n".join(lines))
    return path


def test_a_run_config_lists_sources(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    text = "task: {name: streaming_config, data: {name: streaming, sources: [%s]}}\n"
    text += "global_batch_size: 8\nmicro_batch_size: 2\nsteps: 5\n"
    path.write_text(text % "{name: /a, weight: 3}, {name: b/c, revision: abc}")
    config, _ = load([str(path)])
    assert [source.weight for source in config.task.data.sources] == [3.0, 1.0]
    assert config.task.data.sources[1].revision == "abc"
    path.write_text(text % "{name: /a, wieght: 3}")
    with pytest.raises(ValueError, match="wieght"):
        load([str(path)])
