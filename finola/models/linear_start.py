"""Where training starts. From random weights an autoencoder of these parts first learns to blur: for thousands of
steps its encoder passes on little more than the mean colour of each cell. A model with `start="shifts"` starts as a
linear code instead, and every part of it does from the first step what a trained one does:

    encoder        the leading principal components of the 16x16 pixels under each position (`start_from_images`)
    pooling        each head reads one position, and q is the grid of codes, unrolled (`finola.models.pooling`)
    autoregression shifts that grid by one position a step (`start_as_shifts`)
    decoder        paints the block of the slot that stands at the origin (`start_from_images`)

Training is free to leave this start. Shapes: x (B, 3, S, S) in [0, 1]; maps (B, C, h, w).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finola.autoregression import Finola
from finola.errors import FinolaError
from finola.kernels.grid import resolve_origin
from finola.models.decoder import ResConv, UpConv
from finola.models.mobileformer import Bottleneck, DownBottleneck, LiteBlock, MobileFormer, conv_of, norm_of

if TYPE_CHECKING:
    from finola.models.autoencoder import FinolaAutoencoder

LEVEL = 4.0  # what q's standard deviation is held near by its constant part, so that a step is a shift
CODE = 0.7  # standard deviation of the codes in q
OFFSET = 3.0  # bias that lifts a channel of unit variance to where ReLU and ReLU6 pass it unchanged
BRANCH = 0.05  # weight of the residual branches, which are left random
DELTAS = ((1, 1), (1, 2), (2, 1), (2, 2))  # taps of a 3x3 kernel that read a 2x2 block at stride 2
POSITIONS = 2**18  # that a regression sees at most
RIDGE = 1e-4  # of the mean square of a regression's inputs


@torch.no_grad()
def start_as_shifts(model: FinolaAutoencoder) -> None:
    """Start each matrix as the shift of the grid of codes by one position, and the decoder at the position's own code.

    q holds one slot of C / N channels for each of the N positions of the encoder's map. A cyclic shift P of the
    slots is a (C, C) permutation; with right = LEVEL · (P - 1), and q's standard deviation held near LEVEL by a
    constant ±LEVEL in the pooling's bias, which no shift changes, one step of the law is z + (P - 1) z = P z up to
    the deviation of q's level. So the position u columns to the right of the origin finds the code of *its own*
    cell in the origin's slot.

    Raises:
        FinolaError: a model without autoregression, with a map of another size than the encoder's, or whose
            channels are not an even number for each position.
    """
    config, finola = model.config, model.autoregression
    rows, columns = model.pool.size
    slot, remainder = divmod(config.embed_dim, rows * columns)
    if not isinstance(finola, Finola) or finola.size != model.pool.size or remainder or slot % 2:
        raise FinolaError(f"start 'shifts': needs an autoregression, map_size {rows} (image_size / 16) and embed_dim a "
                          f"multiple of {2 * rows * columns}; got {config.autoregression}, {config.map_size} and "
                          f"{config.embed_dim}")
    index = torch.arange(config.embed_dim).view(rows, columns, slot)
    sources = {"right": index.roll(-1, 1), "left": index.roll(1, 1), "down": index.roll(-1, 0), "up": index.roll(1, 0)}
    identity = torch.eye(config.embed_dim)
    for direction in finola.directions:
        shift = identity[sources[direction].flatten()]  # row i takes channel sources[i]
        getattr(finola, direction).copy_(LEVEL * (shift - identity))
    model.pool.out.bias.copy_(torch.tensor([LEVEL, -LEVEL]).repeat(config.embed_dim // 2))
    attention = torch.full((config.embed_dim, 1, 1), 0.05)  # without it 1 number in N would be the position's own
    attention[own_slot(model)] = 1
    for convolution in model.decoder.first_convolutions():
        convolution.weight.mul_(attention)


def own_slot(model: FinolaAutoencoder) -> list[int]:
    """The channels of the origin's slot, where every position of the map finds its own code."""
    rows, columns = model.pool.size
    y, x = resolve_origin(model.config.origin, model.autoregression.size)
    slot = model.config.embed_dim // (rows * columns)
    first = (y * columns + x) * slot
    return list(range(first, first + slot))


