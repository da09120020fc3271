"""Image files, folders and tables for tests, made on the spot."""

import io

from evenstep.sections import specialise
from evenstep.task import find_module
from evenstep.tasks import image_classification

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq


def picture(value=0, size=(8, 8), mode="RGB"):
    return PIL.Image.new(mode, size, value)


def png(value=0, size=(8, 8), mode="L"):
    file = io.BytesIO()
    picture(value, size, mode).save(file, "png")
    return file.getvalue()


def table(path, labels, images=None, **columns):
    """A parquet file with one grey image a label."""
    images = images or [png(row % 256) for row in range(len(labels))]
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = labels if isinstance(labels, pa.Array) else pa.array(labels)
    content = {"image": pa.array(images, pa.binary()), "label": labels, **columns}
    pq.write_table(pa.table(content), path)


def folder(root, *files):
    """Image files below root, each of another grey."""
    for number, file in enumerate(files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        picture((number,) * 3).save(root / file)
    return root


def ramp16(size=256):
    """An image of mode I;16 from black to white."""
    return PIL.Image.fromarray(
        np.linspace(0, 65535, size * size).astype(np.uint16).reshape(size, size)
    )


def splits(name, **keys):
    """What `task.data: {name: ..., ...}` loads."""
    raw = {"name": str(name), **keys}
    module = find_module("datasets", raw["name"])
    return module.build(module.Config(**raw))


def task(data, model="resnet18", **keys):
    """The image classification task of a raw `task:` section."""
    data, model = (
        part if isinstance(part, dict) else {"name": str(part)} for part in (data, model)
    )
    raw = {"name": "image_classification", "data": data, "model": model, **keys}
    return image_classification.build(specialise(image_classification.Config, raw)(**raw))


def batch(task, indices=None, split="train_dataset"):
    dataset = getattr(task, split)
    return task.collate([dataset[i] for i in (range(len(dataset)) if indices is None else indices)])
