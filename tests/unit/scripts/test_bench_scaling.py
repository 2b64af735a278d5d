"""The model of whole syncs: its limits, its memory, and the measurements on little data."""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from safetensors import safe_open

from delta_sender.diff.host import compare
from engine_ext.format import ParamDelta, decode_part, encode_part
from engine_ext.sync import StagedPart
from scripts.bench import synthetic_weights
from scripts.bench.scaling import (
    __main__,
    check,
    measure,
    measure_http,
    measure_one_host,
    measure_rank,
    measure_sender,
    measure_waiting,
    report,
    timing,
)
from scripts.bench.scaling.constants import Constants
from scripts.bench.scaling.encodings import ENCODINGS, gap_bytes
from scripts.bench.scaling.memory import memory
from scripts.bench.scaling.model import (
    Prediction,
    encode_cpu,
    follow,
    part_bytes,
    part_times,
    predict,
    staging_alone,
)
from scripts.bench.scaling.sender_process import Sync
from scripts.bench.scaling.setups import MODELS, Model, Setup
from scripts.process_memory import peak_of, reset_peak

pytestmark = pytest.mark.slow

COSTS = Constants(
    machine="a CPU",
    engine="vllm",
    density=0.02,
    diff_ns=0.3,
    change_ns=6,
    digest_ns=3,
    refresh_ns=6,
    snapshot_digest_ns=1,
    send_ns=0.5,
    receive_ns=1.2,
    hash_ns=0.03,
    loopback_ns=4,
    stage_own_ns=18,
    stage_other_ns=3,
    locate_own_ns=4,
    locate_other_ns=3,
    read_ns=8,
    check_ns=8,
    scatter_ns=8,
    finish_ns=0.2,
    sender_param_ns=4e4,
    rank_param_ns=4e4,
    commit_param_ns=7e3,
    waiting_share=0.5,
    one_host_speed=1.0,
    part_s=0.01,
    sync_s=0.05,
    pause_s=0.03,
    alone_part_s=0.008,
    alone_sync_s=0.04,
    alone_pause_s=0.02,
    change_bytes=9,
    encode_bytes=7,
    decode_bytes=13,
    staged_bytes=8,
    undo_bytes=6,
    encode_ns={"gap8_exp": 6.5, "gap8_ulp": 6},
    alone_ns={"gap8_exp": 13, "gap8_ulp": 12},
    decode_ns={"gap8_exp": 4, "gap8_ulp": 3.8},
    value_bytes={"gap8_exp": 1.33, "gap8_ulp": 0.23},
    part_cpu={"sender": 0.002, "server": 0.003, "rank": 0.004},
    alone_part_cpu={"sender": 0.002, "server": 0.002, "rank": 0.001},
)
SETUP = Setup(MODELS[0], 0.02, "gap8_ulp")


def of(**changes: object) -> Prediction:
    return predict(dataclasses.replace(SETUP, **changes), COSTS)  # type: ignore[arg-type]


def test_constants_are_kept_in_a_file(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "constants.json")
    assert Constants.load(tmp_path / "constants.json") == COSTS
    (tmp_path / "other.json").write_text('{"diff_ns": 1}')
    with pytest.raises(ValueError, match="measure them again"):
        Constants.load(tmp_path / "other.json")


def test_a_slow_link_bounds_the_sync_and_a_fast_one_does_not() -> None:
    slow, fast = of(link_gbit=0.1), of(link_gbit=1e9)
    assert slow.bound == "link"
    assert slow.seconds == pytest.approx(slow.wire_bytes / (0.1e9 / 8), rel=0.05)
    assert fast.bound != "link"
    assert fast.stages["link"] < 1e-6


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("link_gbit", (400.0, 100.0, 10.0, 1.0)),
        ("density", (0.006, 0.02, 0.03)),
        ("engines", (1, 4, 16, 64)),
        ("posts_in_flight", (8, 4, 2, 1)),
        ("engine_cores", (96, 48, 8, 1)),
        ("http_processes", (4, 2, 1)),
        ("rank_threads", (16, 4, 1)),
        ("decode_once", (True, False)),
        ("model", MODELS),
        ("trainer_cores", (128, 32, 2)),
    ],
)
@pytest.mark.parametrize("link", [1.0, 1000.0])
def test_less_of_anything_is_not_faster(what: str, values: tuple[object, ...], link: float) -> None:
    times = [of(**{"link_gbit": link, what: value}).seconds for value in values]
    assert times == sorted(times)


