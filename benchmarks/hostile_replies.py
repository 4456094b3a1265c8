"""Replies of hostile clients, built by a generator from a seed.

A hostile reply is a function of the server's message and of the honest answer. It must
be at the top of a module that Ray's processes can import, so a reply is known by its
place in a list, and both sides build the same lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)

SEED = 17
Arrays = dict[str, np.ndarray[Any, Any]]
Metrics = dict[str, Any]
Answer = Callable[[Message, Arrays, Metrics], Any]

FLOATS = ("norm.running_mean", "norm.running_var", "w", "b")
COUNTER = "norm.num_batches_tracked"
NAMES = (*FLOATS, COUNTER)
ODD_NAMES = {
    "empty": "",
    "bidirectional": "w\u202etxt.exe",
    "control": "w\x1b[2J\r\n\x00",
    "surrogate-free emoji": "\U0001f3e5" * 50,
    "path": "../../../etc/passwd",
    "long": "w" * 1_000_000,
    "metadata": "__metadata__",
    "combining": "w" + "\u0301" * 500,
}


@dataclass(frozen=True)
class Hostile:
    """A hostile reply and a name for it."""

    name: str
    answer: Answer


def initial_arrays() -> Arrays:
    """Return a model with parameters, statistics and a counter."""
    return {
        "norm.running_mean": np.zeros(2, np.float32),
        "norm.running_var": np.ones(2, np.float32),
        "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2),
        COUNTER: np.zeros((), np.int64),
        "b": np.ones(2, np.float32),
    }


def reply(message: Message, arrays: dict[str, Array], metrics: Metrics) -> Message:
    """Return a reply as an honest client sends it; no arrays in an evaluation."""
    content = RecordDict({"metrics": unchecked_metrics(metrics)})
    if arrays:
        content["arrays"] = ArrayRecord(arrays)
    return Message(content=content, reply_to=message)


def honest(message: Message, arrays: Arrays, metrics: Metrics) -> Message:
    """Return the honest reply."""
    return reply(message, packed(arrays), metrics)


def packed(arrays: Arrays) -> dict[str, Array]:
    """Return arrays as Flower sends them."""
    return {name: Array(array) for name, array in arrays.items()}


def unchecked_metrics(metrics: Metrics) -> MetricRecord:
    """Return a record past Flower's own checks of types, as a hostile client may."""
    record = MetricRecord()
    record.__dict__["_data"].update(metrics)
    return record


def raw(
    data: bytes, shape: tuple[int, ...] = (2,), stype: str = "numpy.ndarray"
) -> Array:
    """Return an array of bytes that nobody checked."""
    return Array("float32", shape, stype, data)


