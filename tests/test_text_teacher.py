"""Distillation in text classification: the loss, and teachers that do not fit."""

import json
import pickle
import shutil

import pytest
import torch
from text_files import BERT, CNN, Fixed, batch, finished, table, task, written


@pytest.mark.parametrize("model", [BERT, CNN], ids=lambda model: model["name"])
@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
def test_with_a_teacher_the_loss_is_labels_and_divergence_in_their_shares(
    binary, tmp_path, model, weights
):
    """Written out; the outputs of the teacher are matched by the names of their classes."""
    network = finished(tmp_path / "final", binary, model=model)
    description = json.loads((tmp_path / "final" / "config.json").read_text())
    description["id2label"] = {"0": "1", "1": "0"}
    (tmp_path / "final" / "config.json").write_text(json.dumps({**description, "label2id": {}}))
    teacher = {"name": str(tmp_path / "final"), "alpha": 0.3, "temperature": 2.0}
    keys = {"label_smoothing": 0.1, "class_weights": weights}
    taught, plain = task(binary, teacher=teacher, **keys), task(binary, **keys)
    five, fixed = batch(taught, range(5)), Fixed(torch.randn(5, 2, dtype=torch.float64))
    with torch.no_grad():
        output = network.double()(**five["inputs"])
        theirs = (getattr(output, "logits", output).flip(1) / 2).softmax(1)
    ours = (fixed.logits / 2).softmax(1)
    expected = 0.7 * plain.loss(fixed, five)
    for row, label in enumerate(five["label"].tolist()):
        divergence = (theirs[row] * (theirs[row] / ours[row]).log()).sum()
        expected = expected + 0.3 * (weights or [1.0, 1.0])[label] * 2 * 2 * divergence
    loss = taught.loss(fixed, five)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    (gradient,), (by_hand,) = (torch.autograd.grad(x, fixed.logits) for x in (loss, expected))
    torch.testing.assert_close(gradient, by_hand, rtol=1e-9, atol=1e-12)
    assert taught.count(five) == plain.count(five)
    scores, same = table(taught, fixed.logits, five), table(plain, fixed.logits, five)
    assert all((scores[name] == same[name]).all() for name in same)
    assert taught.data_identity.keys() - plain.data_identity.keys() == {"teacher"}
    assert len(pickle.dumps(taught)) < len(pickle.dumps(plain)) + 2000  # no weights


def test_a_teacher_with_another_tokenizer_or_other_classes_is_refused(binary, tmp_path):
    folder = tmp_path / "final"
    finished(folder, binary, max_length=16)
    teacher = {"name": str(folder)}
    with pytest.raises(ValueError, match=r"another tokenizer .*300 and 290 tokens\): set task.tok"):
        task(binary, teacher=teacher, max_length=16, vocab_size=290)
    task(binary, teacher=teacher, max_length=16, vocab_size=290, tokenizer=str(folder))
    with pytest.raises(ValueError, match=r"at most 16 tokens: task.max_length=16"):
        task(binary, teacher=teacher)
    rows = [json.loads(line) for line in (binary / "train.jsonl").read_text().splitlines()]
    others = written(tmp_path / "others", [{**row, "label": row["label"] + 1} for row in rows])
    with pytest.raises(ValueError, match=r"does not know the class\(es\) \['2'\].*\['0', '1'\]"):
        task(others, teacher=teacher, max_length=16)  # before its tokenizer is found to be another
    numbers = written(tmp_path / "numbers", [{**row, "label": 0.5} for row in rows])
    with pytest.raises(ValueError, match=r"task.teacher is for single_label"):
        task(numbers, teacher=teacher)
    shutil.rmtree(folder)
    finished(folder, binary, model=CNN)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="not the final/ of a text classification run"):
        task(binary, teacher=teacher)
    (folder / "tokenizer_config.json").unlink()  # such as that of images
    with pytest.raises(ValueError, match=f"the teacher {folder} has no tokenizer"):
        task(binary, teacher=teacher)