def test_one_post_in_flight_is_the_serial_formula() -> None:
    """With cores for everything, a part waits for the post before it, or for its own encoding."""
    setup = dataclasses.replace(SETUP, posts_in_flight=1, trainer_cores=10**6, engine_cores=10**6)
    times, found = part_times(setup, COSTS), predict(setup, COSTS)
    transfer = max(times["send"], times["link"], times["receive"])
    post = transfer + staging_alone(setup, COSTS) + COSTS.part_s
    tail = COSTS.sync_s + found.stages["commit"] + found.stages["refresh"]
    first = setup.first_share * (times["diff"] + times["tensors"] + encode_cpu(setup, COSTS) / 2)
    assert found.bound == "posts"
    assert found.seconds == pytest.approx(first + setup.parts * post + tail)


def test_the_last_part_is_posted_alone() -> None:
    setup = dataclasses.replace(SETUP, posts_in_flight=64)
    found = predict(setup, COSTS)
    alone = staging_alone(setup, COSTS) + COSTS.part_s
    assert found.seconds > found.stages[found.bound] + alone


def test_work_on_one_host_takes_its_cores() -> None:
    setup = dataclasses.replace(
        SETUP, one_host=True, trainer_cores=2, ranks=2, rank_threads=1, encoders=1
    )
    found = predict(setup, COSTS)
    work = found.cpu["sender"] + found.cpu["server"] + 2 * found.cpu["rank"]
    assert found.bound == "cores"
    assert found.stages["link"] == 0
    assert work / 2 < found.seconds < work


def test_threads_that_wait_take_their_share_of_the_cores() -> None:
    setup = dataclasses.replace(SETUP, one_host=True, ranks=2, trainer_cores=2, rank_threads=1)
    half = predict(dataclasses.replace(setup, waiting=1), COSTS)
    whole = predict(dataclasses.replace(setup, waiting=2), COSTS)
    assert half.seconds < whole.seconds < predict(setup, COSTS).seconds / COSTS.waiting_share
    assert whole.stages["diff"] == predict(setup, COSTS).stages["diff"] / COSTS.waiting_share
    assert whole.pause_s == half.pause_s


def test_a_sync_on_one_host_is_as_fast_as_one_that_was_measured() -> None:
    setup = dataclasses.replace(SETUP, one_host=True, ranks=2, trainer_cores=2, rank_threads=1)
    said = predict(setup, COSTS)
    assert measure_one_host.speed(said, 0.9 * said.seconds) == 1
    for slower in (1.0, 1.6):
        speed = measure_one_host.speed(said, slower * said.seconds)
        costs = dataclasses.replace(COSTS, one_host_speed=speed)
        assert predict(setup, costs).seconds == pytest.approx(slower * said.seconds)
        assert predict(setup, costs).pause_s == said.pause_s
        # Nothing is lost where they have hosts of their own.
        assert predict(SETUP, costs) == predict(SETUP, COSTS)


def test_waiting_threads_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_waiting, "_TENSORS", 2)
    [share] = measure_waiting.measure(0.02, 1).values()
    assert 0 < share <= 1


def test_one_rank_has_costs_of_its_own() -> None:
    setup = dataclasses.replace(SETUP, ranks=1)
    found = predict(setup, COSTS)
    elements = setup.nnz * COSTS.alone_ns["gap8_ulp"]
    assert found.cpu["rank"] == pytest.approx(
        (elements + setup.model.tensors * COSTS.rank_param_ns) * 1e-9
        + setup.parts * COSTS.alone_part_cpu["rank"]
    )
    assert found.pause_s == COSTS.alone_pause_s + found.stages["commit"]


@pytest.mark.parametrize("model", MODELS)
def test_parts_fit_their_bucket(model: Model) -> None:
    setup = dataclasses.replace(SETUP, model=model)
    assert setup.parts * setup.part_nnz == pytest.approx(setup.nnz)
    assert setup.part_nnz * 3 <= setup.bucket_bytes
    assert part_bytes(setup, COSTS) < setup.bucket_bytes
    largest = setup.largest_share * setup.part_nnz * 3
    assert largest == pytest.approx(setup.bucket_bytes, rel=1e-6)
    assert setup.first_share * setup.part_nnz * 3 == pytest.approx(8 << 20, rel=1e-6)


@pytest.mark.parametrize("mebibytes", [1, 8, 9, 28, 60, 90, 500])
@pytest.mark.parametrize("most", [1, 8, 24, 64])
def test_the_first_parts_are_smaller(mebibytes: int, most: int) -> None:
    # A little less, as a part has whole elements.
    model = Model("some", 50 * ((mebibytes << 20) / 3 - 500), 1)
    setup = dataclasses.replace(SETUP, model=model, bucket_bytes=most << 20)
    left, sizes = mebibytes, list[int]()
    while left > 0:
        sizes.append(min(left, most, 8 << len(sizes)))
        left -= sizes[-1]
    assert setup.parts == len(sizes)
    mean = sum(sizes) / len(sizes)
    assert setup.first_share * mean == pytest.approx(sizes[0], rel=0.01)
    assert setup.largest_share * mean == pytest.approx(max(sizes), rel=0.01)
    said, whole = memory(setup, COSTS), predict(setup, COSTS).wire_bytes
    assert said.spool <= whole
    assert said.parts <= whole + setup.nnz * COSTS.encode_bytes


