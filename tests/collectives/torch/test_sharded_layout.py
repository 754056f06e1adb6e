"""The buffer that a unit of FSDP2 reduces: the pieces of torch.chunk, padded, one parameter after another."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from collectives.torch.sharded_layout import ShardedParameter, UnitLayout  # noqa: E402

SHAPES = [((5, 2), 0), ((3,), 0), ((1, 4, 2), 0), ((8, 3), 0), ((2, 4, 3), 1), ((3, 8), 1)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_row_has_the_pieces_of_torch_chunk_one_after_another(ranks: int) -> None:
    """`torch._chunk_cat` makes the buffer in fully_shard; along other axes pieces are stacked before."""
    wholes = [torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) for shape, _ in SHAPES]
    parameters = tuple(
        ShardedParameter(f"p{number}", shape, axis, ranks) for number, (shape, axis) in enumerate(SHAPES)
    )
    layout = UnitLayout(parameters)
    stacked = [
        torch.cat(torch.chunk(whole, ranks, dim=axis)) if axis else whole
        for whole, (_, axis) in zip(wholes, SHAPES, strict=True)
    ]
    right = torch._chunk_cat(stacked, dim=0, num_chunks=ranks)
    rows = layout.rows({f"p{number}": one.numpy() for number, one in enumerate(wholes)}, "float32")
    assert rows.tolist() == right.reshape(ranks, -1).tolist()
    for name, found in layout.whole(rows).items():
        assert found.tolist() == wholes[int(name[1:])].tolist()


def test_a_local_part_has_no_padding_and_comes_back_to_its_row() -> None:
    layout = UnitLayout(
        tuple(ShardedParameter(f"p{i}", shape, axis, 4) for i, (shape, axis) in enumerate(SHAPES))
    )
    values = {one.name: torch.rand(one.shape).numpy() for one in layout.parameters}
    rows = layout.rows(values, "float32")
    for rank, row in enumerate(rows):
        local = layout.local(row, rank)
        assert layout.line(local, "float32").tolist() == row.tolist()
        for (shape, axis), (name, found) in zip(SHAPES, local.items(), strict=True):
            pieces = torch.chunk(torch.from_numpy(values[name]), 4, dim=axis)
            right = pieces[rank].tolist() if rank < len(pieces) else []
            assert found.tolist() == right, (shape, axis)
