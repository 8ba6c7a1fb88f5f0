"""The set loss of DETR: against brute force, against torchvision, and on what training data bring."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torchvision.ops import box_convert, generalized_box_iou

pytest.importorskip("scipy", reason="needs the extra 'detection'")

from finola.detection.matcher import CLASS, GIOU, L1, generalised_iou, match, set_losses

LAYERS, QUERIES, CLASSES = 2, 5, 3


def boxes(*shape: int) -> torch.Tensor:
    """Boxes (..., 4), centre and sides, inside the image."""
    sides = 0.05 + 0.4 * torch.rand(*shape, 2)
    return torch.cat([sides / 2 + (1 - sides) * torch.rand(*shape, 2), sides], dim=-1)


def targets(*counts: int) -> list[dict]:
    return [{"boxes": boxes(count), "labels": torch.randint(CLASSES, (count,))} for count in counts]


def outputs(pictures: int, queries: int = QUERIES) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(LAYERS, pictures, queries, CLASSES + 1), boxes(LAYERS, pictures, queries)


def test_generalised_iou_is_torchvisions():
    a, b = boxes(6), boxes(4)
    expected = generalized_box_iou(box_convert(a, "cxcywh", "xyxy"), box_convert(b, "cxcywh", "xyxy"))
    torch.testing.assert_close(generalised_iou(a[:, None], b[None]), expected)


def test_boxes_without_area_give_finite_overlaps_and_gradients():
    point = torch.tensor([[0.5, 0.5, 0.0, 0.0]], requires_grad=True)
    overlap = generalised_iou(point, point)
    overlap.sum().backward()
    assert overlap.isfinite().all() and point.grad.isfinite().all()


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_matching_has_the_least_cost(count):
    """Every assignment of objects to queries is tried."""
    logits, found = outputs(1)
    wanted = targets(count)
    layer, picture, query, which = match(logits, found, wanted)
    assert len(which) == LAYERS * count and not picture.any()
    for number in range(LAYERS):
        probability = logits[number, 0].softmax(-1)

        def cost(queries, number=number, probability=probability):
            chosen = found[number, 0, list(queries)]
            return (-CLASS * probability[list(queries), wanted[0]["labels"]].sum()
                    + L1 * (chosen - wanted[0]["boxes"]).abs().sum()
                    - GIOU * generalised_iou(chosen, wanted[0]["boxes"]).sum())

        of = layer == number
        ours = query[of][which[of].argsort()].tolist()
        least = min(map(cost, permutations(range(QUERIES), count)))
        assert cost(ours).item() == pytest.approx(least.item(), abs=1e-5)


def test_more_objects_than_queries():
    """Each query gets an object of its own, and the rest of the objects is left."""
    logits, found = outputs(2, queries=3)
    wanted = targets(7, 2)
    layer, picture, query, which = match(logits, found, wanted)
    for number in range(LAYERS):
        first = (layer == number) & (picture == 0)
        assert sorted(query[first].tolist()) == [0, 1, 2] and len(set(which[first].tolist())) == 3
        assert ((layer == number) & (picture == 1)).sum() == 2
    assert all(loss.isfinite() for loss in set_losses(logits, found, wanted).values())


def test_a_perfect_answer_has_no_box_loss_and_the_lowest_class_loss():
    wanted = targets(3, 2)
    logits = torch.full((1, 2, QUERIES, CLASSES + 1), -9.0)
    logits[..., -1] = 9.0
    found = boxes(1, 2, QUERIES)
    for picture, target in enumerate(wanted):
        for place, (box, label) in enumerate(zip(target["boxes"], target["labels"], strict=True)):
            query = QUERIES - 1 - place
            found[0, picture, query] = box
            logits[0, picture, query] = -9.0
            logits[0, picture, query, label] = 9.0
    perfect = set_losses(logits, found, wanted)
    assert perfect["l1"] < 1e-6 and perfect["giou"] < 1e-5 and perfect["class"] < 1e-6
    worse = set_losses(logits.flip(2), found, wanted)
    assert worse["class"] > 1


@pytest.mark.parametrize("counts", [(0, 0), (0, 2)])
def test_pictures_without_objects_teach_that_nothing_is_there(counts):
    logits, found = outputs(2)
    logits.requires_grad_()
    losses = set_losses(logits, found, targets(*counts))
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())
    assert (logits.grad[:, 0, :, -1] < 0).all()  # a step raises "no object" of every query
    if not any(counts):
        assert losses["l1"] == losses["giou"] == 0


def test_the_order_of_objects_changes_nothing():
    logits, found = outputs(1)
    (target,) = targets(4)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = {name: value[order] for name, value in target.items()}
    a, b = set_losses(logits, found, [target]), set_losses(logits, found, [shuffled])
    for name in a:
        torch.testing.assert_close(a[name], b[name])


def test_outputs_that_are_not_finite_give_a_loss_that_is_not():
    """The run then stops with its own message, not with scipy's."""
    logits, found = outputs(1)
    logits[0, 0, 0, 0] = torch.nan
    assert not sum(set_losses(logits, found, targets(2)).values()).isfinite()