@torch.no_grad()
def start_from_images(model: FinolaAutoencoder, x: Tensor) -> None:
    """Fit encoder, pooling and decoder, layer by layer, to the principal components of pixel blocks.

    Each strided or channel-changing convolution is the least-squares map from its input, as the layers before it
    made it, to the leading components of the blocks under its positions, on the images x (B, 3, S, S); some 200 are
    enough. The residual branches and the channels beyond stay random, at little weight.

    Raises:
        FinolaError: a model that does not start as shifts, or has another encoder than a Mobile-Former.
    """
    if model.config.start != "shifts" or not isinstance(model.encoder, MobileFormer):
        raise FinolaError("start_images: needs a model with start 'shifts' and a Mobile-Former as encoder; got start "
                          f"{model.config.start!r} and {model.config.encoder}")
    if model.config.decoder_reduce is not None or isinstance(model.decoder.layers[0].shortcut, nn.Identity):
        raise FinolaError("start_images: needs a decoder that narrows the map in its first block; decoder_reduce must "
                          "be null and the first of decoder_widths other than embed_dim")
    training = model.training
    model.train()  # the images' own statistics in every BatchNorm
    _start_encoder(model, model.encoder, x)
    _start_pooling(model, x)
    _start_decoder(model, x)
    _settle_statistics(model, x)
    model.train(training)


def _start_encoder(model: FinolaAutoencoder, encoder: MobileFormer, x: Tensor) -> None:
    stride = 2

    def fit(layers: nn.Sequential) -> None:
        inputs = _input_of(layers, lambda: _features(model, x))
        targets = components(x, stride, min(conv_of(layers).out_channels, 3 * stride**2))
        _set(conv_of(layers), *_regress(inputs, targets, kernel=1))

    stem = conv_of(encoder.stem)
    stem.weight[:12] = 0
    for channel in range(3):
        for tap, (a, b) in enumerate(DELTAS):
            stem.weight[4 * channel + tap, channel, a, b] = 1
    norm_of(encoder.stem).bias.fill_(OFFSET)
    for block in encoder.modules():  # in the order of the forward pass
        if isinstance(block, LiteBlock):
            norm_of(block.layers[-2:]).weight.fill_(BRANCH)
        elif isinstance(block, DownBottleneck):
            stride *= 2
            expand = conv_of(block.expand1)
            taps = expand.weight.view(expand.in_channels, -1, 3, 3)  # (C, multiplier, 3, 3)
            taps[:, : len(DELTAS)] = 0
            for tap, (a, b) in enumerate(DELTAS):
                taps[:, tap, a, b] = 1
            norm_of(block.expand1).bias.view(taps.shape[:2])[:, : len(DELTAS)] = OFFSET
            norm_of(block.project2).weight.fill_(BRANCH)
            fit(block.project1)
        elif isinstance(block, Bottleneck) and block.shortcut:
            norm_of(block.project).weight.fill_(BRANCH)
        elif isinstance(block, Bottleneck):
            channels = conv_of(block.expand).in_channels
            _pass_through(conv_of(block.expand), channels)
            depthwise = conv_of(block.depthwise)
            depthwise.weight[:channels] = 0
            depthwise.weight[:channels, 0, 1, 1] = 1
            for layers in (block.expand, block.depthwise):
                norm_of(layers).bias[:channels] = OFFSET
            fit(block.project)
    tail = conv_of(encoder.tail)
    _pass_through(tail, tail.in_channels)
    norm_of(encoder.tail).bias.fill_(OFFSET)


