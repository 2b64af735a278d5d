"""The digest: golden vectors, one answer from every backend, and the algebra of a sum."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.format import digest
from engine_ext.format.digest import Digest, change_digest, tensor_digest
from tests.support.cases import in_one_test

# No example database: a test must leave nothing behind in the working tree.
PROPERTY = settings(deadline=None, database=None, max_examples=50)

MASK = 2**64 - 1
KERNEL: Any = digest._kernel
NAME = "model.layers.0.mlp.experts.7.w1.weight"
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

BACKENDS = pytest.mark.parametrize("backend", ["numpy", "numba"])
WIDTHS = pytest.mark.parametrize("width", UNSIGNED)

# name, flat indices, bit patterns, bytes of an element, digest
GOLDEN = [
    ("w", [0], [0], 2, "58bb631c78e5facf508ccc96c655e97f"),
    (
        "model.embed_tokens.weight",
        [0, 1, 2, 3],
        [0x3F80, 0xBF80, 0x7FC0, 0x8000],  # 1, -1, NaN, -0 in bfloat16
        2,
        "2fffacc3dd4e20009cd646b797075bee",
    ),
    (
        NAME,
        [5, 1023, 1024, 2**31, 2**40 + 3],
        [0x01, 0xFF, 0x80, 0x7F, 0xF0],
        1,
        "fac7e60426f2e6f08c8bea348200f516",
    ),
    ("größe.重み", [7], [0x7FC00001], 4, "b0c59ab98fa2613b7211fa24e2dd5235"),
    (NAME, [0, 2**63 - 1], [2**64 - 1, 2**63], 8, "7ab23ac17b7921f1a1db5c1b1fa1c239"),
]


def reference(name: str, indices: Sequence[int], values: Sequence[int], width: int) -> str:
    """The definition once more, in Python's own numbers."""

    def m(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
        return x ^ x >> 31

    def t(bits: int) -> int:
        return bits * (bits + 1) // 2 + 1 if width <= 2 else m(bits + 0x9E3779B97F4A7C15 & MASK)

    lanes = []
    for lane in (0, 1):
        seed = xxhash.xxh3_64(name.encode("utf-8"), seed=lane).intdigest()
        total = 0
        for index, value in zip(indices, values, strict=True):
            block, j = divmod(index, 1024)
            c = m((seed + block) & MASK) | 1
            a = m((1024 * lane + j + 1) * 0x9E3779B97F4A7C15 & MASK) | 1
            total += c * a * t(value)
        lanes.append(total & MASK)
    return f"{lanes[0]:016x}{lanes[1]:016x}"


@contextmanager
def using(backend: str, chunk: int = 7) -> Iterator[None]:
    """Let that backend answer, in chunks so small that the tests cross their borders."""
    if backend == "numba":
        assert KERNEL(2, False, False) is not digest._numpy_dense
        kernel = KERNEL
    else:

        def kernel(width: int, sparse: bool, change: bool) -> Any:
            return digest._numpy_sparse if sparse else digest._numpy_dense

    sizes: dict[str, Any] = {f"_{kind}_CHUNK": chunk for kind in ("NUMPY", "NUMBA")}
    with mock.patch.multiple(digest, _kernel=kernel, **sizes):
        yield


def digest_of(
    backend: str,
    values: np.ndarray[Any, Any],
    indices: np.ndarray[Any, Any] | None = None,
    start: int = 0,
    name: str = NAME,
) -> Digest:
    with using(backend):
        return tensor_digest(name, values, indices, start)


def random_values(n: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    raw = np.random.default_rng(seed).integers(0, 256, n * width, dtype=np.uint8)
    return raw.view(UNSIGNED[width])


def random_indices(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.cumsum(np.random.default_rng(seed).integers(1, 2**33, n)) - 1


@st.composite
def elements(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Flat indices, unique but in no order, and bit patterns of some width."""
    width = draw(st.sampled_from(sorted(UNSIGNED)))
    near = st.integers(0, 3000) | st.integers(0, 2**63 - 1)
    places = draw(st.lists(near, unique=True, max_size=40))
    values = draw(
        st.lists(st.integers(0, 2 ** (8 * width) - 1), min_size=len(places), max_size=len(places))
    )
    return np.array(places, np.int64), np.array(values, UNSIGNED[width])


# --- the definition ---


@in_one_test(("name", "indices", "values", "width", "expected"), GOLDEN)
def test_golden_reference(
    name: str, indices: list[int], values: list[int], width: int, expected: str
) -> None:
    assert reference(name, indices, values, width) == expected


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize(("name", "indices", "values", "width", "expected"), GOLDEN)
def test_golden(
    backend: str, name: str, indices: list[int], values: list[int], width: int, expected: str
) -> None:
    patterns = np.array(values, UNSIGNED[width])
    assert digest_of(backend, patterns, np.array(indices), name=name).hex() == expected


@pytest.mark.slow
@BACKENDS
@given(elements())
@PROPERTY
def test_sparse_is_the_reference(backend: str, data: Any) -> None:
    indices, values = data
    expected = reference(NAME, indices.tolist(), values.tolist(), values.itemsize)
    assert digest_of(backend, values, indices).hex() == expected


@BACKENDS
@WIDTHS
@in_one_test("start", [0, 3, 250, 1020, 2**40 + 1])
@in_one_test("n", [1, 7, 40])
def test_dense_is_the_reference(backend: str, width: int, start: int, n: int) -> None:
    values = random_values(n, width)
    expected = reference(NAME, range(start, start + n), values.tolist(), width)
    assert digest_of(backend, values, start=start).hex() == expected


@BACKENDS
@WIDTHS
def test_whole_chunks(backend: str, width: int) -> None:
    """The chunks of production, and what vectorised loops do with a long array."""
    n = digest._NUMBA_CHUNK + 12345
    old, new, indices = random_values(n, width, 1), random_values(n, width, 2), random_indices(n)
    with using("numpy", chunk=1000):
        expected = tensor_digest(NAME, new, indices)
        change = expected - tensor_digest(NAME, old, indices)
        dense = tensor_digest(NAME, new, start=9)
    with using(backend, chunk=digest._NUMBA_CHUNK):
        assert tensor_digest(NAME, new, indices) == expected
        assert change_digest(NAME, indices, old, new) == change
        assert tensor_digest(NAME, new, start=9) == dense


@BACKENDS
@WIDTHS
def test_nothing_is_zero(backend: str, width: int) -> None:
    empty = np.empty(0, UNSIGNED[width])
    assert digest_of(backend, empty) == Digest.ZERO
    assert digest_of(backend, empty, np.empty(0, np.int64)) == Digest.ZERO
    assert change_digest(NAME, None, empty, empty) == Digest.ZERO


# --- the algebra ---


@pytest.mark.slow
@BACKENDS
@given(elements(), st.randoms(use_true_random=False), st.integers(0, 40))
@PROPERTY
def test_order_and_grouping_do_not_matter(backend: str, data: Any, random: Any, cut: int) -> None:
    indices, values = data
    order = list(range(len(indices)))
    random.shuffle(order)
    whole = digest_of(backend, values, indices)
    assert digest_of(backend, values[order], indices[order]) == whole
    parts = [
        digest_of(backend, values[order[:cut]], indices[order[:cut]]),
        digest_of(backend, values[order[cut:]], indices[order[cut:]]),
    ]
    assert sum(parts, Digest.ZERO) == whole
    assert whole - parts[0] == parts[1]


@pytest.mark.slow
@BACKENDS
@given(elements(), st.data())
@PROPERTY
def test_change_is_new_minus_old(backend: str, data: Any, draw: Any) -> None:
    indices, old = data
    new = np.array(draw.draw(st.permutations(old.tolist())), old.dtype)
    with using(backend):
        assert change_digest(NAME, indices, old, new) == tensor_digest(
            NAME, new, indices
        ) - tensor_digest(NAME, old, indices)
        assert change_digest(NAME, None, old, new, start=11) == tensor_digest(
            NAME, new, start=11
        ) - tensor_digest(NAME, old, start=11)
        assert change_digest(NAME, indices, old, old) == Digest.ZERO


@BACKENDS
def test_sparse_change_advances_a_dense_digest(backend: str) -> None:
    before = random_values(100, 2)
    indices = np.array([0, 6, 7, 50, 99])
    after = before.copy()
    after[indices] ^= 0x8000
    with using(backend):
        change = change_digest(NAME, indices, before[indices], after[indices])
    assert digest_of(backend, before) + change == digest_of(backend, after)


@BACKENDS
@WIDTHS
def test_every_bit_counts_in_both_lanes(backend: str, width: int) -> None:
    base = digest_of(backend, np.zeros(1, UNSIGNED[width]))
    seen = [base]
    for bit in range(8 * width):
        seen.append(digest_of(backend, np.array([1 << bit], UNSIGNED[width])))
    seen.append(digest_of(backend, np.zeros(1, UNSIGNED[width]), start=1))
    seen.append(digest_of(backend, np.zeros(1, UNSIGNED[width]), name=NAME + "s"))
    assert len({d.lane0 for d in seen}) == len({d.lane1 for d in seen}) == 8 * width + 3


@pytest.mark.slow
@BACKENDS
@WIDTHS
@given(st.data())
@PROPERTY
def test_a_step_proves_the_old_value(backend: str, width: int, data: Any) -> None:
    """Differences are proven by it: the same ones from other old values give another digest."""
    one, other = data.draw(st.lists(st.integers(0, 2 ** (8 * width) - 1), min_size=2, max_size=2))
    step = data.draw(
        st.integers(1, 2 ** (8 * width) - 1) | st.sampled_from([1, 1 << 8 * width - 1])
    )
    old = np.array([one, other], UNSIGNED[width])
    new = old + np.array(step, UNSIGNED[width])
    with using(backend):
        changes = [
            change_digest(NAME, np.array([5]), old[k : k + 1], new[k : k + 1]) for k in (0, 1)
        ]
    assert (changes[0] == changes[1]) == (one == other)


@BACKENDS
@pytest.mark.parametrize("bit", [0, 15, 16, 31])
def test_a_step_proves_every_bit_of_wide_elements(backend: str, bit: int) -> None:
    """Also those that the step leaves as they are."""
    old = np.array([0x3F800005, 0x3F800005 ^ 1 << bit], np.uint32)
    with using(backend):
        one, other = (
            change_digest(NAME, np.array([5]), old[k : k + 1], old[k : k + 1] + np.uint32(1))
            for k in (0, 1)
        )
    assert one != other


@BACKENDS
def test_blocks_that_trade_places_count(backend: str) -> None:
    values = random_values(4096, 2)
    swapped = np.concatenate([values[1024:2048], values[:1024], values[2048:]])
    one, other = digest_of(backend, values), digest_of(backend, swapped)
    assert one.lane0 != other.lane0
    assert one.lane1 != other.lane1


@BACKENDS
def test_a_zero_counts(backend: str) -> None:
    zeros = [digest_of(backend, np.zeros(n, np.uint16)) for n in range(4)]
    assert len({d.lane0 for d in zeros}) == len({d.lane1 for d in zeros}) == 4


@BACKENDS
def test_values_that_trade_places_count(backend: str) -> None:
    assert digest_of(backend, np.array([1, 2], np.uint16)) != digest_of(
        backend, np.array([2, 1], np.uint16)
    )


# --- memory: layouts, dtypes, threads ---


@BACKENDS
@WIDTHS
def test_readonly_unaligned_and_strided_memory(backend: str, width: int) -> None:
    values, indices = random_values(50, width), random_indices(50)
    expected = digest_of(backend, values, indices)
    change = expected - digest_of(backend, values[::-1].copy(), indices)
    raw = b"\0" + values.tobytes()
    unaligned = np.frombuffer(raw, UNSIGNED[width], offset=1)
    places = np.frombuffer(b"\0" + indices.tobytes(), np.int64, offset=1)
    assert not unaligned.flags.writeable
    assert digest_of(backend, unaligned, places) == expected
    strided = np.stack([values, values[::-1]], axis=1)
    with using(backend):
        assert tensor_digest(NAME, strided[:, 0], np.repeat(indices, 2)[::2]) == expected
        assert change_digest(NAME, places, strided[:, 1], unaligned) == change


@BACKENDS
@pytest.mark.parametrize("threads", [0, 1, 2, 3, 64])
def test_threads_share_the_work(backend: str, threads: int) -> None:
    values, indices = random_values(100, 2), random_indices(100)
    with using(backend):
        dense = tensor_digest(NAME, values, start=5, threads=threads)
        sparse = tensor_digest(NAME, values, indices, threads=threads)
    assert dense == digest_of(backend, values, start=5)
    assert sparse == digest_of(backend, values, indices)


def test_threads_that_meet_before_anything_is_compiled() -> None:
    values = random_values(100, 4)
    KERNEL.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: tensor_digest(NAME, values), range(4)))
    assert set(answers) == {digest_of("numpy", values)}


# --- numba is optional, and so is its cache ---


def test_without_numba_numpy_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert KERNEL.__wrapped__(2, False, True) is digest._numpy_dense
    assert KERNEL.__wrapped__(2, True, True) is digest._numpy_sparse


@pytest.mark.slow
def test_numba_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    njit = numba.njit

    def no_cache(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", no_cache)
    kernel = KERNEL.__wrapped__(2, False, False)
    values = random_values(100, 2)
    arguments = np.uint64(1), np.uint64(2), digest._TABLE, 1000, values, None
    lanes = kernel(*arguments)
    assert tuple(map(int, lanes)) == digest._numpy_dense(*arguments)


# --- the value, and what is refused ---


def test_text() -> None:
    value = Digest(1, 0xABCDEF0123456789)
    assert value.hex() == str(value) == f"{value}" == "0000000000000001abcdef0123456789"
    assert Digest.parse(str(value)) == value
    assert Digest.parse("0" * 32) == Digest.ZERO


@given(st.integers(0, MASK), st.integers(0, MASK), st.integers(0, MASK), st.integers(0, MASK))
@PROPERTY
def test_arithmetic_wraps(a: int, b: int, c: int, d: int) -> None:
    one, other = Digest(a, b), Digest(c, d)
    assert one + other == Digest((a + c) & MASK, (b + d) & MASK) == other + one
    assert one - other == Digest((a - c) & MASK, (b - d) & MASK)
    assert one + other - other == one == Digest.parse(one.hex())


@in_one_test(
    "text", ["", "0" * 31, "0" * 33, "0" * 31 + "g", "A" * 32, "0x" + "0" * 30, "0" * 32 + "\n"]
)
def test_other_text_is_no_digest(text: str) -> None:
    with pytest.raises(ValueError):
        Digest.parse(text)


def test_narrow_indices_are_the_same() -> None:
    values, indices = np.array([1, 2, 3], np.uint16), np.array([0, 5, 2**31 - 1])
    narrow: Any = indices.astype(np.int32)
    assert tensor_digest(NAME, values, narrow) == tensor_digest(NAME, values, indices)
    assert change_digest(NAME, narrow, values, values[::-1]) == change_digest(
        NAME, indices, values, values[::-1]
    )


def test_wrong_dtypes() -> None:
    values, indices = np.zeros(3, np.uint16), np.arange(3)
    for bad in (np.int16, np.float16, ">u2"):
        with pytest.raises(TypeError):
            tensor_digest(NAME, values.astype(bad))
    with pytest.raises(TypeError):
        tensor_digest(NAME, values, indices.astype(np.uint32))
    with pytest.raises(ValueError):
        change_digest(NAME, indices, values, values.astype(np.uint8))


def test_wrong_shapes() -> None:
    values, indices = np.zeros(4, np.uint16), np.arange(4)
    for bad_values, bad_indices in [
        (values, indices[:3]),
        (values[:3], indices),
        (values.reshape(2, 2), None),
        (values.reshape(2, 2), indices.reshape(2, 2)),
    ]:
        with pytest.raises(ValueError):
            tensor_digest(NAME, bad_values, bad_indices)
    with pytest.raises(ValueError):
        change_digest(NAME, indices, values[:3], values)


def test_start_belongs_to_dense_values() -> None:
    with pytest.raises(ValueError):
        tensor_digest(NAME, np.zeros(1, np.uint8), start=-1)
    with pytest.raises(ValueError):
        tensor_digest(NAME, np.zeros(1, np.uint8), np.zeros(1, np.int64), start=1)
