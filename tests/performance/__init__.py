# SPDX-License-Identifier: Apache-2.0
"""What an operation costs, in units that do not depend on how fast and how busy the machine is: instructions of the
processor and calls of the kernel, counted by Callgrind and strace, and held against `recorded.toml`.
"""