def _start_pooling(model: FinolaAutoencoder, x: Tensor) -> None:
    """All heads alike: the position's features to the leading components of its 16x16 pixels."""
    pool = model.pool
    slot = pool.value.out_features // pool.num_heads
    targets = CODE * components(x, x.shape[-1] // pool.size[0], slot)
    weight, bias = _regress(_features(model, x), targets, kernel=1)
    pool.value.weight.copy_(weight[:, :, 0, 0].repeat(pool.num_heads, 1))
    pool.value.bias.copy_(bias.repeat(pool.num_heads))


def _start_decoder(model: FinolaAutoencoder, x: Tensor) -> None:
    decoder, own = model.decoder, own_slot(model)
    z = model.grow(model.encode(x))
    stride = x.shape[-1] // z.shape[-1]

    def live(convolution: nn.Conv2d) -> int:
        """Channels that carry components; the others stay random."""
        return min(max(convolution.out_channels // 2, 3), 3 * stride**2)

    for layer in decoder.layers:
        if isinstance(layer, UpConv):
            stride //= 2
            inputs = _input_of(layer.conv, lambda: decoder(z))
            _set(layer.conv, *_regress(inputs, components(x, stride, live(layer.conv)), kernel=3))
            layer.norm.bias[: live(layer.conv)] = OFFSET
        elif isinstance(layer, ResConv) and isinstance(layer.shortcut, nn.Conv2d):
            inputs = _input_of(layer, lambda: decoder(z))
            if layer is decoder.layers[0]:
                weight = torch.eye(z.shape[1], device=z.device)[own, :, None, None] / CODE  # (live, C, 1, 1)
            else:
                weight, _ = _regress(inputs, components(x, stride, live(layer.conv1)), kernel=1)
            _set_shortcut(layer, layer.shortcut, inputs, weight)
        elif isinstance(layer, ResConv):
            layer.norm2.weight.fill_(BRANCH)
    inputs = _input_of(decoder.to_rgb, lambda: decoder(z))
    _set(decoder.to_rgb, *_regress(inputs, model.normalise(x), kernel=3))


def _settle_statistics(model: FinolaAutoencoder, x: Tensor) -> None:
    """Let every BatchNorm's running statistics be those of these images."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def components(x: Tensor, size: int, count: int) -> Tensor:
    """The leading principal components of an image's size x size pixel blocks, each scaled to unit variance:
    x (B, 3, S, S) -> (B, count, S / size, S / size)."""
    blocks = F.pixel_unshuffle(x, size)  # (B, 3 size², S / size, S / size)
    blocks = blocks - blocks.mean((0, 2, 3), keepdim=True)
    rows = blocks.movedim(1, -1).flatten(0, 2)
    _, vectors = torch.linalg.eigh(rows.T @ rows)  # eigenvalues ascend
    scores = torch.einsum("bchw,ck->bkhw", blocks, vectors.flip(1)[:, :count])
    return scores / scores.std((0, 2, 3), keepdim=True)


def _regress(inputs: Tensor, targets: Tensor, kernel: int) -> tuple[Tensor, Tensor]:
    """The convolution, (k, C, kernel, kernel) weights and (k,) biases, that comes nearest from inputs (B, C, h, w) to
    targets (B, k, h, w) in the least-squares sense; the normal equations in float64, an image at a time, on as many
    images as make `POSITIONS`."""
    size = inputs.shape[1] * kernel**2
    gram = inputs.new_zeros(size + 1, size + 1, dtype=torch.float64)
    cross = inputs.new_zeros(size + 1, targets.shape[1], dtype=torch.float64)
    count = max(1, POSITIONS // inputs[0, 0].numel())
    for image, target in zip(inputs[:count], targets[:count], strict=True):
        windows = F.unfold(image[None].float(), kernel, padding=kernel // 2)[0]  # (C kernel², h w)
        windows = F.pad(windows, (0, 0, 0, 1), value=1.0).double()  # the last row is the bias's
        gram += windows @ windows.T
        cross += windows @ target.flatten(1).T.double()
    ridge = gram.diagonal()[:-1].mean() * RIDGE
    gram.diagonal()[:-1] += ridge
    solution = torch.linalg.solve(gram, cross).float()
    return solution[:-1].T.reshape(-1, inputs.shape[1], kernel, kernel), solution[-1]


def _set(convolution: nn.Conv2d, weight: Tensor, bias: Tensor) -> None:
    """Give a convolution's first channels these weights; where it has no bias a BatchNorm follows, which removes it."""
    convolution.weight[: len(weight)] = weight
    if convolution.bias is not None:
        convolution.bias[: len(bias)] = bias


def _set_shortcut(layer: ResConv, shortcut: nn.Conv2d, inputs: Tensor, weight: Tensor) -> None:
    """Let the first channels of a residual block's shortcut pass its final ReLU at unit variance."""
    outputs = F.conv2d(inputs, weight)
    deviation = outputs.std((0, 2, 3))
    live = len(weight)
    shortcut.weight[:live] = weight / deviation[:, None, None, None]
    layer.norm2.weight[:live] = BRANCH
    layer.norm2.bias[:live] = OFFSET - outputs.mean((0, 2, 3)) / deviation


def _pass_through(convolution: nn.Conv2d, channels: int) -> None:
    """The first output channels of a 1x1 convolution become its input channels."""
    convolution.weight[:channels] = torch.eye(channels, device=convolution.weight.device)[:, :, None, None]


def _features(model: FinolaAutoencoder, x: Tensor) -> Tensor:
    return model.encoder.forward_features(model.normalise(x))


def _input_of(layer: nn.Module, forward: Callable[[], Tensor]) -> Tensor:
    """What `layer` receives during `forward`."""
    received = []

    def stop_here(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        received.append(arguments[0])
        raise _Reached

    handle = layer.register_forward_pre_hook(stop_here)
    try:
        forward()
    except _Reached:
        return received[0]
    finally:
        handle.remove()
    raise AssertionError("the forward pass did not reach the layer")


class _Reached(Exception):
    pass

