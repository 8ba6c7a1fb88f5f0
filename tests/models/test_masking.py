"""The block-wise assignment covers the masked region exactly once, wherever the block lies."""

from collections import Counter

import pytest
import torch

from finola.errors import FinolaError
from finola.models.masking import (
    SCHEMES,
    block_assignment,
    block_corners,
    block_mask,
    patchify,
    random_corner,
    unpatchify,
)

GRIDS = [(2, 2), (4, 4), (8, 8), (12, 8), (8, 14), (16, 16), (24, 24)]


def half(grid):
    return (grid[0] // 2, grid[1] // 2)


def predictions(group):
    """The positions a group predicts, with the sources they come from."""
    v, u = group.offset
    return [((y + dy, x + dx), (y, x)) for y, x in group.sources.tolist() for dy, dx in ((v, 0), (0, u), (v, u))]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("grid", GRIDS)
def test_every_masked_position_is_predicted_exactly_once_from_a_visible_one(grid, scheme):
    for corner in block_corners(grid, half(grid)):
        mask = block_mask(grid, half(grid), corner)
        pairs = [pair for group in block_assignment(grid, half(grid), corner, scheme) for pair in predictions(group)]
        masked, visible = {tuple(p) for p in mask.nonzero().tolist()}, {tuple(p) for p in (~mask).nonzero().tolist()}
        assert Counter(target for target, _ in pairs) == dict.fromkeys(masked, 1)
        assert Counter(source for _, source in pairs) == dict.fromkeys(visible, 3)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("grid", [(16, 16), (4, 4), (12, 8)])
def test_one_two_or_four_groups_at_corner_edge_and_middle(grid, scheme):
    rows, columns = half(grid)
    for y, x in block_corners(grid, half(grid)):
        inside = (0 < y < rows) + (0 < x < columns)
        assert len(block_assignment(grid, half(grid), (y, x), scheme)) == 2**inside


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_papers_grid_has_81_positions_192_targets_and_4_28_49_of_each_kind(scheme):
    corners = block_corners((16, 16), (8, 8))
    assert len(set(corners)) == 81
    assignments = [block_assignment(corner=corner, scheme=scheme) for corner in corners]
    assert Counter(map(len, assignments)) == {1: 4, 2: 28, 4: 49}
    assert {sum(len(predictions(group)) for group in groups) for groups in assignments} == {192}


@pytest.mark.parametrize("corner, drawing", [
    ((0, 0), "AAaa AAaa aaaa aaaa"), ((0, 1), "aABb aABb aabb aabb"), ((1, 1), "aabb aABb cCDd ccdd"),
    ((2, 1), "aabb aabb aABb aABb"), ((2, 2), "aaaa aaaa aaAA aaAA"),
])
def test_outward_groups_on_a_small_grid_as_drawn(corner, drawing):
    drawn = {}
    for letter, group in zip("abcd", block_assignment((4, 4), (2, 2), corner), strict=False):
        drawn.update({target: letter for target, _ in predictions(group)})
        drawn.update({source: letter.upper() for _, source in predictions(group)})
    assert " ".join("".join(drawn[y, x] for x in range(4)) for y in range(4)) == drawing


def test_offsets_and_sources():
    groups = {g.offset: g.sources for g in block_assignment(corner=(5, 3))}
    assert {offset: len(sources) for offset, sources in groups.items()} == {(-5, -3): 15, (-5, 5): 25, (3, -3): 9,
                                                                            (3, 5): 15}
    assert groups[3, -3].dtype == torch.int64
    assert groups[3, -3].tolist() == [[y, x] for y in (10, 11, 12) for x in (3, 4, 5)]
    assert {g.offset for g in block_assignment(corner=(5, 3), scheme="wrap")} == {(-8, -8), (-8, 8), (8, -8), (8, 8)}


def test_the_block_floats_over_all_positions_uniformly():
    torch.manual_seed(0)
    drawn = Counter(random_corner((4, 5), (2, 3)) for _ in range(1800))
    assert set(drawn) == set(block_corners((4, 5), (2, 3))) and len(drawn) == 9
    assert all(140 < count < 260 for count in drawn.values())  # 200 each, standard deviation 13
    torch.manual_seed(7)
    first = [random_corner((16, 16), (8, 8)) for _ in range(5)]
    torch.manual_seed(7)
    assert [random_corner((16, 16), (8, 8)) for _ in range(5)] == first


def test_mask_is_true_outside_the_block():
    mask = block_mask((3, 4), (2, 2), (1, 0))
    assert mask.tolist() == [[True] * 4, [False, False, True, True], [False, False, True, True]]


def test_patches_are_crops_of_the_image_and_go_back():
    x = torch.rand(2, 3, 8, 12)
    patches = patchify(x, 4)
    assert patches.shape == (2, 2, 3, 48)
    assert torch.equal(patches[1, 1, 2].view(3, 4, 4), x[1, :, 4:8, 8:12])
    assert torch.equal(unpatchify(patches), x)


@pytest.mark.parametrize("arguments, message", [
    (((16, 16), (4, 4), (0, 0)), "grid: got 16x16 patches for a block of 4x4, expected twice"),
    (((16, 12), (8, 8), (0, 0)), "grid: got 16x12 patches for a block of 8x8"),
    (((15, 15), (7, 7), (0, 0)), "grid: got 15x15 patches for a block of 7x7"),
    (((8, 8), (9, 4), (0, 0)), "block: got 9x4 patches on a grid of 8x8"),
    (((8, 8), (0, 4), (0, 0)), "block: got 0x4 patches on a grid of 8x8"),
    (((16, 16), (8, 8), (9, 0)), r"corner: \(y0, x0\) = \(9, 0\).*8x8 block outside the 16x16 grid.*\(8, 8\)"),
    (((16, 16), (8, 8), (0, -1)), r"corner: \(y0, x0\) = \(0, -1\)"),
    (((16, 16), (8, 8), (0, 0), "inward"), "scheme: got 'inward', expected one of outward, wrap"),
])
def test_bad_geometry_is_named(arguments, message):
    with pytest.raises(FinolaError, match=message):
        block_assignment(*arguments)


@pytest.mark.parametrize("call, message", [
    (lambda: patchify(torch.zeros(1, 3, 20, 32), 16), "patch: 16 does not divide the 20x32 image"),
    (lambda: unpatchify(torch.zeros(1, 2, 2, 47)), r"patches: got shape \(1, 2, 2, 47\)"),
    (lambda: random_corner((4, 4), (5, 5)), "block: got 5x5 patches on a grid of 4x4"),
    (lambda: block_mask((4, 4), (2, 2), (3, 0)), "corner"),
])
def test_bad_images_and_blocks_are_named(call, message):
    with pytest.raises(FinolaError, match=message):
        call()
