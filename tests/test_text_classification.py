"""The text classification task: losses, scores, what is refused, export, one curve."""

import json
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
import yaml
from launching import ROOT, command, metrics, run, summary
from safetensors.torch import load_file
from text_files import (
    CNN,
    NO_EVALUATION,
    Fixed,
    batch,
    finished,
    raw_config,
    sentence,
    table,
    task,
    written,
)

# Losses and scores


def test_losses_are_summed_over_the_samples(binary, tmp_path):
    logits = torch.randn(5, 2, dtype=torch.float64)
    a_task = task(binary)
    five = batch(a_task, range(5))
    expected = sum(logits[n].logsumexp(0) - logits[n, n % 2] for n in range(5))
    assert a_task.loss(Fixed(logits), five).item() == pytest.approx(expected.item())
    assert a_task.count(five) == 5

    rows = [{"text": "t", "label": value} for value in (0.5, -1.5)]
    number = task(written(tmp_path / "r", rows), data=NO_EVALUATION)
    loss = number.loss(Fixed([[1.0], [0.5]]), batch(number))
    assert (loss.item(), number.count(batch(number))) == (0.5**2 + 2**2, 2)

    rows = [{"text": "t", "label": value} for value in (["a", "b"], ["c"])]
    several = task(written(tmp_path / "m", rows), data=NO_EVALUATION)
    logits = torch.randn(2, 3)
    probabilities, labels = logits.sigmoid(), torch.tensor([[1, 1, 0], [0, 0, 1]])
    likelihood = torch.where(labels == 1, probabilities, 1 - probabilities).log()
    loss = several.loss(Fixed(logits), batch(several))
    assert loss.item() == pytest.approx(-likelihood.mean(1).sum().item(), rel=1e-5)
    assert several.count(batch(several)) == 2


def test_smoothing_and_class_weights_act_on_the_training_loss_alone(binary):
    keys = {"label_smoothing": 0.2, "class_weights": [1.0, 3.0]}
    changed, plain = task(binary, **keys), task(binary)
    logits, four = torch.randn(4, 2), batch(plain, range(4))
    expected = F.cross_entropy(logits, four["label"], torch.tensor([1.0, 3.0]), label_smoothing=0.2)
    mean = changed.loss(Fixed(logits), four) / changed.count(four)
    assert mean.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, column in plain.score(Fixed(logits), four).items():
        assert torch.equal(column, changed.score(Fixed(logits), four)[name])


