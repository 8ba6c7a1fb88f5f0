"""Distortions and views: functions of (seed, epoch, index, view), whatever the workers and interruptions."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN

from finola.data import Augment, Batches, ImageFolder, ResidentImages, ResidentLoader, build_loader
from finola.data.crops import policy_seeds, random_crops, uniforms
from finola.data.policies import Policy, seeded
from finola.errors import RecipeError

RAND_AUGMENT = "rand-m9-mstd0.5-inc1"
POLICIES = (RAND_AUGMENT, "moco")
BATCHES = Batches(3, train=True, seed=5)


def picture(seed):
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((36, 30), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    for name in ("cat", "dog"):
        (root / name).mkdir()
        for i in range(5):
            picture(i).save(root / name / f"{i}.png")
    return ImageFolder(root)


@pytest.fixture(params=["folder", "resident"])
def make_loader(request, data):
    """A loader that distorts crops as it is told to."""
    make, images = build_loader, data
    if request.param == "resident":
        make, images = ResidentLoader, ResidentImages(data, 30, progress=False)
    return lambda batches=BATCHES, image_size=16, **options: make(
        images, batches, image_size=image_size, augment=Augment(**options))


def pixels(loader, epoch=0):
    loader.set_epoch(epoch)
    return torch.cat([batch["image"] for batch in loader])


def draw():
    return random.random(), float(np.random.random()), float(torch.rand(()))


# --- one policy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_a_function_of_image_and_seed(name):
    policy, image = Policy(name), picture(0)
    before = np.asarray(image).copy()
    results = [np.asarray(policy(image, seed)) for seed in range(12)]
    assert all(np.array_equal(np.asarray(policy(image, seed)), result) for seed, result in enumerate(results))
    assert np.array_equal(np.asarray(image), before)
    assert all(result.shape == before.shape and result.dtype == np.uint8 for result in results)
    assert sum(not np.array_equal(result, before) for result in results) >= 6
    assert len({result.tobytes() for result in results}) >= 6


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_leaves_the_global_generators_alone(name):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    undisturbed = draw(), draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    first = draw()
    Policy(name)(picture(0), 3)
    assert (first, draw()) == undisturbed


def test_the_generators_are_put_back_after_an_error():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError), seeded(3):
        torch.rand(5)
        raise ZeroDivisionError
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("name", ["", "moco2", "rand-", "rand-x9", "rand-m", "rand-m9-tnone", "augmix-m3", 9])
def test_unknown_policies_are_named(name):
    with pytest.raises(RecipeError, match="policy: got .*expected 'moco' or a RandAugment string") as caught:
        Augment(policy=name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["rand", "rand-m7-n3-p0.7-mmax12", "rand-mstd0.5-tweights-inc0", "rand-m5-t3aw"])
def test_other_rand_augment_strings_are_accepted(name):
    assert Policy(name)(picture(0), 1).size == picture(0).size


@pytest.mark.parametrize("magnitude", ["m1", "m10", "m10-inc1", "m14-mmax14-inc1"])
def test_the_weakest_and_strongest_magnitudes_run(magnitude):
    policy = Policy(f"rand-{magnitude}-n4-p1")
    for seed in range(40):  # each operation is drawn by some seed with all but certainty
        assert policy(picture(0), seed).mode == "RGB"


def test_the_strongest_posterising_leaves_something_to_see():
    policy = Policy("rand-m10-n1-p1-inc1")
    assert all(np.ptp(np.asarray(policy(picture(0), seed))) > 0 for seed in range(40))


def test_what_a_distortion_moves_in_is_the_mean_colour():
    """Of ImageNet, as in timm's recipes."""
    policy, white = Policy("rand-m10-n1-p1"), Image.new("RGB", (36, 30), "white")
    seen = {colour for seed in range(20) for _, colour in policy(white, seed).getcolors()}
    mean = tuple(round(255 * share) for share in IMAGENET_DEFAULT_MEAN)
    assert mean in seen and (128, 128, 128) not in seen  # timm's own, where it is not told


def test_no_view_is_refused():
    with pytest.raises(RecipeError, match="views: got 0, expected at least 1"):
        Augment(views=0)


# --- random numbers ----------------------------------------------------------------------------------------


def test_views_take_numbers_of_their_own():
    whole = uniforms(1, 2, np.arange(4), 60)
    assert np.array_equal(uniforms(1, 2, np.arange(4), 20, skip=40), whole[:, 40:])
    draws = dict(seed=1, epoch=2)
    sizes, indices = np.full((4, 2), 100), np.arange(4)
    crops = [random_crops(sizes, indices, augment=Augment(), view=view, **draws).boxes for view in range(3)]
    assert len({boxes.tobytes() for boxes in crops}) == 3
    seeds = [seed for view in range(3) for seed in policy_seeds(indices, view=view, **draws)]
    assert len(set(seeds)) == 12 and all(0 <= seed < 2**32 for seed in seeds)


# --- loaders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_changes_crops_from_epoch_to_epoch(make_loader, policy):
    plain, first = pixels(make_loader()), pixels(make_loader(policy=policy))
    second = pixels(make_loader(policy=policy), epoch=1)
    assert first.shape == plain.shape == (9, 3, 16, 16)
    assert (first != plain).flatten(1).any(1).sum() >= 4
    assert first.min() >= 0 and first.max() <= 1 and not torch.equal(first, second)
    assert torch.equal(first, pixels(make_loader(policy=policy)))


@pytest.mark.parametrize("policy", POLICIES)
def test_workers_change_nothing(data, policy):
    options = dict(image_size=16, augment=Augment(policy=policy, views=2))
    alone = build_loader(data, BATCHES, **options)
    helped = build_loader(data, BATCHES, **options, num_workers=2)
    for epoch in (0, 1):
        assert torch.equal(pixels(alone, epoch), pixels(helped, epoch))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_epoch_goes_on_where_it_stopped(make_loader, policy):
    options = dict(policy=policy, views=2)
    whole = pixels(make_loader(**options), 1)
    loader = make_loader(**options)
    loader.set_epoch(1)
    start = next(iter(loader))["image"]
    random.random(), np.random.random(), torch.rand(3)
    resumed = make_loader(**options)
    resumed.load_state_dict(loader.state_dict())
    assert torch.equal(torch.cat([start, *(batch["image"] for batch in resumed)]), whole)


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_two_views_are_two_crops_and_the_first_is_that_of_one_view(make_loader, policy):
    one, two = pixels(make_loader(policy=policy)), pixels(make_loader(policy=policy, views=2))
    assert two.shape == (9, 2, 3, 16, 16)
    assert torch.equal(two[:, 0], one)
    assert (two[:, 0] != two[:, 1]).flatten(1).any(1).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_device_gives_what_files_give(data, policy):
    options = dict(image_size=16, augment=Augment(policy=policy, views=2))
    images = ResidentImages(data, 30, progress=False)
    from_files = pixels(build_loader(data, BATCHES, **options))
    difference = (pixels(ResidentLoader(images, BATCHES, **options)) - from_files).abs()
    assert difference.mean() < 0.01  # crops differ by Pillow's rounding, which a distortion may enlarge


def test_evaluation_is_without_policy_and_views(make_loader):
    in_order = Batches(3, train=False)
    plain = pixels(make_loader(in_order, image_size=30))
    assert torch.equal(pixels(make_loader(in_order, image_size=30, policy="moco", views=2)), plain)