def header_of(text: str, rest: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """Return a file of NumPy's with any header."""
    width = 2 if version == b"\x01\x00" else 4
    head = text.encode("latin1") + b"\n"
    return b"\x93NUMPY" + version + len(head).to_bytes(width, "little") + head + rest


def with_array(
    name: str,
    make: Callable[[np.ndarray[Any, Any]], Array],
    message: Message,
    arrays: Arrays,
    metrics: Metrics,
) -> Message:
    """Return the honest reply with one array replaced."""
    return reply(message, {**packed(arrays), name: make(arrays[name])}, metrics)


def with_value(value: float, dtype: str, place: int, own: Any) -> Array:
    """Return an array with one value replaced, in a dtype."""
    changed = np.array(own, dtype)
    changed.reshape(-1)[place % changed.size] = value
    return Array(changed)


def as_dtype(dtype: str, own: Any) -> Array:
    """Return zeros of a dtype."""
    return Array(np.zeros(own.shape, dtype))


def as_objects(own: Any) -> Array:
    """Return an array that only unpickling could read."""
    file = BytesIO()
    np.save(file, np.full(own.shape, {}, object), allow_pickle=True)
    return Array("object", own.shape, "numpy.ndarray", file.getvalue())


def as_shape(shape: tuple[int, ...], own: Any) -> Array:
    """Return zeros of a shape."""
    return Array(np.zeros(shape, own.dtype))


def cut_off(place: int, own: Any) -> Array:
    """Return an array whose bytes end too early."""
    whole = Array(own)
    return raw(whole.data[: place % (len(whole.data) - 1)], own.shape)


def flipped(place: int, own: Any) -> Array:
    """Return an array with a broken byte in the magic or the length of its header."""
    data = bytearray(Array(own).data)
    data[place % 8] ^= 0xFF
    return raw(bytes(data), own.shape)


def as_bytes(data: bytes, stype: str, own: Any) -> Array:
    """Return an array of any bytes."""
    return raw(data, own.shape, stype)


def array_replies(seed: int) -> Iterator[Hostile]:
    """Yield replies with one bad array."""
    rng = np.random.default_rng(seed)

    def changed(what: str, name: str, make: Callable[[Any], Array]) -> Hostile:
        return Hostile(f"{name} {what}", partial(with_array, name, make))

    for name in FLOATS:
        for value in (np.nan, np.inf, -np.inf, 1e300, -1e300, 1e39):
            place = int(rng.integers(100))
            make = partial(with_value, value, "float64", place)
            yield changed(f"has {value} at {place}", name, make)
        for value, dtype in ((3e38, "float32"), (1e20, "float32"), (np.inf, "float16")):
            place = int(rng.integers(100))
            make = partial(with_value, value, dtype, place)
            yield changed(f"has {value} as {dtype} at {place}", name, make)
    for value in (-1.0, -1e-3, -1e30):
        make = partial(with_value, value, "float32", int(rng.integers(100)))
        yield changed(f"is negative: {value}", "norm.running_var", make)
    for value, dtype in (
        (1e30, "float64"), (-1e30, "float64"), (2.5, "float64"), (np.nan, "float64"),
        (2**62, "int64"), (-5, "int64"), (2**64 - 1, "uint64"), (-(2**63), "int64"),
    ):  # fmt: skip
        make = partial(with_value, value, dtype, 0)
        yield changed(f"is {value} as {dtype}", COUNTER, make)
    for name in NAMES:
        for dtype in ("complex64", "U8", "S8", "M8[s]", "V16", "f4,i8"):
            yield changed(f"is {dtype}", name, partial(as_dtype, dtype))
        yield changed("is pickled", name, as_objects)
        for shape in ((0,), (1, 1, 1, 1), (7,), (0, 5), (3, 3)):
            yield changed(f"has shape {shape}", name, partial(as_shape, shape))
        for make_broken in (cut_off, flipped):
            place = int(rng.integers(1000))
            what = f"{make_broken.__name__} at {place}"
            yield changed(what, name, partial(make_broken, place))
    for text in (
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
        "{'descr': '<f4', 'fortran_order': True, 'shape': (99999999, 99999999), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 'two', }",
        "{'descr': '<f4'}",
        "__import__('os').abort()",
        "[" * 9000,
        "{" * 40_000,
    ):
        for version in (b"\x01\x00", b"\x02\x00", b"\x09\x09"):
            data = header_of(text, rng.bytes(64), version)
            make = partial(as_bytes, data, "numpy.ndarray")
            yield changed(f"has header {text[:60]} of {version!r}", "b", make)
    for stype in ("pickle", "numpy.ndarray\x00", "torch", ""):
        make = partial(as_bytes, rng.bytes(80), stype)
        yield changed(f"is serialised as {stype!r}", "b", make)


def without_arrays(names: tuple[str, ...]) -> Answer:
    """Return an answer that lacks some arrays."""

    def answer(message: Message, arrays: Arrays, metrics: Metrics) -> Message:
        kept = {n: a for n, a in packed(arrays).items() if n not in names}
        content = RecordDict({"metrics": MetricRecord(metrics)})
        content["arrays"] = ArrayRecord(kept)
        return Message(content=content, reply_to=message)

    return answer


def renamed(
    name: str, other: str, message: Message, arrays: Arrays, metrics: Metrics
) -> Message:
    """Return the honest reply with an array under another name."""
    changed = packed(arrays)
    changed[other] = changed.pop(name)
    return reply(message, changed, metrics)


def with_extra(
    other: str, message: Message, arrays: Arrays, metrics: Metrics
) -> Message:
    """Return the honest reply with an array more."""
    return reply(message, {**packed(arrays), other: Array(np.zeros(2))}, metrics)


def with_records(names: tuple[str, ...]) -> Answer:
    """Return an answer with these records alone; the honest ones under odd names."""

    def answer(message: Message, arrays: Arrays, metrics: Metrics) -> Message:
        content = RecordDict()
        for name in names:
            if name.startswith("arrays"):
                content[name] = ArrayRecord(packed(arrays))
            elif name.startswith("metrics"):
                content[name] = MetricRecord(metrics)
            else:
                content[name] = ConfigRecord({"num-examples": 5, "client-name": "x"})
        return Message(content=content, reply_to=message)

    return answer


def record_replies() -> Iterator[Hostile]:
    """Yield replies to train with missing, extra and renamed arrays and records."""
    for name in NAMES:
        yield Hostile(f"without {name}", without_arrays((name,)))
        yield Hostile(f"{name} renamed", partial(renamed, name, name + "2"))
    yield Hostile("without any array", without_arrays(NAMES))
    for what, other in ODD_NAMES.items():
        yield Hostile(f"w has a name: {what}", partial(renamed, "w", other))
        yield Hostile(f"an array more: {what}", partial(with_extra, other))
    for names in (
        (),
        ("arrays",),
        ("metrics",),
        ("config",),
        ("arrays", "config"),
        ("metrics", "config"),
        ("arrays", "arrays2", "metrics"),
        ("arrays", "metrics", "metrics2"),
        ("arrays2", "metrics"),
        ("arrays", "metrics2"),
    ):
        yield Hostile(f"train records: {names}", with_records(names))


def with_metrics(
    changes: Metrics, message: Message, arrays: Arrays, metrics: Metrics
) -> Message:
    """Return the honest reply with other metrics; a metric of `...` is left out."""
    changed = {**metrics, **changes}
    left = {k: v for k, v in changed.items() if v is not ...}
    return reply(message, packed(arrays), left)


def metric_replies(during: str) -> Iterator[Hostile]:
    """Yield replies with a bad weight or a bad metric."""
    weights: tuple[Any, ...] = (
        ..., 0, -1, -0.0, np.nan, np.inf, -np.inf, 1e11, 2**63, 10**400, 1e-300,
        [1, 2], [], "10", None, True, {}, b"10", np.float32(np.nan), 1j,
    )  # fmt: skip
    for number, weight in enumerate(weights):
        yield Hostile(
            f"{during} weight {number}: {weight!r:.20}",
            partial(with_metrics, {"num-examples": weight}),
        )
    values: tuple[Any, ...] = (
        ..., np.nan, np.inf, -np.inf, [], [0.5, 0.5], [np.nan], "0.5", None, {},
        10**400, b"0.5", object, 1j, [[0.5]], True,
    )  # fmt: skip
    for number, value in enumerate(values):
        yield Hostile(
            f"{during} metric {number}: {value!r:.20}",
            partial(with_metrics, {"score": value}),
        )
    for what, name in ODD_NAMES.items():
        yield Hostile(
            f"{during} metric of name: {what}", partial(with_metrics, {name: 0.5})
        )


def with_error(
    code: int, reason: str, message: Message, arrays: Any, metrics: Any
) -> Message:
    """Return an error in place of a reply."""
    return Message(Error(code=code, reason=reason), reply_to=message)


def raising(kind: type[BaseException], text: str, *_: Any) -> Message:
    """Raise an error, as an app that fails."""
    raise kind(text)


def failing_replies(during: str) -> Iterator[Hostile]:
    """Yield replies that are errors, and clients that fail.

    A client that ends its process, or that returns no message, is missing: in a
    simulation it ends the worker of all clients. In a deployment it is silent.
    """
    for code in (0, 1, 2, 5, -7, 99_999):
        for reason in ("", "Traceback\n\x1b[2J\u202e\r\nboom", "x" * 100_000):
            yield Hostile(
                f"{during} error {code}: {reason[:12]!r}",
                partial(with_error, code, reason),
            )
    for kind in (ValueError, MemoryError, RecursionError, StopIteration):
        yield Hostile(f"{during} raises {kind.__name__}", partial(raising, kind, "no"))


def evaluation_replies() -> Iterator[Hostile]:
    """Yield replies to evaluate with missing, extra and renamed records."""
    for names in (
        (),
        ("config",),
        ("metrics2",),
        ("metrics", "metrics2"),
        ("metrics", "metrics2", "metrics3"),
        ("config", "metrics2"),
    ):
        yield Hostile(f"evaluate records: {names}", with_records(names))


@cache
def train_replies(seed: int = SEED) -> tuple[Hostile, ...]:
    """Return all hostile replies to train, shuffled."""
    found = [
        *array_replies(seed),
        *record_replies(),
        *metric_replies("train"),
        *failing_replies("train"),
    ]
    return shuffled(found, seed)


@cache
def evaluate_replies(seed: int = SEED) -> tuple[Hostile, ...]:
    """Return all hostile replies to evaluate, shuffled."""
    found = [
        *evaluation_replies(),
        *metric_replies("evaluate"),
        *failing_replies("evaluate"),
    ]
    return shuffled(found, seed)


def shuffled(replies: list[Hostile], seed: int) -> tuple[Hostile, ...]:
    """Return replies in an order that follows from a seed."""
    order = np.random.default_rng(seed).permutation(len(replies))
    return tuple(replies[place] for place in order)
