# SPDX-License-Identifier: Apache-2.0
"""The operations of torch.distributed as plans (see `work`) over the two of the core, push_pull and broadcast.

The first stage of each plan is the one in which ranks that disagree find out; what has several parts agrees first, by
a sum of nothing. Data that is only moved travels as bytes, so that any dtype will do.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from commlib import ReduceOp
from commlib.errors import MismatchError, UnsupportedError
from commlib.torch.distributed.lane import REDUCTIONS, Lane
from commlib.torch.distributed.work import Interim, Plan
from commlib.torch.ops import bytes_of, check, dense_of

SMALL_BYTES = 32 << 10  # of all ranks together; so little is gathered by one sum

BITWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}

# --- Memory


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history, itself if its elements lie in order without gaps, else a copy that does."""
    check(tensor)
    return dense_of(tensor.detach())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Its memory holds its elements in order, and as they are."""
    return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def room(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous memory for what is to be written to the tensor: its own, if that is so."""
    return tensor.detach() if _is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)


def write_back(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Bring a result to where the tensor is, unless it is there."""
    if tensor.data_ptr() != result.data_ptr() or not _is_plain(tensor):
        tensor.detach().copy_(result.view(tensor.shape))


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all of them, one after another: the memory itself where there is one contiguous tensor."""
    parts = [bytes_of(dense(tensor)) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(data: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """The inverse of :func:`packed`: into the tensors, where the bytes are not there already."""
    for tensor, part in zip(tensors, data.split([tensor.nbytes for tensor in tensors]), strict=True):
        if _is_plain(tensor):
            if tensor.data_ptr() != part.data_ptr():
                bytes_of(tensor.detach()).copy_(part)
        else:
            landed = room(tensor)
            bytes_of(landed).copy_(part)
            tensor.detach().copy_(landed)


def _landing(tensors: Sequence[torch.Tensor] | None, count: int) -> torch.Tensor:
    """Where the bytes of these tensors can be received."""
    if tensors is not None and len(tensors) == 1 and _is_plain(tensors[0]):
        return bytes_of(tensors[0].detach())
    return torch.empty(count, dtype=torch.uint8)


# --- Plans


def combine(lane: Lane, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], op: str) -> Plan:
    """Each source of all ranks into its target, both contiguous, which may be the same."""
    if op in BITWISE:
        yield from _fold(lane, sources, targets, op)
        return
    if op not in ("SUM", "AVG") and any(source.is_complex() for source in sources):
        raise UnsupportedError(f"complex numbers have no {op}")
    pairs = [
        (_numbers(source), _numbers(source) if target is source else _numbers(target))
        for source, target in zip(sources, targets, strict=True)
    ]
    if len(pairs) == 1:
        yield [lane.reduce(*pairs[0], REDUCTIONS[op])]
    else:
        yield Interim([lane.agree()])
        yield [lane.reduce(*pair, REDUCTIONS[op], part) for part, pair in enumerate(pairs)]


def _fold(lane: Lane, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], op: str) -> Plan:
    """What the core cannot compute: gather everything, and do it here."""
    for source in sources:
        if source.is_floating_point() or source.is_complex():
            raise UnsupportedError(f"{op} of {source.dtype} has no meaning")
    rows = [[torch.empty_like(source) for source in sources] for _ in range(lane.size)]
    yield from gather(lane, sources, rows)
    for target, *parts in zip(targets, *rows, strict=True):
        target.copy_(functools.reduce(BITWISE[op], parts))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """What the core can add: of complex numbers, the parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def all_reduce(lane: Lane, tensors: Sequence[torch.Tensor], op: str) -> Plan:
    """Each tensor, in place."""
    sources = [dense(tensor) for tensor in tensors]
    yield from combine(lane, sources, sources, op)
    for tensor, result in zip(tensors, sources, strict=True):
        write_back(tensor, result)


def sparse_all_reduce(lane: Lane, tensor: torch.Tensor, op: str) -> Plan:
    """The sum or average of sparse tensors, in place. Each rank may have another number of elements."""
    own = tensor.detach().coalesce()
    counts = torch.zeros(lane.size, dtype=torch.int64)
    counts[lane.rank] = own._nnz()
    yield Interim([lane.reduce(counts, counts, ReduceOp.Sum)])
    indices, values = own.indices(), own.values()
    rows = [
        [indices.new_empty((indices.shape[0], count)), values.new_empty((count, *values.shape[1:]))]
        for count in counts.tolist()
    ]
    yield from move(lane, packed([indices, values]), rows, [sum(t.nbytes for t in row) for row in rows])
    total = torch.sparse_coo_tensor(
        torch.cat([row[0] for row in rows], dim=1), torch.cat([row[1] for row in rows]), tensor.shape
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(
            total / lane.size if op == "AVG" else total
        )  # not into a detached one: that has elements of its own


def reduce(lane: Lane, tensor: torch.Tensor, op: str, root: int) -> Plan:
    """Into the root's tensor; the others' stay as they are."""
    source = dense(tensor)
    is_root = lane.rank == root
    yield from combine(lane, [source], [source if is_root else torch.empty_like(source)], op)
    if is_root:
        write_back(tensor, source)


def reduce_scatter(lane: Lane, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str) -> Plan:
    """This rank's part of what is reduced, of a list of one tensor for each rank."""
    whole = torch.cat([dense(each).view(-1) for each in inputs])
    yield from combine(lane, [whole], [whole], op)
    write_back(output, whole.split([each.numel() for each in inputs])[lane.rank])


def reduce_scatter_rows(lane: Lane, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: str) -> Plan:
    """The same, several at once, each input one tensor with the parts of all ranks in a row."""
    sources = [dense(each).view(-1) for each in inputs]
    targets = [torch.empty_like(source) for source in sources]
    yield from combine(lane, sources, targets, op)
    for output, target in zip(outputs, targets, strict=True):
        write_back(output, target.tensor_split(lane.size)[lane.rank])


def broadcast(lane: Lane, tensor: torch.Tensor, root: int) -> Plan:
    """The root's tensor into that of all others. Also a message, between two."""
    data = dense(tensor)
    yield [lane.broadcast(bytes_of(data), root)]
    if lane.rank != root:
        write_back(tensor, data)


def gather(lane: Lane, inputs: Sequence[torch.Tensor], rows: Sequence[Sequence[torch.Tensor] | None]) -> Plan:
    """The inputs of rank r into the tensors of row r; a row that is None is not wanted here."""
    data = packed(inputs)
    counts = [data.numel() if row is None else sum(tensor.nbytes for tensor in row) for row in rows]
    if sum(counts) > SMALL_BYTES:
        yield Interim([lane.agree()])
    yield from move(lane, data, rows, counts)


def gather_rows(lane: Lane, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Plan:
    """Each output gets those of all ranks in a row."""
    rooms = [room(output) for output in outputs]
    rows = list(zip(*(each.view(-1).tensor_split(lane.size) for each in rooms), strict=True))
    yield from gather(lane, inputs, rows)
    for output, each in zip(outputs, rooms, strict=True):
        write_back(output, each)


def move(lane: Lane, data: torch.Tensor, rows: Sequence[Sequence[torch.Tensor] | None], counts: Sequence[int]) -> Plan:
    """Bytes, `counts[r]` of rank r, to everybody. If they are few, this is a stage in which ranks may disagree."""
    if sum(counts) <= SMALL_BYTES:
        # What is not there is zero, so one sum brings everything to everybody.
        board = torch.zeros(sum(counts), dtype=torch.uint8)
        pieces = list(board.split(list(counts)))
        pieces[lane.rank].copy_(data)
        yield [lane.reduce(board, board, ReduceOp.Sum)]
    else:
        pieces = [
            data if rank == lane.rank else _landing(row, count)
            for rank, (row, count) in enumerate(zip(rows, counts, strict=True))
        ]
        yield [lane.broadcast(piece, root, root) for root, piece in enumerate(pieces)]
    for row, piece in zip(rows, pieces, strict=True):
        if row is not None:
            unpack(piece, row)


def scatter(lane: Lane, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Plan:
    """Tensor r of the root's inputs to rank r, by a broadcast of them all."""
    data = packed(inputs) if lane.rank == root else torch.empty(output.nbytes * lane.size, dtype=torch.uint8)
    yield [lane.broadcast(data, root)]
    unpack(data.tensor_split(lane.size)[lane.rank], [output])


def all_to_all(
    lane: Lane,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> Plan:
    """inputs[r] to rank r, outputs[r] from rank r. Who sends how much to whom is exchanged first."""
    size, rank = lane.size, lane.rank
    table = torch.zeros((2, size, size), dtype=torch.int64)  # bytes: what row sends to column, what column expects
    table[0, rank] = torch.tensor([tensor.nbytes for tensor in inputs])
    table[1, :, rank] = torch.tensor([tensor.nbytes for tensor in outputs])
    yield Interim([lane.reduce(table, table, ReduceOp.Sum)])
    if not torch.equal(table[0], table[1]):
        _refuse(lane, table)
    counts = table[0].sum(dim=1).tolist()
    data = packed(inputs)
    offsets = [list(accumulate(row, initial=0))[rank] for row in table[0].tolist()]
    if sum(counts) <= SMALL_BYTES:
        board = torch.zeros(sum(counts), dtype=torch.uint8)
        pieces = board.split(counts)
        pieces[rank].copy_(data)
        yield [lane.reduce(board, board, ReduceOp.Sum)]
        for root in range(size):
            unpack(pieces[root][offsets[root] :][: outputs[root].nbytes], [outputs[root]])
        return
    for root in range(size):  # one after another, because everybody receives what everybody sends
        piece = data if root == rank else torch.empty(counts[root], dtype=torch.uint8)
        yield Interim([lane.broadcast(piece, root)])
        unpack(piece[offsets[root] :][: outputs[root].nbytes], [outputs[root]])


def _refuse(lane: Lane, table: torch.Tensor) -> None:
    sender, receiver = (table[0] != table[1]).nonzero()[0].tolist()
    members, (sent, expected) = lane.channel.ranks, table[:, sender, receiver].tolist()
    raise MismatchError(
        f"{lane.subject}: the ranks disagree: rank {members[sender]} sends {sent} bytes to rank {members[receiver]}, "
        f"which expects {expected}",
        tensor=lane.subject,
        field="shape",
        values={members[sender]: sent, members[receiver]: expected},
    )


def all_to_all_rows(
    lane: Lane,
    output: torch.Tensor,
    source: torch.Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
) -> Plan:
    """The same with parts of one tensor, along the first dimension."""
    target = room(output)
    yield from all_to_all(lane, target.split(list(output_sizes)), source.split(list(input_sizes)))
    write_back(output, target)


def barrier(lane: Lane) -> Plan:
    """Nothing, when all are here."""
    yield [lane.agree()]


def nothing() -> Plan:
    """Nothing at all."""
    yield from ()


def take(waiting: deque[torch.Tensor], target: torch.Tensor) -> Plan:
    """The next of some tensors into another one, here."""
    write_back(target, waiting.popleft())
    yield from ()
