"""Differences in a log: folded to values with the checkpoint that they start from, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import save_file

from engine_ext.cli import log as cli
from engine_ext.format import Digest, ParamDelta, change_digest, encode_part
from engine_ext.log import (
    CannotFold,
    fold_versions,
    open_log,
    route,
)
from tests.support.served_models import PROPERTY
from tests.unit.log.places import decoded
from tests.unit.log.test_fold import (
    DTYPES,
    SIZES,
    Model,
    apply,
    dense,
    entry_of,
    model,
    same,
    sparse,
    write,
)

NOT_VERIFIED = "xxh3-128:" + "0" * 32  # a fold has no need of whole tensors' checksums
TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def checkpoint_of(weights: Model, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {
        name: torch.from_numpy(bits.copy()).view(TORCH[DTYPES[name][0]])
        for name, bits in weights.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def differences(
    name: str, old: np.ndarray, changes: dict[int, int], encoding: str
) -> tuple[ParamDelta, Digest]:
    """What leads from the old bit patterns to the changed ones, and the digest of the change."""
    new = sparse(name, changes)
    assert new.indices is not None
    was = old[new.indices]
    if encoding == "gap8_ulp":
        delta = replace(new, values=new.values - was, differences=True)
    else:
        cleared = was & 0x5555
        flips = (was & ~cleared) ^ new.values
        delta = replace(new, values=flips, cleared=cleared, new_checksum=NOT_VERIFIED)
    return delta, change_digest(name, new.indices, was, new.values)


def write_differences(
    log: Path,
    version: int,
    weights: Model,
    step: dict[str, dict[int, int]],
    encoding: str = "gap8_ulp",
) -> Path:
    """Write a version with one part per dtype."""
    groups: dict[str, list[ParamDelta]] = {}
    digests: dict[str, Digest] = {}
    for name, changes in step.items():
        delta, change = differences(name, weights[name], changes, encoding)
        groups.setdefault(delta.dtype, []).append(delta)
        digests[delta.dtype] = digests.get(delta.dtype, Digest.ZERO) + change
    parts = [(group, digests[dtype].hex()) for dtype, group in groups.items()]
    parts = parts or [([], Digest.ZERO.hex())]
    with open_log(log).writer() as writer:
        draft = writer.begin(version)
        for number, (group, digest) in enumerate(parts):
            draft.add(
                encode_part(
                    group,
                    encoding=encoding,
                    current_version=version,
                    base_version=version - 1,
                    sync_id=f"sync {version}",
                    part=number,
                    num_parts=len(parts),
                    digest_part=digest,
                )
            )
        return draft.finish()


def changed(weights: Model, step: dict[str, dict[int, int]]) -> Model:
    result = {name: bits.copy() for name, bits in weights.items()}
    for name, changes in step.items():
        for place, value in changes.items():
            result[name][place] = value
    return result


steps = st.dictionaries(
    st.sampled_from(sorted(SIZES)),
    st.dictionaries(st.integers(0, 4), st.integers(0, 65535), min_size=1, max_size=5),
    max_size=3,
)
kinds = st.sampled_from(["gap8_ulp", "gap8_xor", "values", "dense"])


@pytest.mark.slow
@given(st.lists(st.tuples(kinds, steps), min_size=1, max_size=5), st.data())
@settings(PROPERTY, max_examples=30)
def test_a_fold_does_what_its_versions_do(
    tmp_path_factory: pytest.TempPathFactory, chain: list[Any], data: st.DataObject
) -> None:
    """Over any stretch of a chain that mixes differences, flipped bits, values, dense tensors."""
    log = tmp_path_factory.mktemp("log")
    weights = [model()]
    for version, (kind, step) in enumerate(chain, 1):
        if kind.startswith("gap8"):
            write_differences(log, version, weights[-1], step, kind)
            weights.append(changed(weights[-1], step))
            continue
        weights.append(changed(weights[-1], step))
        deltas = [
            dense(name, weights[-1][name]) if kind == "dense" else sparse(name, changes)
            for name, changes in step.items()
        ]
        groups = [g for d in ("bfloat16", "float32") if (g := [x for x in deltas if x.dtype == d])]
        write(log, version, *(groups or [[]]))
    first = data.draw(st.integers(0, len(chain) - 1))
    last = data.draw(st.integers(first + 1, len(chain)))
    entries = open_log(log).listing().entries
    base = checkpoint_of(model(), tmp_path_factory.mktemp("base"))
    before = route([entry for entry in entries if entry.version <= first], 0)
    between = [entry for entry in entries if first < entry.version <= last]
    folder = fold_versions(open_log(log), between, first, checkpoint=base, before=before)
    assert not any(d.needs_old for p in decoded(entry_of(log, folder)) for d in p.deltas)
    assert same(apply(weights[first], log, [folder]), weights[last])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of three versions of differences."""
    weights = model()
    for version in (1, 2, 3):
        step = {"a": {version: 7 * version}, "c": {100: version}, "b": {1: version}}
        write_differences(tmp_path / "log", version, weights, step)
        weights = changed(weights, step)
    return tmp_path / "log"


def folded(log: Path, checkpoint: Path | None) -> Path:
    return fold_versions(
        open_log(log), route(open_log(log).listing().entries, 0), 0, checkpoint=checkpoint
    )


def test_without_a_checkpoint_there_is_no_fold(log: Path) -> None:
    with pytest.raises(CannotFold, match="--base"):
        folded(log, None)
    assert len(open_log(log).listing().entries) == 3


@pytest.mark.parametrize("wrong", ["values", "tensors", "shape"])
def test_another_checkpoint_is_found_out(log: Path, tmp_path: Path, wrong: str) -> None:
    weights = model()
    if wrong == "values":
        weights["c"][100] += 1
    elif wrong == "tensors":
        del weights["b"]
    else:
        weights["b"] = weights["b"][:4]
    base = checkpoint_of(weights, tmp_path / "base")
    with pytest.raises(CannotFold, match="base"):
        folded(log, base)
    assert len(open_log(log).listing().entries) == 3


def test_a_stretch_needs_the_versions_before_it(log: Path, tmp_path: Path) -> None:
    base = checkpoint_of(model(), tmp_path / "base")
    entries = open_log(log).listing().entries
    with pytest.raises(CannotFold, match="other values"):
        fold_versions(open_log(log), entries[1:], 1, checkpoint=base)
    fold_versions(open_log(log), entries[1:], 1, checkpoint=base, before=entries[:1])


def test_the_command(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = checkpoint_of(model(), tmp_path / "base")
    assert cli.main(["fold", str(log), "1", "3"]) == cli.DAMAGED
    assert "--base" in capsys.readouterr().err
    assert cli.main(["fold", str(log), "1", "3", "--base", str(base)]) == cli.OK
    assert "weight_v000003_from_v000001: folded 2 version(s)" in capsys.readouterr().out
    wrong = ["--base", str(base), "--base-version", "2"]
    assert cli.main(["fold", str(log), "1", "2", *wrong]) == cli.DAMAGED
    assert "does not lead from version 2 to 1" in capsys.readouterr().err
