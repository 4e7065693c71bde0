# SPDX-License-Identifier: Apache-2.0
"""push_pull, broadcast and broadcast_variables, in eager mode and in graphs, against NumPy in float64."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

import commlib
import commlib.tensorflow as bps
from tests.tensorflow import message_of, outcomes, results_of

pytestmark = pytest.mark.timeout(240)  # one job runs them all
SIZES = [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)]
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
TOLERANCE = {"float16": 1.001 * 2**-11, "bfloat16": 1.001 * 2**-8, "float32": 4 * 2**-24, "float64": 4 * 2**-53}
OPS: dict[str, Callable[[Any], Any]] = {
    "Average": lambda x: x.mean(axis=0),
    "Sum": lambda x: x.sum(axis=0),
    "Min": lambda x: x.min(axis=0),
    "Max": lambda x: x.max(axis=0),
    "Product": lambda x: x.prod(axis=0),
}
SHAPES = [(), (0, 3), (1,), (7, 13), (1023,)]


def make(dtype: str, rank: int, shape: tuple[int, ...]) -> tf.Tensor:
    random = np.random.default_rng([rank, *shape])
    if dtype == "bool":
        return tf.constant(random.integers(0, 2, shape).astype(bool))
    if "int" in dtype:
        return tf.cast(tf.constant(random.integers(0 if dtype == "uint8" else -4, 5, shape)), dtype)
    return tf.cast(tf.constant(random.standard_normal(shape)), dtype)


def exact(tensor: Any) -> Any:
    return tf.cast(tensor, tf.float64).numpy()


def scenario_every_dtype_operation_and_shape() -> None:
    in_graph = tf.function(lambda x, op: bps.push_pull(x, op=op), reduce_retracing=False)
    for dtype in DTYPES:
        for op, combine in OPS.items():
            if dtype == "bool" and op == "Average":
                assert message_of(lambda: bps.push_pull(tf.constant([True]), op=bps.Average))[0] == "UnsupportedError"
                continue
            for shape in SHAPES:
                mine = make(dtype, bps.rank(), shape)
                inputs = np.stack([exact(make(dtype, rank, shape)) for rank in range(bps.size())])
                expected = combine(inputs)
                if dtype == "bool":
                    expected = expected != 0
                elif "int" in dtype and op == "Average":
                    expected = np.floor(expected)
                for call in (bps.push_pull, in_graph):
                    result = call(mine, op=getattr(bps, op))
                    assert result.dtype == mine.dtype
                    assert result.shape == mine.shape
                    scale = np.abs(inputs).sum(axis=0) + 1 if op in ("Average", "Sum") else np.abs(expected) + 1
                    error = np.abs(exact(result) - expected)
                    assert np.all(error <= TOLERANCE.get(dtype, 0) * scale), (dtype, op, shape, call)


def scenario_results_stay_as_they_are() -> None:
    kept = [bps.push_pull(tf.fill((1000,), float(i + bps.rank())), op=bps.Sum) for i in range(50)]
    total = sum(range(bps.size()))
    for _ in range(50):
        bps.push_pull(tf.zeros((1000,)))
    for i, tensor in enumerate(kept):
        assert np.all(tensor.numpy() == i * bps.size() + total)
    # In place in TensorFlow's eyes, these are not: an operation on a result makes another tensor.
    before = kept[3].numpy()
    bps.push_pull(kept[3] + 1)
    assert np.array_equal(kept[3].numpy(), before)


def scenario_memory_goes_back_with_its_tensor() -> None:
    worker = commlib.api.session().worker
    bps.push_pull(tf.zeros((1000,)))
    gc.collect()
    before = worker.allocated_bytes()
    kept = [bps.push_pull(tf.zeros((100_000,)), name="kept") for _ in range(5)]
    if bps.size() > 1:
        assert worker.allocated_bytes() >= before + 5 * 400_000
    del kept
    gc.collect()
    commlib.barrier()
    assert worker.allocated_bytes() <= before + 4096


def scenario_gradients() -> None:
    x = tf.Variable([1.0, 2.0, 3.0])
    rank, size = bps.rank(), bps.size()

    def loss(average: bool) -> Any:
        return tf.reduce_sum(bps.push_pull(x * x, average=average) * float(rank + 1))

    weights = sum(range(1, size + 1))
    for run in (lambda f: f, tf.function):
        for average in (False, True):

            def slope(average: bool = average) -> Any:
                with tf.GradientTape() as tape:
                    value = loss(average)
                return tape.gradient(value, x)

            expected = 2 * x.numpy() * weights / (size if average else 1)
            assert np.allclose(run(slope)(), expected)

            def curvature(average: bool = average) -> Any:
                with tf.GradientTape() as outer:
                    with tf.GradientTape() as inner:
                        # A loss that is the same on all ranks, and square in what was summed.
                        value = tf.reduce_sum(bps.push_pull(x * x, average=average) ** 2) / size
                    first = inner.gradient(value, x)
                return outer.gradient(first, x)

            # Over all ranks, of P² where P is the sum (the mean) of x² over ranks: first 4 P x (/ n), then this.
            factor = 12 / size if average else 12 * size
            assert np.allclose(run(curvature)(), factor * x.numpy() ** 2)
    root = size - 1
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(bps.broadcast(x * float(rank + 1), root) * float(rank + 1))
    expected = float(size) * weights * np.ones(3) if rank == root else np.zeros(3)
    assert np.allclose(tape.gradient(value, x), expected)
    assert message_of(lambda: _gradient_of_max(x))[0] == "LookupError"


def _gradient_of_max(x: Any) -> Any:
    with tf.GradientTape() as tape:
        value = bps.push_pull(x, op=bps.Max)
    return tape.gradient(value, x)


def scenario_broadcast() -> None:
    for dtype in DTYPES:
        for root in range(bps.size()):
            for shape in SHAPES:
                got = bps.broadcast(make(dtype, bps.rank(), shape), root)
                assert got.dtype == dtype
                assert np.array_equal(exact(got), exact(make(dtype, root, shape)))
    got = tf.function(lambda x: bps.broadcast(x, 0))(tf.constant([float(bps.rank())] * 3))
    assert np.array_equal(got, [0.0] * 3)
    assert message_of(lambda: bps.broadcast(tf.zeros(3), bps.size()))[0] == "ValueError"


def scenario_broadcast_variables() -> None:
    variables = [tf.Variable(make(dtype, bps.rank(), (3, 5)), trainable=False) for dtype in DTYPES]
    variables += [tf.Variable(float(bps.rank())), tf.Variable(tf.zeros((0, 2)))]
    root = bps.size() - 1
    bps.broadcast_variables(variables, root)
    for dtype, variable in zip(DTYPES, variables, strict=False):
        assert np.array_equal(exact(variable), exact(make(dtype, root, (3, 5))))
    assert variables[-2].numpy() == root
    if bps.size() > 1:
        odd = [tf.Variable(tf.zeros((3 + bps.rank(),)), name="odd")]
        error, text = message_of(lambda: bps.broadcast_variables(odd, 0))
        assert error == "MismatchError"
        assert "odd" in text
        error, _ = message_of(lambda: bps.broadcast_variables(variables[: 2 + bps.rank()], 0))
        assert error == "MismatchError"
    assert message_of(lambda: bps.broadcast_variables(variables, 99))[0] == "ValueError"
    assert message_of(tf.function(lambda: bps.broadcast_variables(variables, 0)))[0] == "RuntimeError"


def scenario_structures_scopes_and_arguments() -> None:
    structure = {"a": tf.constant([1.0]), "b": (tf.constant(2), [3.0])}
    summed = bps.push_pull(structure, average=False, name="structure", scope="here.")
    assert summed["a"][0] == bps.size()
    assert summed["b"][0] == 2 * bps.size()
    assert summed["b"][1][0] == 3 * bps.size()
    assert message_of(lambda: bps.push_pull(tf.zeros(3), average=True, op=bps.Sum))[0] == "ValueError"
    assert message_of(lambda: bps.push_pull(tf.constant(["text"])))[0] == "UnsupportedError"
    assert message_of(lambda: bps.push_pull(tf.complex(1.0, 2.0)))[0] == "UnsupportedError"
    for compression, dtype in ((bps.Compression.fp16, tf.float16), (bps.Compression.bf16, tf.bfloat16)):
        x = tf.random.stateless_normal((100,), (1, 2))
        got = bps.push_pull(x, compression=compression)
        assert got.dtype == tf.float32
        assert np.allclose(got, tf.cast(tf.cast(x, dtype), tf.float32), rtol=1e-2)


def scenario_sparse() -> None:
    rank, size = bps.rank(), bps.size()

    def slices(rows: int) -> tf.IndexedSlices:
        values = tf.reshape(tf.range(rows * 2, dtype=tf.float32), (rows, 2)) + float(rank)
        return tf.IndexedSlices(values, tf.range(rows, dtype=tf.int64) % 3, tf.constant((3, 2), tf.int64))

    def dense(rank: int) -> Any:
        total = np.zeros((3, 2))
        for row in range(rank + 1):
            total[row % 3] += np.array([2 * row, 2 * row + 1]) + rank
        return total

    together = sum(dense(other) for other in range(size))
    for run in (lambda f: f, tf.function):
        for average in (False, True):
            result = run(lambda average=average: bps.push_pull(slices(rank + 1), average=average))()
            assert isinstance(result, tf.IndexedSlices)
            assert np.allclose(tf.convert_to_tensor(result), together / (size if average else 1))
    if size > 1:
        nothing = bps.push_pull(slices(rank), average=False)
        assert nothing.values.shape[0] == sum(range(size))
    assert message_of(lambda: bps.push_pull(slices(1), op=bps.Max))[0] == ("ValueError")


def scenario_graphs() -> None:
    calls = []

    @tf.function
    def twice(x: Any) -> Any:
        calls.append(1)
        # Nothing orders these two but their names.
        return bps.push_pull(x, op=bps.Sum), bps.push_pull(x * 2, op=bps.Sum)

    for length in (3, 5, 3, 7):  # traced anew for each
        one, other = twice(tf.ones((length,)) * (bps.rank() + 1))
        total = sum(range(1, bps.size() + 1))
        assert np.array_equal(one, [total] * length)
        assert np.array_equal(other, [2 * total] * length)
    assert len(calls) == 3
    # Ranks may trace at different times.
    for step in range(4):
        if step != bps.rank():
            twice.get_concrete_function(tf.ones((10 + step,)))  # traced here, and not run
    one, _ = twice(tf.ones((12,)))
    assert np.array_equal(one, [bps.size()] * 12)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def unknown(x: Any) -> Any:
        reduced = bps.push_pull(x, op=bps.Sum)
        assert reduced.shape.as_list() == [None]
        return reduced

    assert np.array_equal(unknown(tf.ones(11)), [bps.size()] * 11)

    @tf.function
    def in_branches(x: Any) -> Any:
        return tf.cond(x[0] > 0, lambda: bps.push_pull(x, op=bps.Sum), lambda: bps.push_pull(-x, op=bps.Sum))

    assert np.array_equal(in_branches(tf.ones(2)), [bps.size()] * 2)
    assert np.array_equal(in_branches(-tf.ones(2)), [bps.size()] * 2)

    @tf.function
    def in_a_loop(x: Any) -> Any:
        for _ in tf.range(5):
            x = bps.push_pull(x)
        return x

    assert np.allclose(in_a_loop(tf.ones(3) * (bps.rank() + 1.0)), np.mean(range(1, bps.size() + 1)))


def scenario_errors_in_graphs() -> None:
    error, text = message_of(lambda: tf.function(lambda x: bps.push_pull(x), jit_compile=True)(tf.ones(3)))
    assert "jit_compile" in text, (error, text)
    if bps.size() == 1:
        return
    odd = tf.function(lambda x: bps.push_pull(x, name="odd"))
    error, text = message_of(lambda: odd(tf.ones(3 + bps.rank())))
    assert error in ("UnknownError", "InvalidArgumentError")
    assert "MismatchError" in text
    assert isinstance(bps.last_error(), commlib.errors.MismatchError)
    error, _ = message_of(lambda: bps.push_pull(tf.ones(3 + bps.rank()), name="odd"))
    assert error == "MismatchError"


def scenario_calls_from_one_site_have_one_key() -> None:
    session = commlib.api.session()
    declared: list[str] = []
    declare = session.declare

    def counting(name: str, nbytes: int) -> Any:
        declared.append(name)
        return declare(name, nbytes)

    session.declare = counting  # type: ignore[method-assign]
    try:
        for number in range(1000):
            bps.push_pull(tf.ones(3 + number % 2))
            bps.push_pull(tf.ones(3), name="one key")
    finally:
        del session.declare
    assert declared.count("one key") <= 1
    assert len(declared) <= 2, declared


def run() -> dict[str, str]:
    return outcomes({name: scenario for name, scenario in globals().items() if name.startswith("scenario_")})


WORKERS = [run]
SCENARIOS = [name for name in list(globals()) if name.startswith("scenario_")]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCENARIOS)
def test(name: str, size: int) -> None:
    for outcome in results_of(run, size):
        assert outcome[name] == "passed", outcome[name]
