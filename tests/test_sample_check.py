"""The look at the data before training, and messy images from every source up to the last step."""

import io
import math
import sys
from itertools import pairwise
from types import SimpleNamespace

from evenstep import sample_check
from evenstep.labels import IGNORED
from evenstep.mixing import mixing
from evenstep.streams import Streams
from evenstep.task import Task

import datasets
import PIL.Image
import pytest
import torch
from image_files import batch, picture, png, ramp16, table, task
from launching import ROOT, command, metrics, run, summary
from test_readme import block

NORMALIZED = {"mean": [0.5], "std": [0.5]}


class Rows:
    """Counts from 0 to n - 1 as tensors of one number, but for what `odd` gives or raises."""

    def __init__(self, n, odd=None):
        self.n, self.odd = n, odd or {}

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        sample = self.odd.get(index, torch.tensor([float(index)]))
        if isinstance(sample, Exception):
            raise sample
        return sample


def made(train, held_out=None, **changes):
    functions = {"collate": lambda rows: {"x": torch.stack(list(rows))}, "count": lambda b: 1}
    return Task(
        model=None,
        train_dataset=train,
        eval_dataset=held_out,
        loss=None,
        score=None,
        summarize=None,
        best_metric="",
        **{**functions, **changes},
    )


def check(checked, micro_batch_size=4, on_nonfinite="stop"):
    config = SimpleNamespace(micro_batch_size=micro_batch_size, on_nonfinite=on_nonfinite, seed=0)
    sample_check.check_samples(checked, config, SimpleNamespace(channel=None))


def problems(checked, **keys):
    """The lines that say what is wrong, in order."""
    with pytest.raises(ValueError, match="before training") as caught:
        check(checked, **keys)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


# What is found


@pytest.mark.parametrize("size", [1, 4, 5000, "auto"])
def test_good_data_is_left_alone(size):
    check(made(Rows(10), Rows(3)), size)


def test_all_problems_of_both_splits_are_reported_together():
    broken = {3: OSError("truncated"), 8: OSError("no such file")}
    lines = problems(made(Rows(10, broken), Rows(5, {4: OSError("empty")})))
    assert sorted(line.partition(" (")[0] for line in lines) == [
        "evaluation sample 4: OSError: empty",
        "training sample 3: OSError: truncated",
        "training sample 8: OSError: no such file",
    ]


def test_ten_are_shown_and_the_others_counted():
    lines = problems(made(Rows(40, {i: OSError(f"file {i}") for i in range(0, 26, 2)})))
    assert len(lines) == 11
    assert lines[-1] == "and 3 more"


def test_one_fault_of_many_samples_is_one_line():
    (line,) = problems(made(Rows(40, {i: OSError("no disk") for i in range(5, 30)})))
    assert line.startswith("training sample ")
    assert "and 22 more: OSError: no disk" in line


def test_a_fault_in_the_tasks_own_code_is_shown_with_its_line():
    def collate(rows):
        return {"x": rows["x"]}  # the line that is named

    (line,) = problems(made(Rows(4), collate=collate))
    number = collate.__code__.co_firstlineno + 1
    assert (
        f"TypeError: list indices must be integers or slices, not str (test_sample_check.py, "
        f"line {number})" in line
    )


@pytest.mark.parametrize("part", ["augment", "mix"])
def test_what_is_random_in_training_is_tried_too(part):
    def fail(value):
        raise OSError(f"in {part}")

    (line,) = problems(made(Rows(4), **{part: fail}))
    assert f"OSError: in {part}" in line


def test_evaluation_is_neither_augmented_nor_mixed_nor_counted():
    def fail(value):
        raise AssertionError

    checked = made(Rows(4), Rows(4), augment=fail, mix=fail, count=fail)
    assert all("evaluation" not in line for line in problems(checked))


def test_shapes_that_do_not_go_together_are_named_by_two_samples():
    (line,) = problems(made(Rows(8, {5: torch.zeros(2)})), micro_batch_size=8)
    assert line.startswith("training samples 0 and 5 in one batch: RuntimeError: stack expects")


# Samples that cannot be alone


def needs_two(rows):
    if len(rows) < 2:
        raise ValueError("a pair has two")
    return {"x": torch.stack(list(rows))}


