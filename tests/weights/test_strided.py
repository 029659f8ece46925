"""Assignments between views as copies, against torch: random chains of slices, transpositions and reshapes."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.weights.copies import Copy, check, pack
from kvtier.weights.plan import byte_strides, first_byte
from kvtier.weights.reader import extent
from kvtier.weights.strided import copies_between, overlapping


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of a tensor whose elements are all different."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.int16, torch.int32]))
    view = torch.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, view.dim() - 1))
        step = draw(st.sampled_from(["narrow", "transpose", "chunk", "unsqueeze", "step"]))
        if step == "narrow":
            start = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, draw(st.integers(1, view.shape[dim] - start)))
        elif step == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif step == "chunk":
            view = draw(st.sampled_from(view.chunk(2, dim)))
        elif step == "step":
            view = view[tuple([slice(None)] * dim + [slice(None, None, 2)])]
        else:
            view = view.unsqueeze(dim)
    return view


@given(views(), st.permutations(range(8)), st.integers(0, 2))
def test_the_copies_do_what_torch_does(source: torch.Tensor, order: list[int], pad: int) -> None:
    dims = [dim for dim in order if dim < source.dim()]
    wide = torch.zeros([source.shape[dim] + pad for dim in dims], dtype=source.dtype)
    target = wide
    for dim, of_source in enumerate(dims):
        target = target.narrow(dim, pad, source.shape[of_source])
    target = target.permute([dims.index(dim) for dim in range(source.dim())])
    expected = wide.clone()
    torch.as_strided(expected, target.shape, target.stride(), target.storage_offset()).copy_(source)
    one = (0, first_byte(source), byte_strides(source))
    other = (0, first_byte(target), byte_strides(target))
    copies = copies_between(source.shape, one, other, source.element_size())
    assert copies is not None and not overlapping(copies)
    assert sum(copy.rows * copy.row_bytes for copy in copies) == source.numel() * source.element_size()
    file = torch.empty(0, dtype=torch.uint8).set_(source.untyped_storage()).numpy()
    memory = torch.empty(0, dtype=torch.uint8).set_(wide.untyped_storage()).numpy()
    check(pack(copies), 1, np.array([extent(wide)]))
    for copy in copies:
        for row in range(copy.rows):
            here, there = copy.offset + row * copy.source_pitch, copy.target_offset + row * copy.target_pitch
            memory[there : there + copy.row_bytes] = file[here : here + copy.row_bytes]
    assert torch.equal(wide, expected)


def test_slices_are_few_copies() -> None:
    """Column-parallel: one range. Row-parallel, also of all experts at once: one rectangle."""
    whole = torch.empty(8, 64, 128, dtype=torch.bfloat16)
    for view, rows, row_bytes in (
        (whole[2:4], 1, 2 * 64 * 256),
        (whole[1].narrow(0, 16, 16), 1, 16 * 256),
        (whole[1].narrow(1, 64, 64), 64, 128),
        (whole.narrow(2, 64, 64), 8 * 64, 128),
    ):
        target = torch.empty(view.shape, dtype=view.dtype)
        one, other = (0, first_byte(view), byte_strides(view)), (0, 0, byte_strides(target))
        assert [(c.rows, c.row_bytes) for c in copies_between(view.shape, one, other, 2) or ()] == [(rows, row_bytes)]


def test_expanded_sources_and_large_transpositions_are_converted() -> None:
    assert copies_between((4, 4), (0, 0, (0, 2)), (0, 0, (8, 2)), 2) is None
    assert copies_between((512, 512), (0, 0, (2, 1024)), (0, 0, (1024, 2)), 2) is None


def test_overlaps() -> None:
    def rows(offset: int, row_bytes: int, pitch: int) -> Copy:
        return Copy(0, 0, 4, row_bytes, row_bytes, 0, offset, pitch)

    assert not overlapping([rows(0, 8, 16), rows(8, 8, 16)])
    assert overlapping([rows(0, 9, 16), rows(8, 8, 16)])
    assert overlapping([rows(0, 8, 16), rows(8, 8, 24)])
    assert not overlapping([rows(0, 16, 16), rows(64, 16, 16)])
    assert overlapping([rows(0, 16, 16), rows(63, 16, 16)])


def test_a_row_that_crosses_into_the_next_column_overlaps() -> None:
    """Bytes 8 to 11 of each 10 are the last two of a row, and the first two of the one below."""
    assert overlapping([Copy(0, 0, 3, 4, 4, 0, 8, 10), Copy(0, 0, 3, 3, 3, 0, 10, 10)])


def test_an_empty_view_has_no_copies() -> None:
    assert copies_between((0, 3), (0, 0, (6, 2)), (0, 0, (6, 2)), 2) == []