@pytest.mark.parametrize("link", [1.0, 100.0])
def test_who_follows_a_log_costs_the_trainer_nothing(link: float) -> None:
    setup = Setup(MODELS[0], 0.02, "gap8_exp", link_gbit=link)
    one, many = (follow(dataclasses.replace(setup, engines=count), COSTS) for count in (1, 1000))
    assert one == many == follow(dataclasses.replace(setup, http_processes=4), COSTS)
    pushed = predict(setup, COSTS)
    assert one.egress_bytes == pytest.approx(pushed.wire_bytes)
    # Staging begins when all of the version is there.
    assert one.published_s + one.followed_s > pushed.seconds - pushed.stages["refresh"] - 1
    assert one.followed_s > pushed.pause_s


def test_more_trainer_hosts_share_the_memory() -> None:
    one = memory(SETUP, COSTS)
    eight = memory(dataclasses.replace(SETUP, trainer_hosts=8), COSTS)
    assert eight.snapshot == one.snapshot / 8
    assert eight.changes == one.changes / 8
    assert eight.rank == pytest.approx(one.rank)
    assert one.snapshot == MODELS[0].nbytes


@pytest.mark.parametrize("ranks", measure_rank.SHARES)
def test_memory_is_that_of_what_is_kept(ranks: int) -> None:
    """The formulas, with the constants' usual values, against the arrays of a real sync."""
    rows, columns = 256, measure_rank.WIDTH
    old = synthetic_weights.make_weights(3 * rows * columns, np.random.default_rng(0))
    new = synthetic_weights.change(old, 0.02, np.random.default_rng(1))
    tensors, deltas, kept = {}, [], 0
    for number in range(3):
        name, part = f"model.{number}.weight", slice(number * rows * columns, None)
        before, after = old[part][: rows * columns], new[part][: rows * columns]
        tensors[name] = (
            torch.from_numpy(before.view(np.int16)).view(torch.bfloat16).view(rows, columns)
        )
        found = compare(before, after, streams=True)
        assert found.stream is not None
        arrays = (found.indices, found.old, found.new, found.stream)
        kept += sum(array.nbytes for array in arrays)
        deltas.append(ParamDelta(name, "bfloat16", (rows, columns), found.indices, found.new))
    rank = measure_rank.Rank.of(tensors, ranks)
    part = decode_part(encode_part(deltas, encoding="gap8_exp", current_version=1))
    staged: list[StagedPart] = [rank.applier.stage(part)]
    rank.applier.write(staged)
    log = rank.applier.finish(staged)

    nnz = sum(delta.nnz for delta in deltas)
    setup = Setup(Model("small", old.size, 3), nnz / old.size, "gap8_exp", ranks=ranks)
    said = memory(setup, COSTS)
    assert said.changes == pytest.approx(kept, rel=0.01)
    assert said.staged == pytest.approx(measure_rank.staged_bytes(staged[0]), rel=0.05)
    assert said.undo == pytest.approx(measure_rank.undo_bytes(log), rel=0.05)
    assert measure_rank.own_elements(staged[0]) == pytest.approx(nnz / ranks, rel=0.05)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_sizes_on_the_wire_follow_the_density(encoding: str) -> None:
    """Values are measured at one density; at others only the gaps' entropy changes."""
    old = synthetic_weights.make_weights(1 << 23, np.random.default_rng(0))
    for density in (0.006, 0.02, 0.03):
        new = synthetic_weights.change(old, density, np.random.default_rng(1))
        found = compare(old, new, streams=True)
        deltas = measure_sender.deltas_of([found], encoding)
        body = encode_part(deltas, encoding=encoding, current_version=1, digest_part="0" * 32)
        expected = gap_bytes(density) + COSTS.value_bytes[encoding]
        assert len(body) / found.indices.size == pytest.approx(expected, rel=0.03)


def test_free_pages_are_written_and_given_back() -> None:
    timing.write_free_pages(mmap.PAGESIZE)
    process, before = psutil.Process(), reset_peak()
    timing.write_free_pages(64 << 20)
    assert peak_of(process.pid) > before + (48 << 20)
    assert process.memory_info().rss < before + (16 << 20)


