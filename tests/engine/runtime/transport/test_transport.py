import pytest
import torch

from flowrun.engine.runtime.transport.transport import pack, put, reduce_messages

WHOLE = torch.arange(1300.0 * 6).reshape(6, 1300)  # its columns are rows of what follows
PIECES = {
    "whole": WHOLE.t(),
    "many rows": WHOLE.t()[100:1250],
    "few rows": WHOLE.t()[3:5],
    "one row": WHOLE.t()[3:4],
    "columns": WHOLE.t()[:, 2:5],
    "one column": WHOLE.t()[10:1290, 2:3],
    "rows that lie apart": WHOLE[:, 7:900],
    "three dims": WHOLE.t()[:1200].reshape(30, 40, 6).permute(2, 0, 1),
    "nothing": WHOLE.t()[:0],
}
ANY_PIECE = pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)


@ANY_PIECE
def test_a_message_has_the_rows_of_its_tensors(piece: torch.Tensor) -> None:
    scalar = torch.tensor(5.0)
    message = pack([scalar, piece, scalar])
    assert message.tolist() == [5.0, *piece.flatten().tolist(), 5.0]


@ANY_PIECE
def test_sums_are_new_memory_in_rows_and_change_none_of_the_messages(piece: torch.Tensor) -> None:
    rows = piece.contiguous()
    others = [rows.clone() + k for k in (1.0, 2.0)]
    given = [piece, *others]
    before = [each.clone() for each in given]
    for messages in (given, given[::-1], [others[0], piece], [piece, piece + 1.0]):
        found = reduce_messages(messages, "sum")
        assert found.is_contiguous()
        assert torch.equal(found, sum(each.contiguous() for each in messages))
        assert all(found.data_ptr() != each.data_ptr() for each in messages if each.numel())
    assert all(map(torch.equal, given, before))


def test_tensors_of_another_shape_than_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="8 elements do not fill a message of 16: one has another"):
        put([torch.ones(8)], torch.empty(16))
