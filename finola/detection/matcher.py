"""The set loss of DETR (Carion et al., ECCV 2020): each object is given to one query, the rest learn "no object".

Shapes: L layers (the last and, as auxiliary losses, those before it), B images, N queries, K classes, T objects of
the image with most. Boxes here are (centre x, centre y, width, height) in parts of the image's sides.
"""

from __future__ import annotations

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_convert

# weights of the parts, in matching and in the loss (DETR, appendix A.4), and that of "no object" in cross-entropy
CLASS, L1, GIOU, NO_OBJECT = 1.0, 5.0, 2.0, 0.1


def set_losses(logits: Tensor, boxes: Tensor, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The loss of all layers, in three parts, already weighted.

    Args:
        logits: (L, B, N, K + 1), the last class "no object".
        boxes: (L, B, N, 4) in [0, 1].
        targets: for each image `boxes` (n, 4) and `labels` (n,); where n > N the objects that match worst are left.
    """
    logits, boxes = logits.float(), boxes.float()
    layers, images, queries, classes = logits.shape
    layer, image, query, which = match(logits.detach(), boxes.detach(), targets)
    counts = torch.tensor([len(target["labels"]) for target in targets])
    place = (counts.cumsum(0) - counts).to(image.device)[image] + which  # among the objects of all images
    labels = torch.cat([target["labels"] for target in targets])[place]
    wanted = torch.cat([target["boxes"] for target in targets])[place].float()
    classified = torch.full((layers, images, queries), classes - 1, device=logits.device)
    classified[layer, image, query] = labels
    weight = torch.ones(classes, device=logits.device)
    weight[-1] = NO_OBJECT
    cross_entropy = [F.cross_entropy(of.flatten(0, 1), to.flatten(), weight)
                     for of, to in zip(logits, classified, strict=True)]
    found, number = boxes[layer, image, query], _objects(targets, logits.device)
    return {
        "class": CLASS * torch.stack(cross_entropy).sum(),
        "l1": L1 * (found - wanted).abs().sum() / number,
        "giou": GIOU * (1 - generalised_iou(found, wanted)).sum() / number,
    }


@torch.no_grad()
def match(logits: Tensor, boxes: Tensor, targets: list[dict[str, Tensor]]) -> tuple[Tensor, ...]:
    """The pairs of least cost (the Hungarian method, scipy's): layer, image, query and object of each, (M,) each.

    Arguments as in `set_losses`. All costs cross to the CPU in one transfer."""
    from scipy.optimize import linear_sum_assignment

    counts = [len(target["labels"]) for target in targets]
    device, most = logits.device, max(counts, default=0)
    if most == 0:
        return tuple(torch.empty(4, 0, dtype=torch.long, device=device))
    labels = torch.zeros(len(targets), most, dtype=torch.long, device=device)
    wanted = boxes.new_full((len(targets), most, 4), 0.5)
    for i, target in enumerate(targets):
        labels[i, : counts[i]], wanted[i, : counts[i]] = target["labels"], target["boxes"]
    probabilities = logits.softmax(-1)
    index = labels[None, :, None].expand(*logits.shape[:3], most)
    cost = -CLASS * probabilities.gather(-1, index)  # (L, B, N, T)
    cost += L1 * torch.cdist(boxes, wanted[None].expand(len(boxes), -1, -1, -1), p=1)
    cost -= GIOU * generalised_iou(boxes[..., None, :], wanted[None, :, None])
    # a loss that is not finite is found later; here every number must be one
    cost = cost.nan_to_num(nan=1e6, posinf=1e6, neginf=-1e6).cpu()
    pairs = []
    for layer, of_layer in enumerate(cost.numpy()):
        for image, number in enumerate(counts):
            queries, objects = linear_sum_assignment(of_layer[image, :, :number])
            pairs += [(layer, image, q, t) for q, t in zip(queries.tolist(), objects.tolist(), strict=True)]
    return tuple(torch.tensor(pairs, device=device).T)


def generalised_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union less the share of the common hull that neither box covers (Rezatofighi et al., 2019).

    a, b: (..., 4), broadcast against each other; the result is (...), between -1 and 1."""
    a, b = box_convert(a, "cxcywh", "xyxy"), box_convert(b, "cxcywh", "xyxy")
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp_min(0).prod(-1)
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inner
    tiny = torch.finfo(union.dtype).eps
    return inner / (union + tiny) - (hull - union) / (hull + tiny)


def _objects(targets: list[dict[str, Tensor]], device: torch.device) -> Tensor:
    """The number of objects in a process's share of the batch, at least 1: the mean over processes."""
    number = torch.tensor(float(sum(len(target["labels"]) for target in targets)), device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(number)
        number /= torch.distributed.get_world_size()
    return number.clamp_min(1)
