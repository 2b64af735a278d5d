"""The reader reads the same deltas as the engine tests' trainer writes by its own encoder."""

from __future__ import annotations

import numpy as np
import torch

from engine_ext.format import ENCODINGS, FrameReader, decode_part
from engine_ext.format.digest import Digest, tensor_digest
from tests.support.cases import in_one_test
from tests.support.plain_trainer import Trainer, bits, container

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8]


@in_one_test("encoding", ENCODINGS)
@in_one_test("dtype", DTYPES)
def test_the_readers_deltas_are_the_trainers(encoding: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [(1,), (7, 300), (4, 200), (100_000,)]
    trainer = Trainer(
        {f"w{k}": torch.randn(size, generator=generator).to(dtype) for k, size in enumerate(sizes)}
    )
    changed: dict[str, torch.Tensor | None] = {**trainer.step(0.01)}
    # Gaps that need skips, in symbols of one byte and of two, and large differences.
    narrow, wide = torch.tensor([3, 300, 301, 700]), torch.tensor([5, 6, 90_000])
    changed.update(w2=narrow, w3=wide)
    trainer.tensors["w3"].view(-1)[wide] = torch.tensor([-2.0, 1.0, 3.0]).to(dtype)
    if encoding != "gap8_ulp":
        changed["w0"] = None
    body = container(
        trainer.tensors,
        changed,
        encoding=encoding,
        metadata=trainer.metadata(),
        checksum="slime" if dtype is torch.bfloat16 else "xxh3",
        manifest_checksum=True,
        old=trainer.old,
    )
    part = decode_part(b"".join(FrameReader(1 << 30).feed(body)))
    assert part.manifest.encoding == encoding
    assert [delta.name for delta in part.deltas] == list(changed)
    change = Digest.ZERO
    for delta in part.deltas:
        expected, sent = bits(trainer.tensors[delta.name]), changed[delta.name]
        if sent is None:
            assert delta.indices is None
        else:
            assert delta.indices is not None
            assert delta.indices.tolist() == sent.tolist()
            expected = expected[sent.numpy()]
        found = delta.values
        if delta.differences:
            old = bits(trainer.old[delta.name])[delta.indices]
            found = found + old
            change += tensor_digest(delta.name, found, delta.indices)
            change -= tensor_digest(delta.name, old, delta.indices)
        assert np.array_equal(found, expected)
    assert part.manifest.digest_part == (change.hex() if encoding == "gap8_ulp" else None)
    if encoding.startswith("gap8"):
        widths = {entry.name: entry.pos_width for entry in part.manifest.params}
        assert (widths["w2"], widths["w3"]) == (1, 2)
