# SPDX-License-Identifier: Apache-2.0
"""The control plane: who is in the job, what names mean, and the sockets and memory that the core is given.

Nothing here needs the compiled extension or NumPy. Start reading at :mod:`commlib.control.bootstrap`.
"""
