# SPDX-License-Identifier: Apache-2.0
"""Finding out whether all ranks mean the same, before anything is sent that would not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

import commlib
from commlib.errors import MismatchError

Facts = Sequence[tuple[str, str]]  # what is said of what, in an order that is the same on all ranks

_HASH_BYTES = 7  # so that it and its opposite are int64
_NOWHERE = 1 << 32


def agree(subject: str, facts: Facts, problem: Exception | None, name: str) -> None:
    """Return if all ranks call this with equal ``facts`` and without a ``problem``; blocks.

    Otherwise every rank raises: those that have a problem raise it, the others a MismatchError (a ValueError) that
    tells of it, or of the first difference to rank 0 that there is. What is sent is called ``name``: a few bytes where
    all agree, two ranks' facts where they do not.
    """
    mine: Facts = facts if problem is None else [("", f"{type(problem).__name__}: {problem}")]
    digest = hashlib.blake2b(repr((problem is None, list(mine))).encode(), digest_size=_HASH_BYTES).digest()
    number = int.from_bytes(digest, "little")
    bounds = np.array([number, -number], np.int64)
    commlib.push_pull_(bounds, name=f"{name}.agreement", op=commlib.Min)
    if bounds[0] == -bounds[1] and problem is None:
        return
    if bounds[0] != -bounds[1]:
        _explain(subject, mine, problem, name)
    assert problem is not None
    raise problem


def _explain(subject: str, mine: Facts, problem: Exception | None, name: str) -> None:
    """Raise a MismatchError, unless this rank has a problem of its own."""
    rank, size = commlib.rank(), commlib.size()
    first: Facts = commlib.broadcast_object(mine, 0, name=f"{name}.facts")
    # Whose is the earliest difference? A problem comes before all.
    place = 0 if problem is not None else 1 + _first_difference(first, mine)
    found = np.array([place * size + rank], np.int64)
    commlib.push_pull_(found, name=f"{name}.difference", op=commlib.Min)
    place, other = divmod(int(found[0]), size)
    theirs: Facts = commlib.broadcast_object(mine, other, name=f"{name}.facts")
    if problem is not None:
        return
    if place == 0:
        raise MismatchError(f"rank {other} cannot take part: {theirs[0][1]}", tensor=name, field=subject)
    texts = {0: _spelled(first, place - 1), other: _spelled(theirs, place - 1)}
    what = "; ".join(f"on rank {number}, {text}" for number, text in texts.items())
    raise MismatchError(
        f"the ranks do not agree about the {subject}: no. {place} of them is {what}",
        tensor=name,
        field=subject,
        values=texts,
    )


def _first_difference(a: Facts, b: Facts) -> int:
    """Where they differ; far behind their ends if they do not."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if tuple(x) != tuple(y):
            return index
    return min(len(a), len(b)) if len(a) != len(b) else _NOWHERE


def _spelled(facts: Facts, index: int) -> str:
    if index >= len(facts):
        return f"missing (there are {len(facts)})"
    name, text = facts[index]
    return f"{name}: {text}"
