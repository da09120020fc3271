"""Tables of text: what is read from files and folders, unchanged, and what is refused."""

import csv
import gzip
import json
import random

from evenstep.datasets import text

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

HARD = [
    "",
    "NA",
    "null",
    "None",
    "nan",
    "01",
    "1",
    "1e5",
    "2020-01-01",
    "true",
    ' "a" ',
    "é\u2028x",
]


def splits(path, **keys):
    return text.build(text.Config(name=str(path), **keys))


def rows(path, **keys):
    return splits(path, eval_split="none", **keys).train.to_list()


def write(path, suffix, records):
    """Records of text by the library of each format, which is none of what reads them."""
    file = path / f"train.{suffix}"
    names = list(records[0])
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(records), file)
    elif suffix == "json":
        file.write_text(json.dumps(records))
    elif suffix == "jsonl":
        file.write_text("\n".join(map(json.dumps, records)) + "\n")
    elif suffix == "tsv":
        lines = [
            "\t".join(record.values()) for record in [{name: name for name in names}, *records]
        ]
        file.write_text("\n".join(lines) + "\n")
    else:
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, names)
            writer.writeheader()
            writer.writerows(records)
    return file


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json", "parquet"])
@pytest.mark.parametrize("whole_folder", [False, True])
def test_text_stays_text_whatever_it_looks_like(tmp_path, suffix, whole_folder):
    records = [{"text": value, "label": label} for value in HARD for label in ("NA", "01", "")]
    file = write(tmp_path, suffix, records)
    assert rows(tmp_path if whole_folder else file) == records


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quoted_fields_may_hold_line_breaks_commas_and_quotes(tmp_path, end):
    file = tmp_path / "a.csv"
    lines = ["text,label", '"a\nb, ""c""",1', "d,0", ""]
    file.write_bytes(end.join(lines).encode())
    assert rows(file) == [{"text": 'a\nb, "c"', "label": "1"}, {"text": "d", "label": "0"}]


def test_a_lone_quote_in_a_tsv_file_is_text_unless_quotes_are_asked_for(tmp_path):
    file = tmp_path / "dev.tsv"
    file.write_text('sentence\tlabel\n"so far\t1\nan inch is 1"\t0\n')
    assert [row["sentence"] for row in rows(file)] == ['"so far', 'an inch is 1"']
    assert [row["sentence"] for row in rows(file, quoted=True)] == ["so far\t1\nan inch is 1"]


def test_a_file_without_a_header_line_gets_its_columns_from_the_config(tmp_path):
    file = tmp_path / "train.tsv"
    file.write_text("good\t1\nbad\t0\n")
    expected = [{"sentence": "good", "label": "1"}, {"sentence": "bad", "label": "0"}]
    assert rows(file, columns=["sentence", "label"]) == expected
    file.write_text("sentence\tlabel\ngood\t1\n")
    with pytest.raises(ValueError, match=r"line 1 is a header line.*leave out task.data.columns"):
        rows(file, columns=["sentence", "label"])


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        (
            "csv",
            "text,label\na,1\n\nb\nc,0\n",
            r"train.csv, line 4: 1 fields where there are 2 columns",
        ),
        ("csv", "text,label\na,1,x\n", r"line 2: 3 fields.*\(text, label\)"),
        ("csv", "text,text\na,1\n", r"not all different.*task.data.columns"),
        ("csv", 'text,label\n"a,1\nb,0\n', r"line 3: unexpected end of data"),
        ("jsonl", '{"text": "a"}\n{"text": \n', r"train.jsonl, line 2: not JSON"),
        ("jsonl", '{"text": "a"}\n3\n', r"line 2: 3 is no object"),
        (
            "jsonl",
            '{"text": "a"}\n{"text": 1}\n',
            r"train.jsonl: a column has values of several kinds",
        ),
        ("jsonl", '{"text": "a", "n": 36893488147419103232}\n', r"train.jsonl: .*too large"),
        ("jsonl", '{"text": "a\\ud800"}\n', r"train.jsonl: .*surrogates not allowed"),
    ],
)
def test_a_row_that_does_not_fit_is_named_by_its_line(tmp_path, suffix, content, message):
    (tmp_path / f"train.{suffix}").write_text(content)
    with pytest.raises(ValueError, match=message):
        splits(tmp_path)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "txt"])
