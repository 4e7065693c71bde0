# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

from commlib import errors
from commlib.errors import Code, CommlibError, MismatchError, PeerLostError, from_code

ERRC = Path(__file__).resolve().parent.parent.parent / "src" / "base" / "errc.hpp"

BUILTINS: dict[type[CommlibError], type[Exception]] = {
    errors.MismatchError: ValueError,
    errors.DuplicateNameError: ValueError,
    errors.PeerLostError: ConnectionError,
    errors.OperationTimeout: TimeoutError,
    errors.AuthenticationError: PermissionError,
    errors.UnsupportedError: TypeError,
    errors.ConfigError: ValueError,
    errors.NotInitializedError: RuntimeError,
}


def test_codes_are_those_of_the_core() -> None:
    body = re.search(r"enum class Errc[^{]*\{(.*?)\};", ERRC.read_text(), re.DOTALL)
    assert body is not None
    theirs = {name: int(number) for name, number in re.findall(r"k(\w+) = (\d+)", body[1])}
    ours = {"".join(part.capitalize() for part in code.name.split("_")): int(code) for code in Code}
    assert ours == theirs


def test_every_class_is_also_the_builtin_one_would_catch() -> None:
    for cls, builtin in BUILTINS.items():
        assert issubclass(cls, CommlibError)
        assert issubclass(cls, builtin)


@pytest.mark.parametrize("code", list(Code))
def test_from_code_keeps_the_code_and_the_words(code: Code) -> None:
    error = from_code(code, "these words")
    assert error.code == code
    assert "these words" in str(error)


def test_from_code_chooses_the_class() -> None:
    for cls in BUILTINS:
        assert type(from_code(cls.default_code)) is cls
    assert type(from_code(Code.OUT_OF_MEMORY)) is CommlibError
    assert type(from_code(4711, "unheard of")) is CommlibError


def test_after_a_shutdown_the_message_says_so() -> None:
    error = from_code(Code.SHUT_DOWN)
    assert isinstance(error, errors.NotInitializedError)
    assert "shut down" in str(error)
    assert "shut down" in str(from_code(Code.SHUT_DOWN, "no operations now"))


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"])
def test_errors_cross_process_borders_whole(again: object) -> None:
    assert callable(again)
    mismatch = again(MismatchError("words", tensor="w", field="shape", values={0: (3, 4), 2: (4, 3)}))
    assert (str(mismatch), mismatch.tensor, mismatch.field) == ("words", "w", "shape")
    assert mismatch.values == {0: (3, 4), 2: (4, 3)}
    lost = again(PeerLostError("gone", rank=3, host="a", cause="killed"))
    assert (str(lost), lost.rank, lost.host, lost.cause, lost.code) == ("gone", 3, "a", "killed", Code.PEER_LOST)
