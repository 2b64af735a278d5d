"""Which files of a folder are the checkpoint, and what is said of damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_ext.files import checkpoint_entries, read_checkpoint

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"


def put(folder: Path, file: str, *names: str) -> Path:
    """Write a file with tensors of these names, of the value 1."""
    save_file({name: torch.ones(4) for name in names}, folder / file)
    return folder / file


def index(folder: Path, **weight_map: str) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    return path


def names(folder: Path) -> list[str]:
    return sorted(name for name, _ in read_checkpoint(folder))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_files_of_other_formats_are_left_out(is_sharded: bool, tmp_path: Path) -> None:
    put(tmp_path, "consolidated.safetensors", "tok_embeddings.weight")
    put(tmp_path, "consolidated-00001-of-00002.safetensors", "norm.weight")
    put(tmp_path, "adapter_model.safetensors", "base_model.model.q_proj.lora_A.weight")
    if is_sharded:
        put(tmp_path, "model-00001-of-00002.safetensors", "a")
        put(tmp_path, "model-00002-of-00002.safetensors", "b")
        one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
        index(tmp_path, a=one, b=two)
    else:
        put(tmp_path, "model.safetensors", "a", "b")
    assert names(tmp_path) == ["a", "b"]


def test_all_other_files_belong_to_the_checkpoint(tmp_path: Path) -> None:
    put(tmp_path, "model.safetensors", "a")
    put(tmp_path, "mtp.safetensors", "mtp.b")
    assert names(tmp_path) == ["a", "mtp.b"]


@pytest.mark.parametrize("file", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_a_folder_of_another_format_alone_is_read(file: str, tmp_path: Path) -> None:
    put(tmp_path, file, "a")
    assert names(tmp_path) == ["a"]


def test_a_damaged_file_is_named_with_its_cause(tmp_path: Path) -> None:
    put(tmp_path, "model-1.safetensors", "a")
    path = put(tmp_path, "model-2.safetensors", "b")
    content = path.read_bytes()
    for damaged, cause in (
        (content[:-3], r"not all of one \(77 bytes\)"),
        (content[:8] + b"\xff" + content[9:], "no safetensors file"),
        (content[:4], "no safetensors file"),
        (b"", "no safetensors file"),
        (POINTER, r"a Git LFS pointer, and not the file: run `git lfs pull`"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"model-2\.safetensors: .*{cause}"):
            names(tmp_path)


def test_a_damaged_file_that_the_index_names_is_named(tmp_path: Path) -> None:
    path = put(tmp_path, "model-1.safetensors", "a")
    index(tmp_path, a=path.name)
    assert checkpoint_entries(tmp_path) == [(path, "a")]
    path.write_bytes(POINTER)
    with pytest.raises(ValueError, match=r"model-1\.safetensors: a Git LFS pointer"):
        names(tmp_path)
    put(tmp_path, "model-1.safetensors", "other")
    with pytest.raises(ValueError, match=r"model-1\.safetensors: a: .*does not contain"):
        names(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors: .*names it"):
        names(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', POINTER.decode()],
)
def test_a_damaged_index_is_named(content: str, tmp_path: Path) -> None:
    index(tmp_path).write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: "):
        names(tmp_path)


def test_a_folder_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"Qwen/Qwen3-0.6B: .*snapshot_download\('Qwen/Q"):
        names(Path("Qwen/Qwen3-0.6B"))
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such folder$"):
        names(tmp_path / "nowhere")
    file = put(tmp_path, "model.safetensors", "a")
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: not a folder; give the"):
        names(file)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"no tensors in \*.safetensors$"):
        names(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"only pytorch_model\.bin, which is not read"):
        names(tmp_path)