MIXED = {
    "collate": lambda rows: {
        "image": torch.stack(list(rows)).view(-1, 1, 1, 1).expand(-1, 1, 4, 4),
        "label": torch.arange(len(rows)) % 2,
    },
    "mix": mixing(2, mixup=0.2, cutmix=1.0),
}
PAIRED = {"mixup and cutmix": MIXED, "a collate that needs two": {"collate": needs_two}}


@pytest.mark.parametrize("functions", PAIRED.values(), ids=PAIRED)
@pytest.mark.parametrize("size", [2, 3, 4, 5000, "auto"])
@pytest.mark.parametrize("n", [1, 2, 5, 255, 256])
def test_a_sample_left_over_is_no_fault_where_a_micro_batch_has_two(functions, size, n):
    check(made(Rows(n), **functions), size)


@pytest.mark.parametrize("functions", PAIRED.values(), ids=PAIRED)
@pytest.mark.parametrize("size", [2, 3, 5000, "auto"])
@pytest.mark.parametrize("broken", [0, 3, 8])
def test_the_broken_one_among_good_samples_that_cannot_be_alone_is_named(functions, size, broken):
    checked = made(Rows(9, {broken: OSError("truncated")}), **functions)
    (line,) = problems(checked, micro_batch_size=size)
    assert line.startswith(f"training sample {broken}: OSError: truncated (")


def test_a_broken_image_under_mixup_is_the_only_one_that_is_named(tmp_path):
    images = [png(row) for row in range(9)]
    images[4] = b"no image"
    table(tmp_path / "train.parquet", ["a", "b", "b"] * 3, images)
    data = {"name": str(tmp_path), "eval_split": "none"}
    for size in (2, 4, 9):
        broken = task(data, normalize=NORMALIZED, channels=1, mixup=0.2)
        (line,) = problems(broken, micro_batch_size=size)
        assert line.startswith("training sample 4: row 4 of split")


def test_micro_batches_of_one_image_are_refused_under_mixup():
    (line,) = problems(made(Rows(9), **MIXED), micro_batch_size=1)
    assert "set micro_batch_size to at least 2" in line


@pytest.mark.parametrize(("n", "size"), [(1, 4), (5, 2)])
def test_a_last_evaluation_batch_of_one_sample_that_cannot_be_alone_is_found(n, size):
    (line,) = problems(made(Rows(8), Rows(n), collate=needs_two), micro_batch_size=size)
    assert line.startswith("evaluation sample ")
    assert "a pair has two" in line


def test_the_broken_evaluation_sample_is_named_where_no_batch_has_one_sample():
    checked = made(Rows(8), Rows(8, {5: OSError("truncated")}), collate=needs_two)
    (line,) = problems(checked)
    assert line.startswith("evaluation sample 5: OSError: truncated")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_named_by_sample_and_tensor(bad):
    checked = made(Rows(9, {6: torch.tensor([bad])}))
    (line,) = problems(checked)
    assert line.startswith("training sample 6: NaN or infinity in the batch['x']")
    check(checked, on_nonfinite="skip")


def test_a_mask_of_minus_infinity_is_no_fault():
    check(made(Rows(9, {6: torch.tensor([-math.inf])})))