def test_another_encoding_is_reported_with_file_and_line_and_can_be_set(tmp_path, suffix):
    line = {"csv": "café,1", "tsv": "café\t1", "jsonl": '{"text": "café"}', "txt": "café"}[suffix]
    first = {"csv": "text,label", "tsv": "text\tlabel"}.get(suffix, line.replace("é", "e"))
    file = tmp_path / f"train.{suffix}"
    file.write_bytes(f"{first}\n{line}\n".encode("latin-1"))
    wanted = rf"train.{suffix}, line 2: byte {file.read_bytes().index(0xE9)} .*0xe9.*not utf-8"
    with pytest.raises(ValueError, match=wanted + r".*task.data.encoding=latin-1"):
        rows(file)
    assert rows(file, encoding="latin-1")[-1]["text"] == "café"


def test_files_of_another_kind_are_left_out_and_told(tmp_path, caplog):
    for name in ("a.txt", "b.txt", "c.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    assert len(rows(tmp_path)) == 2
    assert f"left out: 1 file(s) of another kind than the rest: {tmp_path}/c.jsonl" in caplog.text
    caplog.clear()
    (tmp_path / "c.jsonl").unlink()
    assert len(rows(tmp_path)) == 2
    assert "left out" not in caplog.text


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("text\na\n", encoding="utf-8-sig")
    assert rows(file) == [{"text": "a"}]


def test_fields_may_be_long_and_files_compressed(tmp_path):
    long = "x" * 200_000  # the csv module stops at 131,072 by default
    with gzip.open(tmp_path / "train.csv.gz", "wt") as file:
        file.write(f"text\n{long}\n")
    assert rows(tmp_path) == [{"text": long}]


def test_a_key_that_some_rows_lack_is_null_in_them(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": "b", "label": 1}\n')
    assert rows(tmp_path) == [{"text": "a", "label": None}, {"text": "b", "label": 1}]


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("line", ["a", "b", "c\u2028d"]),
        ("paragraph", ["a\nb", "c\u2028d\n"]),
        ("document", ["a\nb\n\nc\u2028d\n"]),
    ],
)
def test_a_row_of_a_txt_file_is_what_sample_by_says(tmp_path, sample_by, expected):
    (tmp_path / "a.txt").write_bytes("a\r\nb\r\n\r\nc\u2028d\r\n".encode())
    assert [row["text"] for row in rows(tmp_path, sample_by=sample_by)] == expected


# Splits


def corpus(folder, **counts):
    folder.mkdir(parents=True, exist_ok=True)
    for split, n in counts.items():
        lines = [f"{split} {row}\t{row % 2}\n" for row in range(n)]
        (folder / f"{split}.tsv").write_text("sentence\tlabel\n" + "".join(lines))
    return folder


@pytest.mark.parametrize("files", [("dev", "test"), ("validation", "test"), ("test",)])
def test_the_evaluation_split_is_found_by_the_names_of_the_files(tmp_path, files):
    folder = corpus(tmp_path, train=4, **dict.fromkeys(files, 2))
    found = splits(folder)
    assert found.eval[0]["sentence"] == f"{files[0]} 0"
    assert len(found.train) == 4
    assert splits(folder, eval_split="none").eval is None


def test_nobody_reads_a_test_file_in_another_format(tmp_path):
    corpus(tmp_path, train=4, dev=2)
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\ta\tb\tc\n")
    assert len(splits(tmp_path).eval) == 2


