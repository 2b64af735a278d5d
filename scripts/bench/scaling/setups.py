"""What is synced, and between which machines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from delta_sender.encode.part_builder import most_bytes

_STREAM_BYTES: Final = 1  # of a gap in a part, before compression


@dataclass(frozen=True)
class Model:
    """A model: its number of elements, of checkpoint tensors, and of bytes per element."""

    name: str
    numel: float
    tensors: int
    width: int = 2

    @property
    def nbytes(self) -> float:
        return self.numel * self.width


# Tensors as in Qwen3 30B-A3B and 235B-A22B (an expert is three tensors), and Kimi K2.
MODELS: Final = (
    Model("30B", 30.5e9, 18_867),
    Model("235B", 235e9, 36_945),
    Model("1T", 1.03e12, 69_900),
)


@dataclass(frozen=True)
class Setup:
    """One sync of a model to some engines.

    Attributes:
        density: changed elements / elements.
        encoding: one of `encodings.ENCODINGS`.
        engines: that get the sync, each on a host of its own.
        link_gbit: rate of every host's link, in Gbit/s.
        trainer_hosts: that share the model evenly; each compares, encodes and sends its share.
        trainer_cores: of each trainer host.
        encoders: threads that encode, on each trainer host.
        posts_in_flight: parts of one trainer host that are posted to an engine at a time; the last
            one is posted alone. With 1, each is posted when the one before it is staged; meanwhile
            the next one is encoded.
        ranks: of an engine, all on one host; tensor parallel.
        engine_cores: of an engine's host that are free for syncs.
        http_processes: of an engine; each takes some of the parts.
        rank_threads: that stage and write on each rank.
        decode_once: whether a part is decoded once on a host, and not by each rank.
        bucket_bytes: most bytes of positions and values in a part, before compression.
        one_host: trainer and engine share the trainer's cores, and the link is the loopback
            interface; then there is one engine.
        waiting: threads of the engine on the trainer's cores that wait in a loop meanwhile and
            yield to others; with `one_host` only.
        taken: of the trainer's cores, how many have other work; with `one_host` only.
    """

    model: Model
    density: float
    encoding: str
    engines: int = 1
    link_gbit: float = 100.0
    trainer_hosts: int = 1
    trainer_cores: int = 96
    encoders: int = 8
    posts_in_flight: int = 4
    ranks: int = 8
    engine_cores: int = 48
    http_processes: int = 1
    rank_threads: int = 6
    decode_once: bool = True
    bucket_bytes: int = 64 << 20
    one_host: bool = False
    waiting: int = 0
    taken: float = 0.0

    @property
    def nnz(self) -> float:
        """Changed elements of the model."""
        return self.model.numel * self.density

    @cached_property
    def _sizes(self) -> list[float]:
        """Changed elements of each part, in order."""
        left, sizes = self.nnz, list[float]()
        while left > 0:
            most = most_bytes(self.bucket_bytes, len(sizes)) // (_STREAM_BYTES + self.model.width)
            sizes.append(min(left, max(1, most)))
            left -= sizes[-1]
        return sizes

    @property
    def parts(self) -> int:
        """Parts of the sync."""
        return len(self._sizes)

    @property
    def part_nnz(self) -> float:
        """Changed elements of a part in the mean."""
        return self.nnz / self.parts

    @property
    def first_share(self) -> float:
        """The first part, over one in the mean."""
        return self._sizes[0] / self.part_nnz

    @property
    def largest_share(self) -> float:
        """The largest part, over one in the mean."""
        return max(self._sizes) / self.part_nnz

    @property
    def part_tensors(self) -> float:
        """Tensors in one part; large ones are not split."""
        return self.model.tensors / self.parts

    @property
    def bytes_per_s(self) -> float:
        """Rate of a link."""
        return math.inf if self.one_host else self.link_gbit * 1e9 / 8
