"""The detection heads: shapes at odd sizes, padding, gradients, precision, independence of the images of a batch."""

import math

import pytest
import torch
from torch import Tensor, nn

from finola.detection.heads import BLOCKS, HEADS, Tokens, create_detection_head, enlarge, map_tokens, tokens_map
from finola.errors import FinolaError

CHANNELS = {8: 12, 16: 16, 32: 24}
LAYERS = {"mf_dec_522": 9, "mf_dec_211": 4, "transformer": 6}
SIZE = (72, 100)  # of an image in pixels: maps of 9x13, 5x7 and 3x4


def make(name: str, num_queries: int = 7) -> nn.Module:
    """A head in eval mode whose BatchNorms hold statistics of their own, as after training."""
    head = create_detection_head(name, CHANNELS, num_queries).eval()
    for norm in (m for m in head.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_var, 0.5, 2)
        nn.init.normal_(norm.running_mean, std=0.1)
    return head


def maps_of(head: nn.Module, batch: int = 2, size: tuple[int, int] = SIZE) -> dict[int, Tensor]:
    """What an encoder would give for images of `size`."""
    return {stride: torch.randn(batch, CHANNELS[stride], *(math.ceil(side / stride) for side in size))
            for stride in head.strides}


def padding_of(sizes: list[tuple[int, int]], height: int, width: int) -> Tensor:
    padding = torch.ones(len(sizes), height, width, dtype=torch.bool)
    for mask, (rows, columns) in zip(padding, sizes, strict=True):
        mask[:rows, :columns] = False
    return padding


# --- the interface ---


@pytest.mark.parametrize("num_queries", [1, 300])
@pytest.mark.parametrize("name", HEADS)
def test_gives_the_queries_after_each_block(name, num_queries):
    head = make(name, num_queries)
    outputs = head(maps_of(head))
    assert [tuple(q.shape) for q in outputs] == LAYERS[name] * [(2, num_queries, 256)]
    assert all(q.isfinite().all() for q in outputs)


@pytest.mark.parametrize("size, map_size", [((800, 1333), (100, 167)), ((800, 1344), (100, 168))])
@pytest.mark.parametrize("name", BLOCKS)
def test_takes_the_papers_size_with_and_without_padding_to_32(name, size, map_size):
    with torch.device("meta"):
        head = create_detection_head(name, CHANNELS)
        maps = maps_of(head, batch=1, size=size)
        assert maps[8].shape[2:] == map_size
        assert head(maps, torch.zeros(1, *size, dtype=torch.bool))[-1].shape == (1, 100, 256)


@pytest.mark.parametrize("name", HEADS)
def test_the_embeddings_are_not_decayed(name):
    head = make(name)
    embeddings = {key for key, p in head.named_parameters() if p.shape == (1, 7, 256)}
    assert head.no_weight_decay() == embeddings


@pytest.mark.parametrize("arguments, message", [
    (("mf_dec_523", CHANNELS), "mf_dec_522"),
    (("mf_dec_522", {16: 16, 32: 24}), "strides"),
    (("transformer", {8: 12, 16: 16}), "strides"),
    (("mf_dec_211", CHANNELS, 0), "num_queries"),
    (("mf_dec_211", CHANNELS, 7, 1.0), "dropout"),
])
def test_bad_arguments(arguments, message):
    with pytest.raises(FinolaError, match=message):
        create_detection_head(*arguments)


# --- learning ---


@pytest.mark.parametrize("name", HEADS)
def test_every_parameter_gets_a_gradient(name):
    """But those of DETR's first self-attention, whose values are all zero."""
    head = make(name)
    sum((q * torch.randn_like(q)).sum() for q in head(maps_of(head))).backward()
    exempt = "decoder.0.self_attention."
    idle = [key for key, p in head.named_parameters() if not key.startswith(exempt) and not p.grad.abs().max() > 1e-7]
    assert not idle


@pytest.mark.parametrize("name", ["mf_dec_211", "transformer"])
def test_learns_to_point_at_a_place(name):
    """A few steps with dropout and with BatchNorm in training mode."""
    head, place = make(name).train(), nn.Linear(256, 2)
    optimizer = torch.optim.AdamW([*head.parameters(), *place.parameters()], lr=3e-4)
    maps, target = maps_of(head, batch=4), torch.rand(4, 1, 2)
    losses = []
    for _ in range(6):
        loss = sum((place(q) - target).square().mean() for q in head(maps)) / LAYERS[name]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", HEADS)
def test_bfloat16_autocast_is_close(name):
    head = make(name)
    maps, padding = maps_of(head), padding_of([SIZE, (40, 60)], *SIZE)
    exact = head(maps, padding)[-1]
    with torch.autocast("cpu", torch.bfloat16):
        rough = head(maps, padding)[-1]
        sum((q * torch.randn_like(q)).sum() for q in head.train()(maps, padding)).backward()
    assert torch.nn.functional.cosine_similarity(exact, rough.float(), dim=2).min() > 0.99
    assert all(p.grad.isfinite().all() for p in head.parameters())


