# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from commlib.config import Config
from commlib.control.security import derive_keys, load_secret, secret_path
from commlib.errors import ConfigError
from tests.control.bare import REPOSITORY

SEVERAL_MACHINES = Config(rank=0, size=2, scheduler="node0:5555")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_setting_comes_first(home: Path) -> None:
    assert load_secret(Config(secret="set")) == b"set"
    assert not (home / ".commlib").exists()


def test_it_is_made_on_first_use_for_this_user_alone_and_stays(home: Path) -> None:
    secret = load_secret(Config())
    assert len(secret) >= 32
    assert load_secret(Config()) == secret
    assert stat.S_IMODE(secret_path().stat().st_mode) == 0o600
    assert stat.S_IMODE((home / ".commlib").stat().st_mode) == 0o700
    assert [path.name for path in (home / ".commlib").iterdir()] == ["secret"]


def test_the_mask_of_the_user_does_not_open_it(home: Path) -> None:
    before = os.umask(0)
    try:
        load_secret(Config())
    finally:
        os.umask(before)
    assert stat.S_IMODE(secret_path().stat().st_mode) == 0o600


@pytest.mark.timeout(60)
def test_processes_that_make_it_at_once_agree(home: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.control.bare import use_bare_package; use_bare_package()\n"
        "from commlib.config import Config\n"
        "from commlib.control.security import load_secret\n"
        "sys.stdin.readline(); print(load_secret(Config()).decode())\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(REPOSITORY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    secrets = {child.communicate(timeout=30)[0].strip() for child in children}
    assert len(secrets) == 1
    assert secrets == {load_secret(Config()).decode()}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o620])
def test_a_file_that_others_can_read_or_write_is_refused(home: Path, mode: int) -> None:
    load_secret(Config())
    secret_path().chmod(mode)
    with pytest.raises(ConfigError, match=r"mode 6\d\d.*600"):
        load_secret(Config())


def test_an_empty_or_strange_file_is_refused(home: Path) -> None:
    load_secret(Config())
    secret_path().write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        load_secret(Config())
    secret_path().unlink()
    os.mkfifo(secret_path(), 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_secret(Config())


def test_on_several_machines_it_is_used_but_not_made(home: Path) -> None:
    with pytest.raises(ConfigError, match="COMMLIB_SECRET") as caught:
        load_secret(SEVERAL_MACHINES)
    assert "copy ~/.commlib/secret" in str(caught.value)
    assert not secret_path().exists()
    secret = load_secret(Config())
    assert load_secret(SEVERAL_MACHINES) == secret


def test_hosts_that_are_one_machine_may_make_it(home: Path) -> None:
    assert load_secret(Config(rank=0, size=2, scheduler="127.0.0.1:5555"))


def test_a_home_that_cannot_be_written_is_explained(home: Path) -> None:
    (home / ".commlib").write_text("in the way")
    with pytest.raises(ConfigError, match="COMMLIB_SECRET"):
        load_secret(Config())


def test_keys_depend_on_secret_and_job_and_are_reproducible() -> None:
    keys = derive_keys(b"secret", "job")
    assert keys == derive_keys(b"secret", "job")
    for other in (derive_keys(b"Secret", "job"), derive_keys(b"secret", "jobs")):
        assert other.server_public != keys.server_public
        assert other.client_public != keys.client_public
        assert other.hello != keys.hello
    assert len({keys.server_secret, keys.client_secret, keys.server_public, keys.client_public}) == 4


def test_keys_do_not_show_what_is_secret() -> None:
    keys = derive_keys(b"secret", "job")
    assert keys.server_secret.decode() not in repr(keys)
    assert keys.client_secret.decode() not in repr(keys)
