# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.control.messages import UNNAMED_COUNT, UNNAMED_KINDS, Declaration
from commlib.control.registry import MAX_PARTS, Registry, describe_name, unnamed_name
from commlib.errors import ConfigError

PARTITION = 64 * 1024

names = st.sampled_from(["a", "b", "c", "d", unnamed_name("push_pull", 3)])
requests = st.lists(st.tuples(names, st.integers(0, 5 * PARTITION)), max_size=30)


def rows(declaration: Declaration) -> list[int]:
    return [first + i for first, parts in declaration.extents for i in range(parts)]


@settings(max_examples=200, deadline=None)
@given(requests)
def test_no_row_key_or_place_is_given_twice_and_none_ever_changes(asked: list[tuple[str, int]]) -> None:
    registry = Registry(PARTITION)
    known_rows: dict[str, list[int]] = {}
    places: dict[str, tuple[int, int]] = {}
    for name, total_bytes in asked:
        (found,) = registry.declare([(name, total_bytes)])
        assert len(rows(found)) == max(1, -(-total_bytes // PARTITION))
        assert places.setdefault(name, (found.declared_key, found.cursor)) == (found.declared_key, found.cursor)
        before = known_rows.get(name, [])
        common = min(len(before), len(rows(found)))
        assert rows(found)[:common] == before[:common]
        known_rows[name] = max(before, rows(found), key=len)
    taken = [row for some in known_rows.values() for row in some]
    assert len(taken) == len(set(taken))
    keys = [key for key, _ in places.values()]
    assert len(keys) == len(set(keys))


@settings(max_examples=200, deadline=None)
@given(requests, st.lists(st.integers(1, 6), max_size=10))
def test_batches_are_as_good_as_single_requests(asked: list[tuple[str, int]], cuts: list[int]) -> None:
    single, batched = Registry(PARTITION), Registry(PARTITION)
    one_by_one = [single.declare([request])[0] for request in asked]
    answers, rest = [], list(asked)
    for cut in [*cuts, len(asked)]:
        answers += batched.declare(rest[:cut])
        rest = rest[cut:]
    assert answers == one_by_one


def test_all_who_ask_for_as_many_parts_get_the_same_answer_whenever_they_ask() -> None:
    registry = Registry(PARTITION)
    small, other, large = registry.declare([("a", PARTITION), ("b", 1), ("a", 3 * PARTITION)])
    assert other.declared_key == small.declared_key + 1
    assert len(large.extents) == 2
    assert registry.declare([("a", 10)]) == [small]
    assert registry.declare([("a", 3 * PARTITION - 1)]) == [large]
    (middle,) = registry.declare([("a", 2 * PARTITION)])
    assert rows(middle) == rows(large)[:2]


def test_the_cursor_advances_by_the_size_rounded_up_to_64_and_at_least_64() -> None:
    registry = Registry(PARTITION)
    cursors = [found.cursor for found in registry.declare([("a", 0), ("b", 1), ("c", 64), ("d", 65), ("e", 7)])]
    assert [b - a for a, b in itertools.pairwise(cursors)] == [64, 64, 64, 128]


def test_tensors_of_more_than_4_gib_are_counted_right() -> None:
    registry = Registry(4 << 20)
    huge, after = registry.declare([("huge", (5 << 30) + 1), ("after", 1)])
    assert len(rows(huge)) == 1281
    assert after.cursor - huge.cursor == (5 << 30) + 64


def test_unnamed_keys_are_what_the_welcome_says() -> None:
    registry = Registry(PARTITION)
    keys = [registry.unnamed[kind] for kind in UNNAMED_KINDS]
    for kind, first in zip(UNNAMED_KINDS, keys, strict=True):
        for index in (0, 1, 500, UNNAMED_COUNT - 1):
            (found,) = registry.declare([(unnamed_name(kind, index), PARTITION)])
            assert found.declared_key == first.first_key + index
            assert found.extents == ((first.first_row + index, 1),)
            assert found.cursor == first.first_cursor + index * first.cursor_stride
    assert keys[0].cursor_stride == 64 * 1024
    assert {key.first_key for key in keys} == {0, UNNAMED_COUNT, 2 * UNNAMED_COUNT}
    (named,) = registry.declare([("named", 1)])
    assert named.declared_key == len(UNNAMED_KINDS) * UNNAMED_COUNT
    assert named.cursor == len(UNNAMED_KINDS) * UNNAMED_COUNT * 64 * 1024


def test_an_unnamed_operation_that_grows_keeps_its_key_and_first_row() -> None:
    registry = Registry(PARTITION)
    keys = registry.unnamed["push_pull"]
    (grown,) = registry.declare([(unnamed_name("push_pull", 17), 3 * PARTITION)])
    assert grown.declared_key == keys.first_key + 17
    assert grown.extents[0] == (keys.first_row + 17, 1)
    assert grown.extents[1][1] == 2


@pytest.mark.parametrize("name", ["\0push_pull.1024", "\0all_to_all.1", "\0", "\0push_pull"])
def test_names_of_our_own_form_are_not_for_users(name: str) -> None:
    with pytest.raises(ConfigError, match="zero byte"):
        Registry(PARTITION).declare([(name, 1)])


def test_a_batch_with_an_error_declares_nothing() -> None:
    registry = Registry(PARTITION)
    before = registry.declare([("first", 1)])[0]
    with pytest.raises(ConfigError, match=r'tensor "big".*COMMLIB_PARTITION_BYTES'):
        registry.declare([("good", 1), ("big", MAX_PARTS * PARTITION + 1)])
    after = registry.declare([("next", 1)])[0]
    assert after.declared_key == before.declared_key + 1
    assert after.cursor == before.cursor + 64


def test_rows_run_out_with_an_error_that_says_so() -> None:
    reserved = len(UNNAMED_KINDS) * UNNAMED_COUNT
    registry = Registry(PARTITION, max_rows=reserved + 5)
    registry.declare([("a", 3 * PARTITION)])
    with pytest.raises(ConfigError, match=r"3 partitions, and 2 of \d+ are left"):
        registry.declare([("b", PARTITION), ("c", 2 * PARTITION)])
    registry.declare([("a", 5 * PARTITION)])
    with pytest.raises(ConfigError, match="no room"):
        registry.declare([("z", 0)])
    assert registry.declare([("a", 1)])


def test_the_largest_tensor_has_exactly_as_many_parts_as_a_key_can_count() -> None:
    (found,) = Registry(PARTITION).declare([("a", MAX_PARTS * PARTITION)])
    assert len(rows(found)) == MAX_PARTS


def test_names_for_people() -> None:
    assert describe_name("grad.0", 5) == 'tensor "grad.0"'
    assert describe_name(unnamed_name("barrier", 17), 1) == "unnamed barrier number 18"
    assert describe_name(unnamed_name("push_pull", 0), 3) == "unnamed push_pull number 2049"