@pytest.mark.parametrize("name", HEADS)
def test_evaluation_is_deterministic_and_knows_nothing_of_the_other_pictures(name):
    head = make(name)
    maps, padding = maps_of(head, batch=3), padding_of([SIZE, (40, 60), (10, 90)], *SIZE)
    together = head(maps, padding)[-1]
    assert torch.equal(together, head(maps, padding)[-1])
    alone = [head({s: x[i : i + 1] for s, x in maps.items()}, padding[i : i + 1])[-1] for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


# --- padding ---


@pytest.mark.parametrize("name", HEADS)
def test_a_mask_without_padding_changes_nothing(name):
    head = make(name)
    maps = maps_of(head)
    masked = head(maps, torch.zeros(2, *SIZE, dtype=torch.bool))[-1]
    torch.testing.assert_close(masked, head(maps)[-1], rtol=1e-4, atol=1e-5)


def test_the_transformer_sees_a_padded_picture_as_it_sees_it_alone():
    head = make("transformer")
    alone = maps_of(head, size=(64, 96))
    padded = torch.randn(2, CHANNELS[32], 4, 5)
    padded[:, :, :2, :3] = alone[32]
    padding = padding_of(2 * [(64, 96)], 128, 160)
    torch.testing.assert_close(head({32: padded}, padding)[-1], head(alone)[-1], rtol=1e-4, atol=1e-5)


def test_a_block_sees_a_padded_map_as_it_sees_it_alone():
    block = make("mf_dec_211").blocks32[0]
    queries = Tokens(torch.randn(2, 7, 256), torch.randn(1, 7, 256))
    alone, padded = torch.randn(2, 256, 2, 3), torch.randn(2, 256, 4, 5)
    padded[:, :, :2, :3] = alone
    expected, expected_map = block(queries, map_tokens(alone, None))
    got, got_map = block(queries, map_tokens(padded, padding_of(2 * [(64, 96)], 128, 160)))
    torch.testing.assert_close(got.values, expected.values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tokens_map(got_map)[:, :, :2, :3], tokens_map(expected_map), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("size", [(64, 96), (33, 81)])
def test_a_padded_picture_gives_the_queries_it_gives_alone(name, size):
    """Maps are zero in the padding, as the encoders leave them. An image alone is padded to multiples of 32."""
    head = make(name)
    near, far = (maps_of(head, batch=1, size=canvas) for canvas in ((64, 96), (128, 160)))
    for stride, x in near.items():
        rows, columns = (-(-length // stride) for length in size)
        x[:, :, rows:], x[:, :, :, columns:] = 0, 0
        far[stride].zero_()[:, :, :rows, :columns] = x[:, :, :rows, :columns]
    alone, together = head(near, padding_of([size], 64, 96)), head(far, padding_of([size], 128, 160))
    torch.testing.assert_close(together[-1], alone[-1], rtol=1e-4, atol=1e-5)


def test_a_map_ends_at_its_padding_as_at_its_border():
    x = torch.randn(1, 256, 3, 4)
    x[:, :, 2:], x[:, :, :, 3:] = 0, 0
    larger = enlarge(x, (6, 8), padding_of([(8, 12)], 12, 16))
    torch.testing.assert_close(larger[:, :, :4, :6], enlarge(x[:, :, :2, :3], (4, 6), None))
    assert not larger[:, :, 4:].any() and not larger[:, :, :, 6:].any()


def test_the_smallest_picture_keeps_a_position():
    for map_size in ((5, 7), (9, 13), (3, 4)):
        tokens = map_tokens(torch.randn(1, 256, *map_size), padding_of([(1, 1)], *SIZE))
        assert tokens.visible.sum() == 1 and tokens.visible.flatten()[0]


def test_positions_are_told_apart_and_measured_by_the_pictures_extent():
    padded = map_tokens(torch.zeros(1, 256, 6, 8), padding_of([(64, 96)], 192, 256)).position.view(6, 8, 256)
    alone = map_tokens(torch.zeros(1, 256, 2, 3), None).position.view(2, 3, 256)
    torch.testing.assert_close(padded[:2, :3], alone)
    flat = alone.flatten(0, 1)
    assert torch.cdist(flat, flat).add(torch.eye(6) * 9).min() > 0.5


def test_tokens_of_a_map_are_a_view_of_it():
    x = torch.randn(2, 256, 3, 4).contiguous(memory_format=torch.channels_last)
    tokens = map_tokens(x, None)
    assert tokens.values.is_contiguous() and tokens.values.data_ptr() == x.data_ptr()
    assert tokens_map(tokens).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(tokens_map(tokens), x)
