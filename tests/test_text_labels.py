"""Labels of texts: their kind, their numbers, and rows that have none."""

import datasets
import pytest
from text_files import NO_EVALUATION, task, written


def test_the_kind_is_what_the_labels_tell(tmp_path):
    kinds = {
        "single_label": ["b", "a"],
        "regression": [2.5, 1.0],
        "multi_label": [["x", "y"], []],
    }
    for kind, labels in kinds.items():
        rows = [{"text": "a", "label": label} for label in labels]
        a_task = task(written(tmp_path / kind, rows), data=NO_EVALUATION)
        assert a_task.data_identity["kind"] == kind
    assert a_task.train_dataset.labels.tolist() == [[1, 1], [0, 0]]


def test_numbers_with_fractions_in_a_csv_file_may_be_either(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na,2.5\nb,3\n")
    with pytest.raises(ValueError, match=r"'2.5'.*task.kind=regression"):
        task(tmp_path)
    a_task = task(tmp_path, kind="regression", data=NO_EVALUATION)
    assert a_task.train_dataset.labels.tolist() == [2.5, 3]
    a_task = task(tmp_path, kind="single_label", data=NO_EVALUATION)
    assert a_task.train_dataset.labels.tolist() == [0, 1]


def test_columns_of_their_own_for_each_class_are_several_labels(tmp_path):
    (tmp_path / "train.csv").write_text("text,toxic,rude\na,0,1\nb,1,True\n")
    keys = {"label_column": ["toxic", "rude"], "data": NO_EVALUATION}
    assert task(tmp_path, **keys).train_dataset.labels.tolist() == [[0, 1], [1, 1]]
    (tmp_path / "train.csv").write_text("text,toxic,rude\na,0,1\nb,2,1\n")
    with pytest.raises(ValueError, match=r"row 1 of split 'train' has '2' in column 'toxic'"):
        task(tmp_path, **keys)


def test_declared_classes_keep_their_numbers_and_minus_one_is_no_label(tmp_path):
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["pos", "neg"])
    )
    data = {"text": ["a", "b", "c"], "label": [1, 0, -1]}
    datasets.Dataset.from_dict(data, features).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="row 2 has no label"):
        task(tmp_path, data=NO_EVALUATION)
    a_task = task(tmp_path, on_error="skip", data=NO_EVALUATION)
    assert a_task.train_dataset.labels.tolist() == [1, 0]
    assert a_task.model().config.id2label == {0: "pos", 1: "neg"}


@pytest.mark.parametrize(
    ("known", "unknown"), [(["a", "b"], "c"), ([["a"], ["b", "a"]], ["a", "c"])]
)
def test_a_label_that_training_never_saw_is_an_error_that_names_it(tmp_path, known, unknown):
    rows = [{"text": "x", "label": label} for label in known]
    folder = written(tmp_path, rows, [*rows, {"text": "y", "label": unknown}])
    with pytest.raises(ValueError, match=r"row 2 of split 'evaluation' has the label.*'c'"):
        task(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"text": None},
            r"'evaluation' has no column 'text'; set task.text_columns to .*: label, or",
        ),
        (
            {"label": None},
            r"'evaluation' has no column 'label'; set task.label_column to one of: text, or",
        ),
        ({"text": 5}, r"'evaluation' has 2 row\(s\).*row 0 has no text in column 'text': 5"),
        ({"label": 0.5}, r"row 0 of split 'evaluation' has the label 0.5"),
        ({"label": [1]}, r"row 0 of split 'evaluation' has the label \[1\]"),
        ({"label": ""}, r"'evaluation' has 2 row\(s\).*row 0 has no label"),
    ],
)
def test_what_the_evaluation_split_alone_lacks_is_named_with_it(tmp_path, change, said):
    rows = [{"text": "good", "label": label} for label in (0, 1)]
    row = {key: value for key, value in ({**rows[0], **change}).items() if value is not None}
    with pytest.raises(ValueError, match=said):
        task(written(tmp_path, rows, [row, row]))


def test_rows_of_a_part_that_is_held_out_are_named_by_their_place_in_the_file(tmp_path):
    rows = [{"text": f"t{n}", "label": "ab"[n % 2]} for n in range(20)]
    rows[13]["label"] = ""
    folder = written(tmp_path, rows)
    for seed in range(4):  # the row is in one part or in the other
        with pytest.raises(ValueError, match="row 13 has no label"):
            task(folder, data={"split_seed": seed, "stratify_by": None, "eval_fraction": 0.5})


def test_of_a_class_in_a_column_of_its_own_the_evaluation_split_has_to_have_it(tmp_path):
    rows = [{"text": "x", "a": n, "b": 1} for n in (0, 1)]
    folder = written(tmp_path, rows, [{"text": "x", "a": 1}])
    with pytest.raises(ValueError, match="split 'evaluation' has no column 'b'"):
        task(folder, label_column=["a", "b"])


def test_rows_that_cannot_be_used_are_named_together_or_left_out(tmp_path, caplog):
    rows = [{"text": f"t{n}", "label": "ab"[n % 2]} for n in range(20)]
    for n in (3, 8):
        rows[n]["label"] = ""
    rows[11]["text"] = None
    folder = written(tmp_path, rows, rows)
    with pytest.raises(
        ValueError,
        match=r"3 row\(s\).*row 3 has no label; row 8 has no label; row 11 has no text in column "
        r"'text': None; task.on_error=skip",
    ):
        task(folder)
    skipping = task(folder, on_error="skip")
    assert len(skipping.train_dataset) == len(skipping.eval_dataset) == 17
    assert "left out: 3 of 20 rows of split 'train'" in caplog.text
    used = [n for n in range(20) if n not in (3, 8, 11)]
    assert skipping.train_dataset.labels.tolist() == [n % 2 for n in used]


def test_at_most_ten_rows_are_named(tmp_path):
    rows = [{"text": "t", "label": "ab"[n % 2] if n < 2 else None} for n in range(30)]
    with pytest.raises(ValueError, match=r"28 row\(s\)") as error:
        task(written(tmp_path, rows, rows[:2]))
    assert str(error.value).count("has no label") == 10


def test_a_missing_label_column_is_named(binary):
    with pytest.raises(ValueError, match="no column 'labels'; set task"):
        task(binary, label_column="labels")


def test_whole_numbers_beside_a_missing_one_may_be_classes(tmp_path):
    """pandas writes 0, 1 and nothing as 0.0, 1.0 and null."""
    rows = [{"text": "a", "label": label} for label in (0.0, 1.0, None)]
    keys = {"data": NO_EVALUATION, "on_error": "skip"}
    with pytest.raises(ValueError, match=r"such as 0.0 with some missing.*task.kind=regression"):
        task(written(tmp_path, rows), **keys)
    assert task(tmp_path, kind="single_label", **keys).train_dataset.labels.tolist() == [0, 1]