def test_scores_feed_the_metrics_of_each_kind(binary, tmp_path):
    logits = [[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]
    a_task = task(binary)
    found = a_task.summarize(table(a_task, logits, batch(a_task, range(3), "eval_dataset")))
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["auroc"] == pytest.approx(3 / 4)
    assert (a_task.best_metric, a_task.higher_is_better) == ("accuracy", True)

    rows = [{"text": "t", "label": value} for value in (0.5, 1.5, 3.0)]
    number = task(written(tmp_path / "r", rows), best_metric="loss", data=NO_EVALUATION)
    found = number.summarize(table(number, [[1.0], [3.0], [6.0]], batch(number)))
    assert found["pearson"] == pytest.approx(1)
    assert (number.best_metric, number.higher_is_better) == ("loss", False)


def test_the_smallest_mean_error_is_the_best(tmp_path):
    rows = [{"text": word, "label": number / 4} for number, word in enumerate("abcdefg")]
    a_task = task(written(tmp_path / "numbers", rows), best_metric="mae", kind="regression")
    assert not a_task.higher_is_better


# What is refused, and the order


def test_keys_for_one_label_are_refused_for_other_kinds(tmp_path):
    folder = written(tmp_path, [{"text": "t", "label": value} for value in (0.5, 1.5)])
    for key, value in (("label_smoothing", 0.1), ("class_weights", "balanced")):
        with pytest.raises(ValueError, match=rf"task.{key} is for single_label.*regression"):
            task(folder, **{key: value})


def test_balanced_sampling_gives_each_class_its_half(tmp_path):
    rows = [{"text": f"t{n}", "label": int(n < 5)} for n in range(40)]
    a_task = task(written(tmp_path, rows), balanced_sampling=True, data=NO_EVALUATION)
    labels = a_task.train_dataset.labels[a_task.order(0, 4, 0)]
    assert labels.sum() == 20


@pytest.mark.parametrize(
    ("metric", "known"), [("f1_score", "accuracy, .*f1, auroc"), ("mae", "mcc")]
)
def test_a_best_metric_that_there_is_not_is_refused_before_training(tmp_path, metric, known):
    rows = [{"text": f"word {i}", "label": i % 2} for i in range(8)]
    with pytest.raises(ValueError, match=rf"task.best_metric '{metric}' is none of: .*{known}"):
        task(written(tmp_path / "r", rows), best_metric=metric)


def test_a_stream_is_refused_before_anything_is_read(binary):
    source = {"name": str(binary / "train.jsonl")}
    with pytest.raises(ValueError, match="text_classification reads no streams"):
        task("streaming", data={"sources": [source]})


# The small network


def test_networks_of_a_text_cnn_share_nothing_and_their_votes_are_averaged(binary):
    """In training a sample teaches one of them; in evaluation padding changes no vote."""
    a_task = task(binary, model={"name": "text_cnn", "members": 3, "width": 4, "dropout": 0.0})
    torch.manual_seed(0)
    model = a_task.model().eval()
    one, many = batch(a_task, [0]), batch(a_task, range(8))
    model.train().embedding_dropout.p = 0.0
    votes = torch.cat([model(**one["inputs"]) for _ in range(40)]).unique(dim=0)
    assert len(votes) == 3
    torch.testing.assert_close(votes.mean(0), model.eval()(**one["inputs"])[0])
    torch.testing.assert_close(model(**many["inputs"])[0], model(**one["inputs"])[0])

    a_task.loss(model.train(), one).backward()
    taught = model.embedding.weight.grad.view(-1, 3, 4).abs().amax((0, 2)) > 0
    assert taught.sum() == 1


def test_a_text_cnn_is_exported_with_all_that_builds_it_again(binary, tmp_path):
    a_task = task(binary, model={"name": "text_cnn", "members": 2, "width": 4})
    a_task.export(a_task.model(), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["model"]["members"] == 2
    assert described["id2label"] == {"0": "0", "1": "1"}
    assert (tmp_path / "tokenizer.json").exists()
    with pytest.raises(ValueError, match="odd number"):
        task(binary, model={"name": "text_cnn", "kernel_size": 2}).model()


# Whole runs


def test_a_task_can_be_sent_to_a_worker_process_however_it_is_started(binary):
    a_task = task(binary)
    sent = pickle.loads(pickle.dumps(a_task))
    assert torch.equal(sent.order(1, 4, 2), a_task.order(1, 4, 2))
    ours, theirs = batch(a_task, [1, 2]), batch(sent, [1, 2])
    assert torch.equal(ours["inputs"]["input_ids"], theirs["inputs"]["input_ids"])


def test_an_exported_model_answers_in_a_pipeline_as_it_did_here(tmp_path):
    from transformers import pipeline

    rows = [{"text": t, "label": label} for t, label in (("good film", "fine"), ("bad", "poor"))]
    a_task = task(written(tmp_path / "data", rows), data=NO_EVALUATION)
    torch.manual_seed(0)
    model = a_task.model().eval()
    model.classifier.weight.data *= 50  # so that the two texts differ
    (tmp_path / "final").mkdir()
    a_task.export(model, tmp_path / "final")
    expected = model(**batch(a_task, [0])["inputs"]).logits.softmax(1)[0].tolist()
    classify = pipeline("text-classification", model=str(tmp_path / "final"), top_k=None)
    (answer,) = classify(["good film"])
    scores = {row["label"]: row["score"] for row in answer}
    assert scores == pytest.approx(dict(zip(("fine", "poor"), expected, strict=True)), abs=1e-5)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_run_on_one_process_and_on_two(tmp_path, binary):
    """Pairs, of lengths that differ, grouped; and what a teacher knows: the curves and the weights
    agree to 1e-9."""
    draw = random.Random(1)
    rows = [
        {"sentence1": sentence(draw), "sentence2": sentence(draw, 6), "label": draw.random() * 5}
        for _ in range(37)
    ]
    run_config = {
        "task": raw_config(written(tmp_path / "data", rows, rows[:9])),
        "output_dir": str(tmp_path),
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "steps": 14,
        "precision": "fp64",
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "log_every": 1,
        "eval_every": 7,
        "tracking": {"with": []},
    }
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(run_config))
    finished(tmp_path / "teacher", binary)
    taught = {"teacher": {"name": str(tmp_path / "teacher")}, "class_weights": [1.0, 3.0]}
    run_config["task"] = raw_config(binary, model=CNN, label_smoothing=0.1, **taught)
    (tmp_path / "taught.yaml").write_text(yaml.safe_dump(run_config))
    for processes in (1, 2):
        names = {kind: f"name={kind}-{processes}" for kind in ("pairs", "taught")}
        lines = [json.dumps([str(tmp_path / f"{kind}.yaml"), name]) for kind, name in names.items()]
        (tmp_path / "runs.jsonl").write_text("\n".join(lines))
        script = ROOT / "tests" / "recipe_runs.py"
        arguments = command(processes, str(tmp_path / "runs.jsonl"), script=script)
        code, output = run(arguments, timeout=140)
        assert code == 0, output
    for kind in names:
        assert_same(tmp_path / f"{kind}-1", tmp_path / f"{kind}-2")


def assert_same(one, two):
    for row, same in zip(metrics(one), metrics(two), strict=True):
        assert row["train/loss"] == pytest.approx(same["train/loss"], abs=1e-9)
    for key, value in summary(one)["metrics"].items():
        assert value == pytest.approx(summary(two)["metrics"][key], abs=1e-9)
    weights, others = (load_file(folder / "final/model.safetensors") for folder in (one, two))
    for key, value in weights.items():
        torch.testing.assert_close(value, others[key], rtol=0, atol=1e-9)