def test_measurements_on_little_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_weights, "PARAM", 1 << 20)
    monkeypatch.setattr(timing, "_LARGE", 1 << 20)
    old = synthetic_weights.make_weights(3 << 20, np.random.default_rng(0))
    new = synthetic_weights.change(old, 0.02, np.random.default_rng(1))
    found = {
        **measure_sender.encoding(old, new, 0.02, 1),
        **measure_rank.decoding(old, new, 1),
        **measure_sender.measure(old, new, 1),
        **measure.working_bytes(old, new),
        **measure_rank.measure(old, new, 1),
        **measure_rank.alone(old, new, 1),
    }
    assert found["change_bytes"] == pytest.approx(COSTS.change_bytes, rel=0.01)
    assert found["staged_bytes"] == COSTS.staged_bytes
    assert found["undo_bytes"] == COSTS.undo_bytes
    known = {each.name for each in dataclasses.fields(Constants)}
    assert known - found.keys() == {
        *("machine", "engine", "density", "send_ns", "receive_ns", "hash_ns", "loopback_ns"),
        *("part_s", "sync_s", "pause_s", "alone_part_s", "alone_sync_s", "alone_pause_s"),
        *("part_cpu", "alone_part_cpu", "waiting_share", "one_host_speed"),
    }
    assert found.keys() <= known


def test_posts_to_the_real_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_http, "_PART", 1 << 20)
    monkeypatch.setattr(measure_http, "_SMALL_POSTS", 2)
    found = measure_http.measure(1)
    assert found.keys() == {"send_ns", "receive_ns", "loopback_ns", "hash_ns"}
    assert found["hash_ns"] > 0


def test_every_table_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    COSTS.save(tmp_path / "constants.json")
    assert __main__.main(["model", "--constants", str(tmp_path / "constants.json")]) == 0
    shown = capsys.readouterr().out
    assert all(model.name in shown for model in MODELS)
    assert len(list(report.tables([SETUP], COSTS))) == 5


def test_constants_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["model", "--constants", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_a_check_counts_the_elements_of_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**check.SIZES["0.1B"], "vocab_size": 384, "hidden_size": 128, "num_hidden_layers": 2}
    monkeypatch.setitem(check.SIZES, "0.1B", small)
    check.write_checkpoint("0.1B", tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    assert check.elements(small) == sum(int(np.prod(shape)) for shape in shapes)


def test_the_sizes_of_a_check() -> None:
    sizes = [check.elements(sizes) / 1e9 for sizes in check.SIZES.values()]
    assert sizes == pytest.approx([0.1, 0.5, 1.5], rel=0.05)
    assert check.BETWEEN not in check.SIZES
    assert check.elements(check.sizes_of(check.BETWEEN)) == pytest.approx(0.8e9, rel=0.05)


def test_a_check_without_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "free_gib", lambda: 1.0)
    with pytest.raises(MemoryError, match="GiB of free memory"):
        check.check(
            "1.5B",
            tmp_path,
            engine="vllm",
            density=0.02,
            syncs=1,
            ranks=2,
            posts_in_flight=1,
            encoding="gap8_ulp",
            step=lambda name: None,
        )


def test_a_check_shows_both_figures() -> None:
    setup = dataclasses.replace(SETUP, one_host=True, ranks=2, trainer_cores=2)
    names = ("sender", "server", "rank 0", "rank 1")
    sync = Sync(
        seconds=1.0,
        nnz=1,
        parts=3,
        wire_bytes=7,
        digest=None,
        timings_ms={"pause_ms": 40.0},
        others=0.5,
        cpu=dict.fromkeys(names, 0.5),
        resident=dict.fromkeys(names, 1 << 30),
        peak=dict.fromkeys(names, 1 << 20),
    )
    # Each time is the least of all syncs by itself, not that of the fastest one.
    slower = msgspec.structs.replace(
        sync, seconds=2.0, timings_ms={"pause_ms": 30.0}, cpu=dict.fromkeys(names, 0.25)
    )
    checked = check.Checked(setup, 1 << 20, [slower, sync], [])
    rows = {what: (measured, said) for what, measured, said in checked.rows(COSTS)}
    said = predict(setup, COSTS)
    assert checked.others == 0.5
    beside_others = predict(dataclasses.replace(setup, taken=0.5), COSTS)
    assert rows["sync, s"] == (1.0, beside_others.seconds)
    assert beside_others.seconds > said.seconds
    assert rows["generation paused, s"] == (0.03, said.pause_s)
    assert rows["sender, CPU s"] == (0.25, said.cpu["sender"])
    assert rows["rank staging, CPU s"] == (0.25, said.cpu["rank"])
    assert rows["rank, peak memory"][0] == (1 << 30) + (1 << 20)
    assert __main__.check_table(checked, COSTS).row_count == len(rows)
