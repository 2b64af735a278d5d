"""`DeltaSyncCallback` in the real `transformers.Trainer`, against an engine in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from delta_sender import SyncError, named_tensors
from delta_sender.integrations.transformers_callback import DeltaSyncCallback
from tests.support.fake_engine import Engine, error, sends
from tests.support.gloo_ranks import run_ranks
from tests.support.trainer_models import Tensors, make_model, save, saved


def trainer_of(
    model: Any, callback: DeltaSyncCallback, folder: Path, steps: int = 4, **arguments: Any
) -> transformers.Trainer:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 60, (16, 8), generator=generator)
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    )


def weights(model: Any) -> Tensors:
    return {name: tensor.to(torch.bfloat16) for name, tensor in saved(model).items()}


@pytest.mark.parametrize("kind", ["tied", "qwen3_moe"])
def test_an_engine_follows_the_training(kind: str, tmp_path: Path) -> None:
    base = make_model(kind)
    folder = save(base, tmp_path / "base")
    engine = Engine.of(weights(base))
    model = type(base).from_pretrained(folder, dtype=torch.float32)
    callback = DeltaSyncCallback("http://engine", client=engine.client())
    trainer = trainer_of(model, callback, tmp_path)
    trainer.train()
    assert not engine.holds(weights(base))
    assert engine.holds(weights(model))
    assert engine.version == 5
    (report,) = callback.reports.values()
    assert (report.version, report.full) == (5, False)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["delta/version"] for entry in logged] == [2, 3, 4, 5]
    assert all(0 < entry["delta/density"] <= 1 for entry in logged)
    names = {"delta/bytes", "delta/seconds", "delta/pause_ms"}
    assert all(names <= entry.keys() for entry in logged)


def test_only_some_steps_and_the_last(tmp_path: Path) -> None:
    model = make_model("dense")
    engine = Engine.of(weights(model))
    callback = DeltaSyncCallback(
        "http://engine", every=3, dtype=torch.bfloat16, client=engine.client()
    )
    trainer_of(model, callback, tmp_path, steps=7).train()
    assert engine.version == 4  # at the beginning, after steps 3, 6 and 7
    assert engine.holds(weights(model))


def test_adapters_are_merged(tmp_path: Path) -> None:
    base = make_model("dense")
    engine = Engine.of(weights(base))
    model = peft.get_peft_model(make_model("dense"), peft.LoraConfig(target_modules=["q_proj"]))
    callback = DeltaSyncCallback("http://engine", saved(base), client=engine.client())
    trainer_of(model, callback, tmp_path).train()
    (report,) = callback.reports.values()
    assert not report.full
    assert engine.holds(weights(model.merge_and_unload()))


def test_another_base_is_found_before_training(tmp_path: Path) -> None:
    model = make_model("dense")
    before = weights(model)
    engine = Engine.of(before)
    other = {**saved(model), "another": torch.ones(1)}
    callback = DeltaSyncCallback("http://engine", other, client=engine.client())
    with pytest.raises(ValueError, match="another: in the base, but not in the model"):
        trainer_of(model, callback, tmp_path).train()
    assert engine.version == 0
    assert all(torch.equal(t, before[name]) for name, t in weights(model).items())


def test_a_refusal_ends_the_training(tmp_path: Path) -> None:
    model = make_model("dense")
    engine = Engine.of(weights(model))
    engine.faults[2] = sends(error(507, "SpoolFull"))
    callback = DeltaSyncCallback("http://engine", saved(model), client=engine.client())
    trainer = trainer_of(model, callback, tmp_path)
    with pytest.raises(SyncError, match="507"):
        trainer.train()
    assert (trainer.state.global_step, engine.version) == (2, 2)


def test_every_is_checked() -> None:
    with pytest.raises(ValueError, match="every is 0"):
        DeltaSyncCallback("http://engine", every=0)


def train_on_a_rank(rank: int, folder: str, refused: bool) -> str:
    model = make_model("dense")
    engine = Engine.of(dict(named_tensors(model)))
    if refused:
        engine.faults[2] = sends(error(507, "SpoolFull"))
    base = dict(named_tensors(model)) if not rank else None
    callback = DeltaSyncCallback("http://engine", base, client=engine.client())
    trainer = trainer_of(model, callback, Path(folder) / str(rank))
    assert trainer.args.world_size == 2
    trainer.train()
    assert engine.version == (0 if rank else 5)
    assert engine.holds(dict(named_tensors(model))) == (not rank)
    return "trained"


def test_the_main_process_of_several_sends(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    assert run_ranks(train_on_a_rank, 2, tmp_path, str(folder), False) == ["trained"] * 2


def test_a_refusal_ends_the_training_on_all_ranks(tmp_path: Path) -> None:
    outcomes = run_ranks(train_on_a_rank, 2, tmp_path, str(tmp_path / "runs"), True)
    assert "507" in outcomes[0]
    assert outcomes[1] == "RuntimeError: the sync failed on rank 0; see the error there"


def train_without_a_log(rank: int, folder: str) -> str:
    model = make_model("dense")
    engine = Engine.of(dict(named_tensors(model)))
    callback = DeltaSyncCallback(
        "http://engine", client=engine.client(), delta_log=Path(folder) / "missing" / "log"
    )
    trainer_of(model, callback, Path(folder) / str(rank)).train()
    return "trained"


def test_failed_sender_creation_ends_training_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "missing").write_text("a file, not a folder")
    outcomes = run_ranks(train_without_a_log, 2, tmp_path, str(tmp_path))
    assert "NotADirectoryError" in outcomes[0]
    assert outcomes[1] == "RuntimeError: the sync failed on rank 0; see the error there"
