# SPDX-License-Identifier: Apache-2.0
"""`python -m commlib.cli` is the command `commlib`."""

from commlib.cli import main

if __name__ == "__main__":
    main(prog_name="commlib")
