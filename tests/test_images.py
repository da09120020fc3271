"""Images, labels and splits: what is read from a folder or a table, and what is refused."""

import logging
import random
import subprocess
import sys

from evenstep.images import (
    BadImage,
    ImageDataset,
    TensorImages,
    common_size,
    decode,
    eight_bit,
    measure,
    resize,
    to_uint8,
    uniform,
)
from evenstep.labels import IGNORED, LabelMap, seeded_split

import datasets
import image_files
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import torch
from image_files import folder, picture, png, ramp16, splits, table

# Pixels

MODES = ["L", "LA", "P", "RGB", "RGBA", "CMYK", "1", "I;16", "I", "YCbCr"]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_uint8_of_the_asked_channels(mode, channels):
    image = to_uint8(PIL.Image.new(mode, (5, 4)), channels)
    assert image.shape == (channels, 4, 5)
    assert image.dtype == torch.uint8


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_16_bit_grey_is_scaled_and_not_clipped(mode, tmp_path):
    values = np.asarray(ramp16())
    image = PIL.Image.fromarray(values.astype({"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}[mode]))
    assert image.mode == mode
    grey = to_uint8(image, 1).double()
    assert grey.mean().item() == pytest.approx(127.5, abs=0.1)
    assert (grey.min(), grey.max()) == (0, 255)


def test_a_16_bit_file_is_scaled_too(tmp_path):
    ramp16().save(tmp_path / "ramp.png")
    image = decode({"bytes": None, "path": str(tmp_path / "ramp.png")}, "row 0")
    assert np.asarray(image).mean() == pytest.approx(127.5, abs=0.1)


def test_transparency_is_composited_over_white():
    red = picture((255, 0, 0, 51), mode="RGBA")  # alpha 0.2
    assert to_uint8(red, 3)[:, 0, 0].tolist() == [255, 204, 204]
    hidden = picture((0, 0), mode="LA")
    assert to_uint8(hidden, 1).unique().tolist() == [255]
    palette = picture(3, mode="P")
    palette.info["transparency"] = 3
    assert to_uint8(palette, 3).unique().tolist() == [255]


def test_a_palette_keeps_its_colours():
    image = picture((10, 200, 30)).convert("P", palette=PIL.Image.Palette.ADAPTIVE)
    assert to_uint8(image, 3)[:, 0, 0].tolist() == [10, 200, 30]


def test_cmyk_keeps_its_colours():
    assert to_uint8(picture((0, 255, 255, 0), mode="CMYK"), 3)[:, 0, 0].tolist() == [255, 0, 0]


def test_floats_are_refused_because_their_range_is_unknown():
    with pytest.raises(BadImage, match="mode F"):
        eight_bit(picture(0.5, mode="F"))


def test_grey_of_32_bits_with_few_values_is_refused_and_skipped():
    """As 16 bits it would be black."""
    dark = PIL.Image.fromarray(np.full((4, 4), 200, dtype="<i4"))
    with pytest.raises(BadImage, match=r"up to 200 in 32 bits \(mode I\)"):
        eight_bit(dark)
    keys = {"channels": 1, "size": 4, "resizes": False}
    assert ImageDataset([(dark, 0)], on_error="skip", **keys)[0][1] == IGNORED
    with pytest.raises(BadImage, match=r"mode I.*task.on_error=skip"):
        ImageDataset([(dark, 0)], on_error="stop", **keys)[0]


def test_a_photo_is_turned_as_its_exif_says(tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    picture(size=(20, 10)).save(tmp_path / "photo.jpg", exif=exif)
    assert decode({"bytes": None, "path": tmp_path / "photo.jpg"}, "row 0").size == (10, 20)


def test_tensors_are_uint8_with_1_or_3_channels():
    assert to_uint8(torch.full((1, 2, 2), 7, dtype=torch.uint8), 3).tolist() == [[[7, 7]] * 2] * 3
    for wrong in (torch.zeros(3, 2, 2), torch.zeros(4, 2, 2, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="uint8"):
            to_uint8(wrong, 3)


def test_resizing_keeps_proportions_and_cuts_the_centre():
    image = torch.zeros(1, 10, 30, dtype=torch.uint8)
    image[..., 10:20] = 255
    assert resize(image, 5).shape == (1, 5, 5)
    assert resize(image, 10).unique().tolist() == [255]


def test_statistics_are_exact():
    images = torch.randint(0, 256, (50, 3, 7, 7), dtype=torch.uint8)
    mean, std = measure(TensorImages(images, [0] * 50))
    pixels = images.double().div(255).transpose(0, 1).flatten(1)
    torch.testing.assert_close(torch.tensor(mean).double(), pixels.mean(1))
    torch.testing.assert_close(torch.tensor(std).double(), pixels.std(1, correction=0))


def test_a_constant_channel_can_be_divided_by():
    assert measure(TensorImages(torch.full((4, 1, 2, 2), 51, dtype=torch.uint8), [0] * 4)) == (
        [0.2],
        [1.0],
    )


def test_statistics_of_a_source_that_draws_are_the_same_each_time():
    class Draws:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return torch.full((1, 2, 2), random.randrange(256), dtype=torch.uint8), 0

    random.seed(1)
    one = measure(Draws())
    random.seed(2)
    assert measure(Draws()) == one


def test_statistics_read_a_bounded_number_of_images():
    read = []

    class Source:
        def __len__(self):
            return 10**9

        def __getitem__(self, index):
            read.append(index)
            return torch.zeros(1, 2, 2, dtype=torch.uint8), 0

    measure(Source(), limit=100)
    assert len(read) == 100
    assert read[:2] == [0, 10**7]


def test_sizes_that_differ_are_named_with_the_way_out():
    source = [(picture(size=(8, 8)), 0), (picture(size=(9, 7)), 1)]
    with pytest.raises(ValueError, match=r"8x8 and 7x9.*set task.image_size"):
        common_size(source)
    with pytest.raises(ValueError, match=r"of 7x9.*square"):
        common_size(source[1:])
    assert common_size(source[:1], source[:1]) == 8


def test_an_odd_size_met_later_is_an_error_and_no_silent_resize():
    source = [(picture(size=(8, 8)), 0), (picture(size=(9, 9)), 1)]
    images = ImageDataset(source, channels=3, size=8, resizes=False, on_error="skip")
    with pytest.raises(ValueError, match="8x8 and 9x9"):
        images[1]


def test_images_in_memory_read_many_at_once_as_one_by_one():
    source = TensorImages(torch.randint(0, 256, (6, 1, 4, 4), dtype=torch.uint8), list(range(6)))
    images = uniform(source, channels=3, size=8, resizes=True, on_error="stop")
    many = images.__getitems__([4, 0, 4])
    assert [label for _, label in many] == [4, 0, 4]
    for (image, _), index in zip(many, [4, 0, 4], strict=True):
        assert image.shape == (3, 8, 8)
        assert torch.equal(image, images[index][0])


@pytest.mark.parametrize(
    ("limit", "pure", "reads"),
    [(4 * 3 * 8 * 8, True, 4), (4 * 3 * 8 * 8 - 1, True, 8), (4 * 3 * 8 * 8, False, 8)],
)
def test_images_that_fit_into_the_memory_allowed_are_read_once(monkeypatch, limit, pure, reads):
    """But not those of a source that may draw: it gives others in the next epoch."""
    monkeypatch.setattr("evenstep.images.KEPT_BYTES", limit)
    read = []

    class Source(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    source = Source((picture((9, index, 0), size=(8, 8)), index) for index in range(4))
    source.pure = pure
    images = ImageDataset(source, channels=3, size=8, resizes=False, on_error="stop")
    first, second = ([images[index] for index in range(4)] for _ in range(2))
    assert len(read) == reads
    assert [label for _, label in second] == [0, 1, 2, 3]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True))


# Files that are no images


@pytest.mark.parametrize("content", [b"", b"no image", png()[:40], png()[:-30]])
def test_a_broken_file_is_named_with_its_row(tmp_path, content):
    root = folder(tmp_path / "data", "train/a/0.png", "train/a/1.png", "train/b/2.png")
    (root / "train/b/2.png").write_bytes(content)
    source = splits(root, eval_split="none").train
    images = ImageDataset(source, channels=3, size=8, resizes=False, on_error="stop")
    assert images[1][1] == 0
    with pytest.raises(BadImage, match=r"row 2 of split 'train' \(.*b/2\.png\).*on_error=skip"):
        images[2]


def test_a_missing_image_is_named_with_its_row(tmp_path):
    table(tmp_path / "train.parquet", ["a", "b"], images=[png(), None])
    with pytest.raises(BadImage, match="row 1 of split 'train' has no image"):
        splits(tmp_path / "train.parquet", eval_split="none").train[1]


def test_the_row_named_is_that_of_the_file_after_a_seeded_split_too(tmp_path):
    images = [png(row) for row in range(10)]
    images[6] = b"broken"
    table(tmp_path / "train.parquet", ["a", "b"] * 5, images=images)
    both = splits(tmp_path / "train.parquet")
    errors = []
    for source in (both.train, both.eval):
        for index in range(len(source)):
            try:
                source[index]
            except BadImage as error:
                errors.append(str(error))
    assert len(errors) == 1
    assert "row 6 of split 'train'" in errors[0]


def test_a_skipped_image_is_black_ignored_and_warned_about_once(tmp_path, caplog):
    table(tmp_path / "train.parquet", ["a", "b"], images=[png(9), b"broken"])
    source = splits(tmp_path / "train.parquet", eval_split="none").train
    images = ImageDataset(source, channels=1, size=8, resizes=False, on_error="skip")
    for _ in range(3):
        image, label = images[1]
        assert (image.shape, image.unique().tolist(), label) == ((1, 8, 8), [0], IGNORED)
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert ["row 1 of split 'train'" in r.message for r in warnings] == [True]
    assert measure(images)[0] == [9 / 255]
    assert common_size(source) == 8


# Labels


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["dog", "cat", "dog"], ["cat", "dog"]),
        ([10, 9, 10, -1], ["-1", "9", "10"]),
        ([True, False], ["False", "True"]),
        (["10", "9"], ["10", "9"]),
    ],
)
def test_classes_are_the_sorted_labels_of_the_training_split(tmp_path, labels, names):
    table(tmp_path / "train.parquet", labels)
    table(tmp_path / "test.parquet", labels[:1])
    both = splits(tmp_path)
    assert both.classes == names
    assert [names[both.train[i][1]] for i in range(len(labels))] == list(map(str, labels))
    assert names[both.eval[0][1]] == str(labels[0])


def test_declared_class_labels_keep_their_names_and_order(tmp_path):
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["zebra", "ant"])}
    )
    rows = {"image": [picture()] * 3, "label": [1, 0, 1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    both = splits(tmp_path, eval_split="none")
    assert both.classes == ["zebra", "ant"]
    assert [both.train[i][1] for i in range(3)] == [1, 0, 1]
    rows["label"] = [1, -1, 0]  # how hub datasets write "no label"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(ValueError, match="row 1 of split 'test' has no label"):
        splits(tmp_path)


def test_a_missing_label_is_an_error_with_its_row(tmp_path):
    table(tmp_path / "train.parquet", ["a", "b", None])
    with pytest.raises(ValueError, match="row 2 of split 'train' has no label"):
        splits(tmp_path)


def test_a_label_that_training_never_saw_is_an_error_naming_it_and_its_row(tmp_path):
    table(tmp_path / "train.parquet", ["a", "b"])
    table(tmp_path / "test.parquet", ["b", "a", "c"])
    with pytest.raises(ValueError, match=r"row 2 of split 'test' has the label 'c'.*'a', 'b'"):
        splits(tmp_path)


def test_numbers_with_a_fraction_are_no_labels():
    with pytest.raises(ValueError, match=r"row 1 .* 0\.5 \(float\)"):
        LabelMap.of([1, 0.5], "train")


def test_one_class_is_an_error(tmp_path):
    table(tmp_path / "train.parquet", ["a", "a"])
    with pytest.raises(ValueError, match=r"1 class.*'a'.*at least two"):
        splits(tmp_path)


# Splits


@pytest.mark.parametrize("name", ["validation", "valid", "val", "test"])
def test_an_evaluation_split_is_found_by_its_usual_names(tmp_path, name):
    table(tmp_path / "train.parquet", ["a", "b"])
    table(tmp_path / f"{name}.parquet", ["b", "b", "a"])
    both = splits(tmp_path)
    assert (len(both.train), len(both.eval)) == (2, 3)


@pytest.mark.parametrize("has_empty_split", [False, True])
def test_a_missing_or_empty_evaluation_split_is_made_from_the_seed_and_said(
    tmp_path, has_empty_split, caplog
):
    caplog.set_level(logging.INFO)
    table(tmp_path / "train.parquet", ["a", "b"] * 10)
    if has_empty_split:
        table(tmp_path / "test.parquet", pa.array([], pa.string()))
    both = splits(tmp_path)
    assert (len(both.train), len(both.eval)) == (16, 4)
    assert sorted(both.eval[i][1] for i in range(4)) == [0, 0, 1, 1]
    assert "4 of 20 training samples are held out" in both.identity["split"]
    assert "stratified" in caplog.text


def test_evaluation_can_be_off_or_on_a_named_split(tmp_path):
    table(tmp_path / "train.parquet", ["a", "b"] * 3)
    table(tmp_path / "test.parquet", ["a"])
    assert splits(tmp_path, eval_split="none").eval is None
    assert len(splits(tmp_path, eval_split="train").eval) == 6
    with pytest.raises(ValueError, match="no split 'other' with samples; it has: train, test"):
        splits(tmp_path, eval_split="other")


def test_one_sample_cannot_be_split_so_evaluation_is_off(tmp_path):
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    rows = {"image": [picture()], "label": [0]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    only = splits(tmp_path)
    assert (len(only.train), only.eval) == (1, None)
    assert "no evaluation" in only.identity["split"]


@pytest.mark.parametrize(
    ("labels", "fraction", "says"),
    [
        ([0] * 8 + [1] * 2, 0.5, ", stratified"),
        ([0] * 9 + [1], 0.5, "not stratified"),  # one sample of class 1
        ([0, 0, 1, 1, 2, 2], 0.2, "not stratified"),  # no room for three classes
        ([0, 1], 0.2, "not stratified"),
    ],
)
def test_a_seeded_split_is_a_partition_that_depends_on_the_seed_alone(labels, fraction, says):
    train, held_out, said = seeded_split(labels, fraction, seed=0)
    assert says in said
    assert sorted(train + held_out) == list(range(len(labels)))
    assert train
    assert held_out
    torch.manual_seed(1)
    np.random.seed(1)
    assert seeded_split(labels, fraction, seed=0)[:2] == (train, held_out)
    others = {tuple(seeded_split(labels, fraction, seed=seed)[1]) for seed in range(20)}
    assert len(others) > 1


def test_a_stratified_split_keeps_the_shares_of_the_classes():
    labels = [0] * 80 + [1] * 20
    _, held_out, _ = seeded_split(labels, 0.25, seed=3)
    assert np.bincount([labels[i] for i in held_out]).tolist() == [20, 5]


# Where data may lie


def test_digits_hold_out_a_stratified_fifth():
    digits = splits("digits")
    labels = np.array(digits.train.labels + digits.eval.labels)
    assert len(labels) == 1797
    assert len(digits.eval) == 359
    shares = np.bincount(digits.eval.labels) / np.bincount(labels)
    assert np.abs(shares - 0.2).max() < 0.01
    assert digits.eval.labels == splits("digits").eval.labels
    assert digits.eval.labels != splits("digits", split_seed=1).eval.labels
    assert digits.train.images.max() == 255


def test_a_clone_of_a_hub_repository_works_as_it_is(tmp_path):
    table(tmp_path / "cats/train-00000-of-00002.parquet", ["a"])
    table(tmp_path / "cats/train-00001-of-00002.parquet", ["b"])
    table(tmp_path / "cats/test-00000-of-00001.parquet", ["b", "b", "b"])
    table(tmp_path / "dogs/train-00000-of-00001.parquet", ["x", "y"])
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: cats\n  data_files:\n  - {split: train, path: cats/train-*}"
        "\n  - {split: test, path: cats/test-*}\n- config_name: dogs\n  data_files: dogs/*\n---\n"
    )
    cats = splits(tmp_path, config="cats")
    assert (cats.classes, len(cats.train), len(cats.eval)) == (["a", "b"], 2, 3)
    assert splits(tmp_path, config="dogs").classes == ["x", "y"]


def test_the_columns_can_be_named(tmp_path):
    more = {"picture": pa.array([png(7), png(8)]), "fine": pa.array([5, 6])}
    table(tmp_path / "train.parquet", ["a", "b"], **more)
    both = splits(tmp_path, image_column="picture", label_column="fine", eval_split="none")
    assert both.classes == ["5", "6"]
    assert both.train[0][0].getpixel((0, 0)) == 7
    with pytest.raises(ValueError, match=r"no column photo; set task.data.image_column.*picture"):
        splits(tmp_path, image_column="photo")


def test_a_changed_file_is_read_again_and_has_another_fingerprint(tmp_path):
    table(tmp_path / "train.parquet", ["a", "b"])
    before = splits(tmp_path)
    table(tmp_path / "train.parquet", ["a", "c"])
    after = splits(tmp_path)
    assert after.classes == ["a", "c"]
    assert after.identity["fingerprint"] == before.identity["fingerprint"]  # the same images
    table(tmp_path / "train.parquet", ["c", "a"])
    assert splits(tmp_path).identity["fingerprint"] != before.identity["fingerprint"]


def test_the_fingerprint_is_that_of_the_content_wherever_it_lies(tmp_path):
    table(tmp_path / "here/train.parquet", ["a", "b"])
    table(tmp_path / "there/train.parquet", ["a", "b"])
    here, there = splits(tmp_path / "here"), splits(tmp_path / "there/train.parquet")
    assert here.identity["fingerprint"] == there.identity["fingerprint"]


@pytest.mark.parametrize("name", ["/no/such/folder", "nobody/nothing"])
def test_a_name_that_leads_nowhere_says_how_to_use_a_local_copy(name):
    with pytest.raises(ValueError, match=f"'{name}'.*task.data.name=/path"):
        splits(name)


def test_class_folders_in_split_folders(tmp_path):
    root = folder(tmp_path, "train/b/0.png", "train/a/1.PNG", "train/a/deep/2.jpg", "val/b/3.png")
    both = splits(root)
    assert both.classes == ["a", "b"]
    assert [both.train[i][1] for i in range(3)] == [0, 0, 1]
    assert both.eval[0][1] == 1


def test_class_folders_without_splits(tmp_path):
    files = [f"{name}/{number}.png" for name in ("bus", "train") for number in range(5)]
    both = splits(folder(tmp_path, *files))
    assert both.classes == ["bus", "train"]
    assert (len(both.train), len(both.eval)) == (8, 2)


def test_an_image_folder_ignores_the_column_names_of_the_hub(tmp_path):
    root = folder(tmp_path, "train/a/0.png", "train/b/1.png", "test/b/2.png")
    assert len(splits(root, image_column="img", label_column="fine_label").train) == 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["train/0.png", "train/1.png", "test/2.png"], r"train/0\.png lies in no class folder"),
        (["0.png", "1.png"], r"0\.png lies in no class folder"),
        (["train/a/0.png", "train/b/1.png", "test/2.png"], r"test/2\.png lies in no class folder"),
        (["train/a/0.png", "train/a/1.png"], r"1 class.*'a'.*at least two"),
        (["train/a/0.png", "train/b/1.txt"], r"the class folder .*train/b has no image"),
        (["train/a/0.png", "train/b/1.png", "test/c/2.png"], r"row 0 of split 'test'.*'c'"),
        ([], "no split 'train' with samples.*neither parquet files nor class folders"),
    ],
)
def test_an_image_folder_that_cannot_be_used_says_why(tmp_path, files, message):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(png())
    with pytest.raises(ValueError, match=message):
        splits(tmp_path)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_two_processes_can_load_the_same_files_at_once(tmp_path):
    table(tmp_path / "train.parquet", ["a", "b"] * 2000)
    program = (
        "from image_files import splits; import sys\n"
        "both = splits(sys.argv[1]); print(both.identity['fingerprint'], len(both.train))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    where = image_files.__file__.rpartition("/")[0]
    running = [
        subprocess.Popen(command, cwd=where, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=100)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert said[0] == said[1]
    assert said[0].endswith(" 3200\n")
