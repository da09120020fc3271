"""Streams against what was put into their shards; processes are simulated by their turns."""

import json
import math
from collections import Counter
from itertools import islice
from types import SimpleNamespace

from evenstep import run_state
from evenstep.config import RunConfig
from evenstep.files import to_json
from evenstep.plan import Plan
from evenstep.run_state import RunState
from evenstep.stream_loader import Turns, stream_loader
from evenstep.stream_source import pieces
from evenstep.streams import Streams
from evenstep.task import Task

import pytest
import torch
from datasets import IterableDataset, load_dataset
from stream_task import numbers, samples_of

V, SIZE = 8, 3


def task(streams, **changes):
    return Task(
        model=torch.nn.Identity, train_dataset=streams, eval_dataset=None, collate=list,
        count=len, loss=None, score=None, summarize=None, best_metric="", **changes,
    )  # fmt: skip


def turns(given, processes, rank, steps, states):
    plan = Plan(None, global_batch_size=V * SIZE, micro_batch_size=SIZE, seed=5)
    own = {n: state for n, state in states.items() if int(n) % processes == rank}
    collate = lambda samples: (len(samples), samples)  # noqa: E731
    return Turns(given, plan, range(rank, V, processes), steps, own, collate)


def train(given, processes, steps, states=None, workers=0):
    """The samples of each (step, micro-batch number), and the states that a checkpoint holds."""
    seen, after = {}, {}
    for rank in range(processes):
        own = {}
        loader = stream_loader(
            turns(given, processes, rank, steps, states or {}),
            own,
            torch.device("cpu"),
            num_workers=workers,
        )
        for step in steps:
            for number in range(rank, V, processes):
                _, seen[step, number] = next(loader)
        after |= own
    return seen, json.loads(json.dumps(after))


def two_sources(shards, rows=100):
    return Streams(
        [numbers(rows, shards), numbers(30, 1, first=1000)],
        weights=[0.8, 0.2],
        transform=samples_of,
        shuffle_buffer=16,
    )


@pytest.mark.parametrize("shards", [1, 3, 7, 64])
def test_any_processes_and_any_stop_see_the_same_samples(shards):
    """1, 2, 4 processes and stops in the middle of blocks and epochs, on other processes."""
    given = task(two_sources(shards))
    reference, states = train(given, 1, range(1, 14))
    places = [source for state in states.values() for source in state["sources"]]
    assert any(place["epoch"] for place in places)
    assert any(place["taken"] for place in places)
    for processes in (2, 4):
        assert train(given, processes, range(1, 14)) == (reference, states)
    seen, states_1 = train(given, 4, range(1, 4))
    more, states_2 = train(given, 1, range(4, 9), states_1)
    last, states_3 = train(given, 2, range(9, 14), states_2)
    assert (seen | more | last, states_3) == (reference, states)


def test_workers_change_nothing_and_what_they_read_ahead_is_not_in_the_state():
    draws = task(two_sources(3), augment=lambda number: number + torch.rand(()).item())
    reference, states = train(draws, 2, range(1, 6))
    for workers in (1, 3):  # of 3, 2 can share the 4 streams of a process
        assert train(draws, 2, range(1, 6), workers=workers) == (reference, states)
    resumed, _ = train(draws, 4, range(4, 6), train(draws, 1, range(1, 4), workers=2)[1], workers=2)
    assert resumed == {key: value for key, value in reference.items() if key[0] > 3}


def first_epoch(streams, num_streams):
    """The samples of each stream's first epoch."""
    found = []
    for stream in streams.open(range(num_streams), num_streams, 0, {}):
        found.append([])
        sample = stream.draw()
        while stream.state()["sources"][0]["epoch"] == 0:
            found[-1].append(sample)
            sample = stream.draw()
    return found


@pytest.mark.parametrize("num_streams", [4, 8])
@pytest.mark.parametrize("shards", [1, 3, 7, 64])
def test_each_row_comes_once_an_epoch_and_streams_are_even(shards, num_streams):
    epoch = first_epoch(Streams([numbers(1000, shards)], shuffle_buffer=50), num_streams)
    drawn = [row["number"] for stream in epoch for row in stream]
    assert sorted(drawn) == list(range(1000))
    assert drawn != list(range(1000))
    sizes = [len(stream) for stream in epoch]
    assert max(sizes) - min(sizes) <= 7  # of 125 or 250; a shard has up to 334


