# SPDX-License-Identifier: Apache-2.0
"""Jobs on this machine: which processes they are made of, and what keeps those together.

`commlib run` and `commlib.run` both stand on this room.
"""
