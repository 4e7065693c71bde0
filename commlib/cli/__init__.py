# SPDX-License-Identifier: Apache-2.0
"""The command line: `commlib run`, `server`, `scheduler`, `bench` and `doctor`.

Each command imports what it needs when it runs, so that `commlib run` starts quickly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import click

from commlib._version import __version__

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="commlib", message="%(prog)s %(version)s")
def main() -> None:
    """Sums and averages of named buffers over all processes of a training job."""


@main.command("run", context_settings={"allow_interspersed_args": False})
@click.option("-n", "--np", "workers", type=click.IntRange(min=1), required=True, help="Number of worker processes.")
@click.option("--servers", type=click.IntRange(min=0), default=0, help="Number of dedicated servers.  [default: 0]")
@click.option("--no-prefix", is_flag=True, help="Leave the output of the processes alone.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run_command(workers: int, servers: int, no_prefix: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND in several processes on this host, for instance `commlib run -n 4 -- python train.py`.

    Each process learns its place from COMMLIB_RANK, COMMLIB_SIZE, COMMLIB_LOCAL_RANK and COMMLIB_LOCAL_SIZE. Lines they
    print get their rank in front. Rank 0 reads standard input. OMP_NUM_THREADS, if not set, becomes each worker's share
    of the CPUs.

    When a process fails, the others have 3 seconds to end by themselves, then they are stopped. The exit status is that
    of the process that failed first; 128 + number for a signal.
    """
    from commlib.launch.job import local_job, prefixes_of
    from commlib.launch.supervisor import supervise

    with _errors_in_words("run"):
        members = local_job(command, workers=workers, servers=servers)
    sys.exit(supervise(members, prefixes=None if no_prefix else prefixes_of(members)).status)


@main.command("server")
def server_command() -> None:
    """Serve a job as an additional, dedicated server, until its workers have ended.

    It needs COMMLIB_SCHEDULER (host:port) and COMMLIB_SECRET, and learns the rest from the scheduler. The workers wait
    for as many servers as their COMMLIB_NUM_SERVERS says.
    """
    from commlib.config import Config

    with _errors_in_words("server"):
        config = Config.from_environment(role="server")
        _log_to_stderr("server", config.log_level)
        from commlib.server import serve

        serve(config)


@main.command("scheduler")
def scheduler_command() -> None:
    """Be the scheduler of a job at COMMLIB_SCHEDULER (host:port), until its members have ended.

    Only needed where rank 0 shall not start one itself; the members then have COMMLIB_SCHEDULER_EXTERNAL=1.
    """
    from commlib.config import Config
    from commlib.control.scheduler_process import run_scheduler

    with _errors_in_words("scheduler"):
        config = Config.from_environment(role="scheduler")
        _log_to_stderr("scheduler", config.log_level)
        sys.exit(run_scheduler(config))


@main.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print findings as JSON.")
def doctor_command(as_json: bool) -> None:
    """Say what works on this machine, and what follows from what does not.

    The exit status is 0 unless something is missing that commlib cannot do without.
    """
    from commlib.cli.doctor import examine, show

    findings = examine()
    show(findings, as_json=as_json)
    sys.exit(1 if any(finding.verdict == "missing" for finding in findings) else 0)


@main.command("bench")
@click.option("-n", "--np", "workers", type=click.IntRange(min=1), default=2, show_default=True, help="Processes.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), default=None, help="Write results there, too.")
def bench_command(workers: int, json_file: str | None) -> None:
    """Measure sums of float32 buffers, in place, over several processes on this host, and compare them with memcpy.

    Latency is the median over rounds of the slowest process. Algorithm bandwidth is size / latency; bus bandwidth is
    that times 2 (n - 1) / n, as nccl-tests define it. The last column is the latency divided by the time that a memcpy
    of the same size takes when all processes do one at once, measured in the same rounds.
    """
    from commlib.cli.bench import measure, save, show

    if json_file is not None and not os.access(os.path.dirname(os.path.abspath(json_file)), os.W_OK):
        raise click.BadParameter(f"{json_file} cannot be written", param_hint="--json")
    with _errors_in_words("bench"):
        report = measure(workers)
    show(report)
    if json_file is not None:
        save(report, json_file)


@contextlib.contextmanager
def _errors_in_words(command: str) -> Iterator[None]:
    """What is wrong with the surroundings is said in one line, without a traceback."""
    from commlib.errors import CommlibError

    try:
        yield
    except CommlibError as error:
        click.echo(f"commlib {command}: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _log_to_stderr(command: str, level: int) -> None:
    logging.basicConfig(format=f"commlib {command}: %(message)s")
    logging.getLogger("commlib").setLevel(level)