def test_every_epoch_has_another_order():
    stream = Streams([numbers(20, 1)], shuffle_buffer=100).open([0], 1, 0, {})[0]
    first, second = ([stream.draw()["number"] for _ in range(20)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_a_buffer_of_one_keeps_the_order_within_a_shard():
    stream = Streams([numbers(20, 1)], shuffle_buffer=1).open([0], 1, 0, {})[0]
    assert [stream.draw()["number"] for _ in range(20)] == list(range(20))


@pytest.mark.parametrize("num_streams", [1, 4, 6, 8])
def test_pieces_of_shards_add_up(num_streams):
    for shards in range(1, 200):
        each = [pieces(shards, number, num_streams) for number in range(num_streams)]
        whole = Counter()
        for piece in (piece for own in each for piece in own):
            whole[piece.shard] += 1 / piece.parts
        assert len(whole) == shards
        assert all(abs(total - 1) < 1e-9 for total in whole.values())
        loads = [sum(1 / piece.parts for piece in own) for own in each]
        assert max(loads) - min(loads) <= max(loads) / 10 + 1e-9


def test_sources_come_in_proportion_to_their_weights():
    mixed = Streams(
        [numbers(300, 3), numbers(500, 4, first=1000), numbers(100, 1, first=2000)],
        weights=[5, 3, 2],
    )
    drawn = Counter(
        stream.draw()["number"] // 1000
        for stream in mixed.open(range(4), 4, 0, {})
        for _ in range(1000)
    )
    # 4000 draws: a standard deviation is 32 or less.
    assert all(abs(drawn[source] - share) < 100 for source, share in enumerate([2000, 1200, 800]))


def test_streams_differ_in_what_they_draw_from_one_source():
    streams = Streams([numbers(8, 1), numbers(8, 1)], weights=[1, 1]).open(range(2), 2, 0, {})
    first, second = ([stream.draw()["number"] for _ in range(8)] for stream in streams)
    assert first != second


def counted_rows(files, counter):
    def count(row):
        counter[0] += 1
        return row

    source = load_dataset("parquet", data_files=files, split="train", streaming=True)
    return source.map(count)


@pytest.mark.parametrize("num_streams", [1, 4])
def test_a_resume_reads_a_block_and_its_row_group_and_nothing_before(tmp_path, num_streams):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"number": list(range(10_000))})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=100)
    counter = [0]
    streams = Streams([counted_rows([str(tmp_path / "0.parquet")], counter)], shuffle_buffer=64)
    stream = streams.open([0], num_streams, 0, {})[0]
    for _ in range(2000):
        stream.draw()
    expected_state = json.loads(json.dumps(stream.state()))
    expected = [stream.draw() for _ in range(10)]
    counter[0] = 0
    (resumed,) = streams.open([0], num_streams, 0, {"0": expected_state})
    assert [resumed.draw() for _ in range(10)] == expected
    assert counter[0] <= 100 + 2 * 64  # the row group, and the block read in batches


def test_fewer_rows_than_streams_are_an_error_and_no_hang():
    *streams, last = Streams([numbers(3, 1)]).open(range(4), 4, 0, {})
    assert all(stream.draw() for stream in streams)
    with pytest.raises(RuntimeError, match="stream 3 has no samples of source 0"):
        last.draw()


def test_a_source_without_samples_is_an_error_before_the_mixture_comes_to_it():
    streams = Streams([numbers(100, 1), numbers(1, 1)], weights=[1.0, 1e-12])
    *_, last = streams.open(range(2), 2, 0, {})
    with pytest.raises(RuntimeError, match="stream 1 has no samples of source 1"):
        last.draw()


def test_a_transformation_that_drops_all_is_an_error_and_no_hang():
    (stream,) = Streams([numbers(30, 1)], transform=lambda rows: []).open([0], 1, 0, {})
    with pytest.raises(RuntimeError, match="dropped by the transformation"):
        stream.draw()


def test_what_is_wrong_in_a_row_names_the_micro_batch():
    def refuse(number):
        raise ValueError("no such number")

    with pytest.raises(RuntimeError, match="micro-batch 0 of step 1: no such number"):
        next(iter(turns(task(two_sources(3), augment=refuse), 1, 0, range(1, 2), {})))


def test_any_iterable_dataset_is_a_source():
    def read(files):
        for file in files:
            yield from ({"number": 10 * file + i} for i in range(10))

    source = IterableDataset.from_generator(read, gen_kwargs={"files": list(range(8))})
    even = source.filter(lambda row: row["number"] % 2 == 0).map(lambda row: {"half": 5})
    epoch = first_epoch(Streams([even], shuffle_buffer=7), 4)
    assert sorted(row["number"] for stream in epoch for row in stream) == list(range(0, 80, 2))
    assert {len(stream) for stream in epoch} == {10}


def test_what_cannot_be_resumed_or_weighed_is_refused():
    with pytest.raises(ValueError, match="unshuffled"):
        Streams([numbers(10, 2).shuffle(seed=0).map(lambda row: row)])
    with pytest.raises(ValueError, match="weight above 0"):
        Streams([numbers(10, 2)], weights=[1, 2])
    with pytest.raises(ValueError, match="weight above 0"):
        Streams([numbers(10, 2)], weights=[0])


def config(**changes):
    return RunConfig(task={}, global_batch_size=8, micro_batch_size=2, **changes)


def test_a_run_on_streams_counts_steps_and_a_tenth_of_it_stands_for_an_epoch():
    steps = config(steps=1000, save_every="2 epochs").in_steps(math.inf)
    assert (steps.last, steps.eval_every, steps.save_every) == (1000, 100, 200)
    with pytest.raises(ValueError, match="epochs: 2, but the training data is a stream"):
        config(epochs=2).in_steps(math.inf)


def test_the_first_rows_come_from_all_sources():
    rows = Streams([numbers(10, 2), numbers(10, 1, first=100)], weights=[1, 1]).first_rows(5)
    assert [row["number"] for row in rows] == [0, 1, 2, 100, 101]


def test_a_stream_does_not_end():
    (stream,) = Streams([numbers(3, 1)]).open([0], 1, 0, {})
    drawn = [row["number"] for row in islice(iter(stream.draw, None), 300)]
    assert Counter(drawn) == {0: 100, 1: 100, 2: 100}


def test_a_save_in_the_background_holds_the_streams_as_they_were_at_its_step(monkeypatch):
    """On one process nothing is sent, and so nothing copied: what is drawn while the checkpoint is
    written would be in it."""
    monkeypatch.setattr(run_state, "to_yaml", lambda config: "")
    kept = {}
    saver = SimpleNamespace(save=lambda step, tensors, **given: kept.update(given))
    strategy = SimpleNamespace(tensors=lambda average: None)
    learner = SimpleNamespace(strategy=strategy, average=None, numbers=dict)
    state = RunState(step=4, streams={"0": {"count": 8}})
    run_state.save(state, learner, None, saver, SimpleNamespace(gather=lambda value: [value]))
    state.streams["0"] = {"count": 10}
    assert json.loads(to_json(kept["state"]))["streams"] == {"0": {"count": 8}}