@pytest.mark.parametrize("counts", [{"train": 20}, {"train": 20, "dev": 0}])
def test_without_an_evaluation_split_a_stratified_part_is_held_out(tmp_path, counts):
    found = splits(corpus(tmp_path, **counts))
    assert [row["label"] for row in found.eval].count("1") == 2
    together = [row["sentence"] for part in (found.train, found.eval) for row in part]
    assert sorted(together) == sorted(f"train {row}" for row in range(20))
    assert found.identity["split"].endswith(
        "4 of 20 training samples are held out, split_seed 0, stratified"
    )
    other = splits(tmp_path, stratify_by="kind")
    assert other.identity["split"].endswith("split_seed 0, no column 'kind' to stratify by")


def test_a_folder_in_the_folder_is_a_configuration(tmp_path):
    corpus(tmp_path / "cola", train=3, dev=1)
    corpus(tmp_path / "sst2", train=5, dev=2)
    assert len(splits(tmp_path, config="sst2").train) == 5
    assert len(splits(tmp_path, config="cola").train) == 3


def test_a_clone_of_a_hub_repository_works_as_it_is(tmp_path):
    """The layout of nyu-mll/glue: parquet files, class labels, -1 for no label."""
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: sst2\n  data_files:\n"
        "  - {split: train, path: sst2/train-*}\n  - {split: validation, path: sst2/valid*}\n---\n"
    )
    (tmp_path / "sst2").mkdir()
    for split, labels in (("train", [0, 1, 1]), ("validation", [1, -1])):
        features = datasets.Features(
            sentence=datasets.Value("string"), label=datasets.ClassLabel(names=["neg", "pos"])
        )
        data = {"sentence": [f"{split} {n}" for n in range(len(labels))], "label": labels}
        table = datasets.Dataset.from_dict(data, features)
        table.to_parquet(tmp_path / f"sst2/{split}-00000-of-00001.parquet")
    found = splits(tmp_path, config="sst2")
    assert [row["label"] for row in found.eval] == [1, -1]
    assert found.train.features["label"].names == ["neg", "pos"]


def test_what_is_not_there_is_said_with_the_key_to_set(tmp_path):
    with pytest.raises(ValueError, match=r"'data/none' is no local path.*task.data.name=/path"):
        splits("data/none")
    with pytest.raises(ValueError, match="no split 'dev'; it has: train"):
        splits(corpus(tmp_path, train=2), eval_split="dev")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="is a folder, but"):
        splits(empty)


def test_files_whose_columns_are_of_several_kinds_are_an_error_that_says_so(tmp_path):
    (tmp_path / "train-0.jsonl").write_text('{"text": "a", "label": 1}\n')
    (tmp_path / "train-1.jsonl").write_text('{"text": "b", "label": "x"}\n')
    with pytest.raises(ValueError, match=r"train-0.jsonl, .*train-1.jsonl: a column .*label"):
        splits(tmp_path)
    for split, labels in (("train", [0, 1]), ("validation", ["x", "y"])):
        data = {"text": ["a", "b"], "label": labels}
        datasets.Dataset.from_dict(data).to_parquet(tmp_path / f"tables/{split}.parquet")
    with pytest.raises(ValueError, match="a file of the data cannot be read, or its columns"):
        splits(tmp_path / "tables")


def test_a_parquet_file_that_is_cut_off_is_an_error_that_says_so(tmp_path):
    file = write(tmp_path, "parquet", [{"text": "a"}] * 9)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="a file of the data cannot be read"):
        splits(tmp_path)


@pytest.mark.parametrize("encoding", ["klingon", "hex"])
def test_an_encoding_that_is_none_is_refused_with_the_run_config(encoding):
    with pytest.raises(ValueError, match=rf"{encoding}.*such as utf-8, latin-1"):
        text.Config(name="any", encoding=encoding)


def test_the_identity_is_that_of_the_content_and_not_of_its_place(tmp_path):
    one, other = (corpus(tmp_path / name, train=9, dev=3) for name in "ab")
    assert splits(one).identity == splits(other).identity
    lines = (other / "dev.tsv").read_text().splitlines()
    random.Random(0).shuffle(lines[1:])
    (other / "dev.tsv").write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    assert splits(one).identity != splits(other).identity