@pytest.mark.parametrize("make", [
    lambda x: x.to(torch.complex64), lambda x: x.to(torch.float8_e4m3fn), torch.Tensor.to_sparse,
    lambda x: torch.nested.nested_tensor(list(x)), lambda x: x.to(torch.uint16),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_every_kind_are_good_data(make):
    def collate(rows):
        return {"x": make(torch.stack(list(rows)))}

    check(made(Rows(9), Rows(5), collate=collate))


def test_a_complex_value_that_is_not_finite_is_found():
    for bad in (complex(math.nan, 0), complex(0, math.nan), complex(math.inf, 0)):
        (line,) = problems(made([torch.tensor(0j), torch.tensor(bad)]))
        assert line.startswith("training sample 1: NaN or infinity")


@pytest.mark.parametrize("count", [math.nan, math.inf, -1.0])
def test_a_number_of_targets_that_is_none_is_refused(count):
    (line,) = problems(made(Rows(4), count=lambda batch: count))
    assert f"Task.count is {count}" in line


def nothing(batch):
    return 0


@pytest.mark.parametrize("n", [1, 2, 9, 256])
def test_data_without_targets_is_refused_once_all_of_it_was_looked_at(n):
    (line,) = problems(made(Rows(n), count=nothing))
    assert line == "every training sample: no target counts (Task.count is 0)"
    check(made(Rows(n), count=lambda batch: float((batch["x"] == n - 1).sum())))
    (line,) = problems(made(Rows(n, {0: OSError("the only one that counts")}), count=nothing))
    assert "the only one that counts" in line


def test_samples_without_targets_are_no_fault_while_others_were_not_looked_at(monkeypatch):
    check(made(Rows(257), count=nothing))
    check(made(streamed(["1"] * 9, tensors), count=nothing))
    monkeypatch.setattr(sample_check, "SECONDS", 0.0)
    check(made(Rows(9), count=nothing))


def test_rare_classes_that_alone_have_a_weight_are_no_fault(tmp_path):
    """Of 300 images every second one is looked at, and the others alone count."""
    table(tmp_path / "train.parquet", ["a", "b"] * 150)
    data = {"name": str(tmp_path), "eval_split": "none"}
    check(task(data, normalize=NORMALIZED, channels=1, class_weights=[0, 1]))


# What it costs


def test_a_bounded_number_of_evenly_spread_samples_is_read():
    asked = []

    class Endless(Rows):
        def __getitem__(self, index):
            asked.append(index)
            return torch.zeros(1)

    check(made(Endless(10**9)))
    assert len(asked) == len(set(asked)) <= 256
    ordered = sorted(asked)
    steps = {b - a for a, b in pairwise(ordered)}
    assert len(steps) == 1
    assert ordered[-1] > 0.99e9


def test_it_stops_when_the_time_is_over_having_looked_at_the_whole_split(monkeypatch):
    monkeypatch.setattr(sample_check, "SECONDS", 0.0)
    asked = []

    class Slow(Rows):
        def __getitem__(self, index):
            asked.append(index)
            return torch.zeros(1)

    check(made(Slow(256)))
    assert len(asked) == 4
    assert max(asked) - min(asked) > 128


def test_a_file_that_a_dataset_opens_at_its_first_read_is_not_open_when_workers_start():
    class Lazy(Rows):
        file = None

        def __getitem__(self, index):
            self.file = self.file or io.BytesIO()
            return torch.zeros(1)

    checked = made(Lazy(4), Lazy(4))
    check(checked)
    assert checked.train_dataset.file is None
    assert checked.eval_dataset.file is None


# Streams


def streamed(numbers, transform):
    source = datasets.Dataset.from_dict({"x": numbers}).to_iterable_dataset()
    return Streams([source], transform=transform)


def tensors(rows):
    return [torch.tensor([float(row["x"])]) for row in rows]


def test_a_stream_is_looked_at_source_by_source():
    good, bad = streamed(["1", "2"] * 20, tensors), streamed(["1", "two"] * 20, tensors)
    check(made(good))
    both = Streams([*good.sources, *bad.sources], weights=[1, 1], transform=tensors)
    (line,) = problems(made(both))
    assert line.startswith("source 1, training sample 0: ValueError: could not convert string")


def test_a_stream_without_samples_is_refused():
    (line,) = problems(made(streamed(["1"] * 9, lambda rows: [])))
    assert "has no samples of source 0" in line


# Images


def hub_table(path, labels, images):
    """As the hub stores them: a struct of bytes and path, and named classes."""
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    rows = {
        "image": [image and {"bytes": image, "path": None} for image in images],
        "label": ["ab".index(label) for label in labels],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)


def class_folders(path, labels, images):
    for row, (label, image) in enumerate(zip(labels, images, strict=True)):
        folder = path.parent / path.stem / label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{row:03}.png").write_bytes(image or b"")


SOURCES = {"hub parquet": hub_table, "plain parquet": table, "class folders": class_folders}


def encoded(image, kind="png"):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def ends_early(image):
    """A JPEG that lost its second half."""
    whole = encoded(image, "jpeg")
    return whole[: len(whole) // 2]


@pytest.mark.parametrize("write", SOURCES.values(), ids=SOURCES)
def test_every_source_gives_one_batch_of_all_modes(tmp_path, write):
    modes = ["L", "LA", "P", "RGB", "RGBA", "1"]
    images = [encoded(picture(mode=mode, size=(9, 7))) for mode in modes]
    images += [encoded(picture(mode="CMYK"), "jpeg"), encoded(ramp16())]
    write(tmp_path / "train.parquet", ["a"] * 7 + ["b"], images)
    data = {"name": str(tmp_path), "eval_split": "none"}
    everything = task(data, image_size=8, normalize={"mean": [0.0] * 3, "std": [1 / 255] * 3})
    check(everything)
    made_of_all = batch(everything)
    assert made_of_all["image"].shape == (8, 3, 8, 8)
    assert made_of_all["label"].tolist() == [0] * 7 + [1]
    ramp = made_of_all["image"][7]
    assert ramp.mean().item() == pytest.approx(127.5, abs=1)


@pytest.mark.parametrize("write", SOURCES.values(), ids=SOURCES)
def test_every_source_names_all_broken_files_or_skips_them(tmp_path, write):
    photo = PIL.Image.effect_noise((64, 64), 90)
    good = [png(row, size=(64, 64)) for row in range(4)]
    broken = [b"no image", ends_early(photo), None]
    write(tmp_path / "train.parquet", ["a", "b"] * 2, good)
    write(tmp_path / "test.parquet", ["a"] * 2 + ["b"] * 5, [*good[:2], *broken, *good[2:]])
    keys = {"channels": 1, "normalize": NORMALIZED}
    lines = problems(task(tmp_path, **keys))
    rows = [line.partition(":")[0] for line in lines]
    assert sorted(rows) == [f"evaluation sample {row}" for row in (2, 3, 4)]
    for row, line in zip((2, 3, 4), sorted(lines), strict=True):
        assert f"row {row} of split 'test'" in line
        assert "task.on_error=skip" in line
        assert write is not class_folders or f"{row:03}.png" in line

    skipping = task(tmp_path, on_error="skip", **keys)
    check(skipping)
    labels = batch(skipping, split="eval_dataset")["label"].tolist()
    assert labels == [0, 0, IGNORED, IGNORED, IGNORED, 1, 1]


@pytest.fixture
def messy(tmp_path):
    """40 images to train on, of which every fifth is broken, and 20 to evaluate on, 3 broken."""
    images = [png(6 * row) for row in range(40)]
    images[::5] = [b"no image", png()[:40]] * 4
    hub_table(tmp_path / "data/train.parquet", ["a", "b"] * 20, images)
    images = [png(6 * row) for row in range(20)]
    images[4:7] = [b"", None, png()[:-30]]
    hub_table(tmp_path / "data/test.parquet", ["a", "b"] * 10, images)
    (tmp_path / "tiny.py").write_text(block("python", "AdaptiveAvgPool2d"))
    return [
        *("configs/digits.yaml", f"task.data.name={tmp_path / 'data'}", "task.model.name=tiny"),
        *("global_batch_size=16", "micro_batch_size=4", "epochs=null", "steps=3", "log_every=1"),
        *("precision=fp64", "task.augment=[]", f"output_dir={tmp_path}", "tracking.with=[]"),
        "task.normalize={mean: [0.5], std: [0.5]}",
    ]


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_skipped_images_are_counted_alike_on_two_processes(tmp_path, messy):
    trained = []
    for processes in (1, 2):
        arguments = [*messy, "task.on_error=skip", f"name=on-{processes}"]
        alone = [sys.executable, str(ROOT / "train.py"), *arguments]
        code, output = run(
            alone if processes == 1 else command(2, *arguments), PYTHONPATH=str(tmp_path)
        )
        assert code == 0, output
        trained.append(tmp_path / f"on-{processes}")
    one, two = ([row for row in metrics(path) if "train/loss" in row] for path in trained)
    assert [row["step"] for row in one] == [row["step"] for row in two] == [1, 2, 3]
    assert [row["train/targets"] for row in one] == [row["train/targets"] for row in two]
    # 48 positions: one epoch of 40 samples, 8 of them broken, and 8 samples of the next.
    assert 48 - 8 - 8 <= sum(row["train/targets"] for row in one) <= 48 - 8
    losses = [[row["train/loss"] for row in rows] for rows in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    for path in trained:
        found = summary(path)["metrics"]
        assert found["eval/skipped"] == 3
        assert sum(map(sum, found["eval/confusion_matrix"])) == 17


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_two_processes_stop_with_one_report_before_anything_is_written(tmp_path, messy):
    code, output = run(command(2, *messy, "name=stopped"), PYTHONPATH=str(tmp_path))
    assert code != 0
    assert output.count("a look at the data before training found") == 1
    assert output.count(" sample ") == 10
    assert "and 1 more" in output  # 8 of training and 3 of evaluation
    assert not (tmp_path / "stopped").exists()
