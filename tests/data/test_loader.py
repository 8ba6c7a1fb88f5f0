"""The loaders' promises: the same batches with any workers, processes and interruptions, from files, from
shards and from the device."""

import io
import json
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from finola.data import (
    Batches,
    Concat,
    ImageFolder,
    ResidentImages,
    ResidentLoader,
    Shards,
    build_loader,
    open_data,
)
from finola.data.crops import (
    GOLDEN,
    RATIO,
    Augment,
    Crops,
    epoch_order,
    policy_seeds,
    random_crops,
    splitmix64,
    uniforms,
)
from finola.data.images import shorter_side
from finola.data.in_memory import crop_and_resize, upload
from finola.data.pack import Encoding, pack
from finola.errors import DataError, RecipeError


def smooth(width, height, seed=0):
    """An image with structure but no jumps, so that 8-bit rounding is the only difference of resamplers."""
    small = np.random.default_rng(seed).integers(40, 216, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


SIZES = [(40, 30), (30, 40), (33, 33), (64, 30), (30, 50), (31, 47), (100, 30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes, 14 images of many shapes."""
    root = tmp_path_factory.mktemp("data")
    for name in ("cat", "dog"):
        (root / name).mkdir()
        for i, (width, height) in enumerate(SIZES):
            smooth(width, height, seed=i).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def data(folder):
    return ImageFolder(folder)


BATCHES = Batches(4, train=True, seed=3)


def batches(loader, epochs=(0,)):
    """All batches of some epochs as (indices, labels, images)."""
    found = []
    for epoch in epochs:
        loader.set_epoch(epoch)
        found += [(batch["index"].tolist(), batch["label"].tolist(), batch["image"]) for batch in loader]
    return found


def same(a, b):
    assert [x[:2] for x in a] == [x[:2] for x in b]
    return all(torch.equal(x[2], y[2]) for x, y in zip(a, b, strict=True))


@pytest.fixture(params=["folder", "resident"])
def make_loader(request, data):
    if request.param == "folder":
        return lambda **options: build_loader(data, replace(BATCHES, **options), image_size=16)
    images = ResidentImages(data, 30, progress=False)
    return lambda **options: ResidentLoader(images, replace(BATCHES, **options), image_size=16)


# --- data sets ---------------------------------------------------------------------------------------------


def test_folders_are_sorted_and_labelled(data, folder):
    assert data.classes == ["cat", "dog"]
    assert data.labels.tolist() == [0] * 7 + [1] * 7
    assert data.name(8) == str(folder / "dog" / "1.png")
    assert data.load(8).size == SIZES[1]


def test_a_folder_of_images_is_flat_and_suffixes_may_be_capital(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / ".cache").mkdir()
    for name in ("b.JPEG", "a.Png", "below/c.webp", ".cache/d.png", ".e.png"):
        smooth(8, 8).save(tmp_path / name)
    data = ImageFolder(tmp_path)
    names = [data.name(i)[len(str(tmp_path)) + 1 :] for i in range(len(data))]
    assert names == ["a.Png", "b.JPEG", "below/c.webp"]
    assert data.labels.tolist() == [-1, -1, -1] and data.classes == []


def test_several_roots_share_their_classes(data, tmp_path):
    for name in ("dog", "ant"):
        (tmp_path / "labelled" / name).mkdir(parents=True)
        smooth(8, 9).save(tmp_path / "labelled" / name / "x.png")
    (tmp_path / "flat").mkdir()
    smooth(8, 10).save(tmp_path / "flat" / "x.png")
    both = open_data([data.root, tmp_path / "labelled", tmp_path / "flat"])
    assert isinstance(both, Concat) and both.classes == ["ant", "cat", "dog"]
    assert both.labels.tolist() == [1] * 7 + [2] * 7 + [0, 2, -1]
    assert [both.load(i).size for i in (0, 13, 14, 16)] == [SIZES[0], SIZES[6], (8, 9), (8, 10)]
    assert both.name(15).endswith("labelled/dog/x.png")


# --- random numbers ----------------------------------------------------------------------------------------


def test_draws_depend_on_seed_epoch_and_index_alone():
    whole = uniforms(1, 2, np.arange(50), 7)
    assert np.array_equal(uniforms(1, 2, np.array([31, 4]), 7), whole[[31, 4]])
    for other in (uniforms(0, 2, np.arange(50), 7), uniforms(1, 3, np.arange(50), 7)):
        assert not np.isclose(whole, other).any()


def test_draws_are_uniform_and_independent():
    draws = uniforms(-5, 0, np.arange(20_000), 6)
    assert draws.min() >= 0 and draws.max() < 1
    shares = np.stack([np.histogram(column, 10, (0, 1))[0] for column in draws.T]) / 20_000
    assert abs(shares - 0.1).max() < 0.012  # more than five standard deviations
    assert abs(np.corrcoef(draws.T) - np.eye(6)).max() < 0.04
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.04


def test_the_stream_never_changes():
    """Resuming relies on it, in later versions too."""
    expected = [[0.1296456182997474, 0.049920065672091285], [0.591449498199162, 0.29252335542281827]]
    assert uniforms(0, 0, np.arange(2), 2).tolist() == expected
    assert epoch_order(8, 0, 1).tolist() == [6, 0, 4, 5, 2, 7, 1, 3]
    draws = dict(indices=np.array([5, 9]), seed=1, epoch=2, view=1)
    crops = random_crops(np.array([[300, 400], [500, 200]]), augment=Augment(), **draws)
    assert crops.boxes[0] == pytest.approx([161.89221398, 42.59499227, 334.74128659, 221.13606827])
    assert crops.boxes[1] == pytest.approx([13.79090431, 37.71847658, 174.8590701, 214.24931775])
    assert policy_seeds(**draws) == [2524274856, 3249280954]


def test_the_hash_is_splitmix64():
    """The first outputs that its authors' C code gives for the seed 1234567."""
    states = np.uint64(1234567) + GOLDEN * np.arange(1, 4, dtype=np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_an_order_is_a_permutation_and_differs_between_epochs():
    first, second = epoch_order(1000, 0, 0), epoch_order(1000, 0, 1)
    assert sorted(first) == list(range(1000))
    assert (first == second).mean() < 0.02


def test_crops_lie_within_and_have_the_asked_area_and_ratio():
    sizes = np.tile([[300, 400]], (5000, 1))
    crops = random_crops(sizes, np.arange(5000), seed=0, epoch=0, augment=Augment())
    left, top, right, bottom = crops.boxes.T
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= 400 and bottom.max() <= 300
    width, height = right - left, bottom - top
    area = width * height / 120_000
    assert area.min() >= 0.2 and area.min() < 0.21 and area.max() <= 1
    ratio = width / height
    assert RATIO[0] - 1e-9 <= ratio.min() < 0.76 and 1.32 < ratio.max() <= RATIO[1] + 1e-9
    assert 0.47 < crops.flips.mean() < 0.53


def test_where_no_crop_fits_the_largest_centre_crop_is_taken():
    sizes = np.array([[10, 1000], [1000, 10]])
    crops = random_crops(sizes, np.arange(2), seed=0, epoch=0, augment=Augment((0.9, 1.0), hflip=False))
    w = 10 * RATIO[1]
    expected = [[500 - w / 2, 0, 500 + w / 2, 10], [0, 500 - w / 2, 10, 500 + w / 2]]
    assert np.allclose(crops.boxes, expected) and not crops.flips.any()


# --- loaders -----------------------------------------------------------------------------------------------


def test_a_batch_is_what_the_docstring_says(make_loader, data):
    loader = make_loader()
    assert len(loader) == len(list(loader)) == 3
    batch = next(iter(loader))
    assert batch["image"].shape == (4, 3, 16, 16) and batch["image"].dtype == torch.float32
    assert batch["image"].min() >= 0 and batch["image"].max() <= 1
    assert batch["label"].tolist() == data.labels[batch["index"].numpy()].tolist()
    assert batch["label"].dtype == batch["index"].dtype == torch.int64


def test_epochs_differ_and_repeat(make_loader):
    loader = make_loader()
    zero, one = batches(loader, [0]), batches(loader, [1])
    assert zero[0][0] != one[0][0]
    assert same(zero, batches(loader, [0]))
    assert not same(zero, [(i, label, x) for (i, label, _), (*_, x) in zip(zero, one, strict=True)])
    assert [x[0] for x in zero] != [x[0] for x in batches(make_loader(seed=4))]


def test_workers_change_nothing(data):
    alone = batches(build_loader(data, BATCHES, image_size=16), [0, 1])
    assert same(alone, batches(build_loader(data, BATCHES, image_size=16, num_workers=2), [0, 1]))


def test_two_processes_see_the_global_batches_of_one(make_loader):
    one = batches(make_loader())
    halves = [batches(make_loader(batch_size=2, rank=rank, world_size=2)) for rank in (0, 1)]
    for whole, *parts in zip(one, *halves, strict=True):
        assert whole[0] == parts[0][0] + parts[1][0]
        assert torch.allclose(whole[2], torch.cat([part[2] for part in parts]), atol=1e-6)


def test_nothing_is_lost_without_drop_last(make_loader):
    options = dict(batch_size=2, drop_last=False, world_size=3)
    found = [batches(make_loader(rank=rank, **options)) for rank in range(3)]
    assert [len(part) for part in found] == [len(make_loader(rank=rank, **options)) for rank in range(3)]
    assert sorted(i for part in found for batch in part for i in batch[0]) == list(range(14))


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_a_resumed_epoch_goes_on_where_it_stopped(make_loader, stop):
    expected = batches(make_loader(), [0, 1, 2])
    first = make_loader()
    first.set_epoch(1)
    iterator = iter(first)
    seen = [next(iterator) for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))  # a checkpoint holds plain values
    assert state["position"] == len(seen)

    second = make_loader()
    second.load_state_dict(state)
    assert same(expected[3 + stop : 6], batches(second, [1]))
    assert same(expected[6:], batches(second, [2]))  # the next epoch is whole again
    assert same(expected[3:6], batches(second, [1]))


def test_reading_ahead_does_not_count(data):
    """Each worker prepares batches that nobody has asked for yet."""
    loader = build_loader(data, BATCHES, image_size=16, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["position"] == 1


@pytest.mark.parametrize("save_at", [1, 3, 4, 5, 6])
def test_lightning_resumes_in_mid_epoch(make_loader, tmp_path, save_at):
    """Epochs of three batches, saved after step 1 to 6: the resumed run sees exactly what was left."""
    lightning = pytest.importorskip("lightning")

    class Recorder(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), []

        def training_step(self, batch, batch_idx):
            indices, total = batch["index"].tolist(), batch["image"].sum().item()
            self.seen.append((self.current_epoch, batch_idx, indices, total))
            return self.weight * batch["image"].mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

        def on_train_batch_end(self, *_):
            if self.global_step == save_at:
                self.trainer.save_checkpoint(tmp_path / "run.ckpt")

    def run(checkpoint=None):
        module = Recorder()
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=3, enable_model_summary=False, **quiet)
        trainer.fit(module, make_loader(), ckpt_path=checkpoint)
        return module.seen

    whole = run()
    assert len(whole) == 9
    assert run(tmp_path / "run.ckpt") == whole[save_at:]


def test_evaluation_takes_centre_crops_in_order(data):
    batch = next(iter(build_loader(data, Batches(14, train=False), image_size=16)))
    assert batch["index"].tolist() == list(range(14))
    image = data.load(1).resize((16, 21), Image.Resampling.BICUBIC).crop((0, 2, 16, 18))
    assert np.array_equal(batch["image"][1].permute(1, 2, 0).mul(255).round(), np.array(image))


def test_evaluation_may_leave_a_border_out(data):
    """As timm: the shorter side to 16 / 0.8 = 20, then the centre 16."""
    batch = next(iter(build_loader(data, Batches(14, train=False), image_size=16, crop_pct=0.8)))
    image = data.load(1).resize((20, 27), Image.Resampling.BICUBIC).crop((2, 5, 18, 21))
    assert np.array_equal(batch["image"][1].permute(1, 2, 0).mul(255).round(), np.array(image))
    assert (shorter_side(224, 0.875), shorter_side(128, 0.875), shorter_side(224, 1.0)) == (256, 146, 224)


@pytest.mark.parametrize("crop_pct", [0, -1, 1.01, float("nan")])
def test_a_share_to_crop_that_is_none(data, crop_pct):
    with pytest.raises(RecipeError, match="crop_pct: got .*, expected 0 < crop_pct <= 1"):
        build_loader(data, Batches(4, train=False), image_size=16, crop_pct=crop_pct)


# --- on the device -----------------------------------------------------------------------------------------


def test_pictures_are_stored_on_their_side_in_one_tensor(data):
    images = ResidentImages(data, 30, progress=False)
    assert images.pixels.shape == (14, 3, 30, 60) and images.pixels.dtype == torch.uint8
    assert images.sizes[1].tolist() == [40, 30] and images.sizes[6].tolist() == [30, 60]  # 100 x 30 is cut
    stored = np.array(data.load(1))  # (40, 30, 3)
    assert torch.equal(images.pixels[1, :, :, :40], torch.from_numpy(stored).permute(2, 1, 0))
    assert images.pixels[1, :, :, 40:].max() == 0


@pytest.mark.parametrize(("resample", "crop_pct", "size"), [("bilinear", 1.0, 16), ("bicubic", 1.0, 16),
                                                            ("bicubic", 0.875, 18)])
def test_evaluation_on_the_device_equals_evaluation_from_files(data, resample, crop_pct, size):
    in_order = Batches(4, train=False)
    from_files = build_loader(data, in_order, image_size=16, resample=resample, crop_pct=crop_pct)
    images = ResidentImages(data, size, resample=resample, progress=False)
    on_device = ResidentLoader(images, in_order, image_size=16, crop_pct=crop_pct)
    assert same(batches(on_device), batches(from_files))


def test_training_on_the_device_equals_training_from_files(folder):
    """Where nothing was resized or cut for storing, the crops are the same up to Pillow's rounding."""
    data = ImageFolder(folder)
    keep = [i for i in range(14) if min(data.load(i).size) == 30 and max(data.load(i).size) <= 60]
    data.paths, data.labels = [data.paths[i] for i in keep], data.labels[keep]
    from_files = batches(build_loader(data, BATCHES, image_size=16), range(4))
    images = ResidentImages(data, 30, progress=False)
    on_device = batches(ResidentLoader(images, BATCHES, image_size=16), range(4))
    assert [x[:2] for x in from_files] == [x[:2] for x in on_device]
    for a, b in zip(from_files, on_device, strict=True):
        assert (a[2] - b[2]).abs().max() < 1.5 / 255


@pytest.mark.parametrize("size", [7, 16, 50])
@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (33, 33)])
def test_crops_equal_pillow_s(shape, size):
    width, height = shape
    image = smooth(width, height, seed=1)
    boxes = np.array([[0, 0, width, height], [3.3, 4.7, 21.2, 29.9], [10.5, 2, 12.5, 27]])
    flips = np.array([False, True, True])
    pixels = torch.zeros(3, 3, 33, 44, dtype=torch.uint8)
    picture = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    picture = picture.mT if height > width else picture
    pixels[:, :, : picture.shape[1], : picture.shape[2]] = picture
    pixels = pixels[:, :, : min(shape)]
    found = crop_and_resize(pixels, np.array([[height, width]] * 3), Crops(boxes, flips), size)
    for box, flip, result in zip(boxes, flips, found, strict=True):
        expected = image.resize((size, size), Image.Resampling.BICUBIC, box=tuple(box))
        expected = np.array(expected)[:, ::-1] if flip else np.array(expected)
        difference = result.permute(1, 2, 0).mul(255).numpy() - expected
        assert abs(difference).max() < 1.5  # Pillow rounds twice


class CopiesFromTheCPU(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = function is torch.ops.aten._to_copy.default and args[0].device.type == "cpu"
        self.count += leaves and torch.device(kwargs.get("device") or "cpu").type != "cpu"
        return function(*args, **kwargs)


def test_a_resident_batch_takes_two_copies_and_reads_nothing(data):
    """The images' numbers and their crops. The device meta raises where anything is read from it."""
    images = ResidentImages(data, 30, progress=False)
    images.device = torch.device("meta")
    images.pixels, images.labels = images.pixels.to(images.device), images.labels.to(images.device)
    with CopiesFromTheCPU() as copies:
        found = list(ResidentLoader(images, BATCHES, image_size=16))
    assert copies.count == 2 * len(found) == 6
    assert all(batch["image"].shape == (4, 3, 16, 16) and batch["image"].is_meta for batch in found)


def test_a_gpu_is_given_pinned_memory(monkeypatch):
    """Any other copy would wait for it."""
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pin") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **options: calls.append((args, options)) or tensor)
    upload(np.arange(3), torch.device("cuda"))
    assert calls == ["pin", ((torch.device("cuda"),), {"non_blocking": True})]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_crops_of_a_cpu(data):
    cpu, gpu = (
        batches(ResidentLoader(ResidentImages(data, 30, device, progress=False), BATCHES, image_size=16))
        for device in ("cpu", "cuda")
    )
    assert [x[:2] for x in cpu] == [x[:2] for x in gpu]
    assert all((a[2] - b[2].cpu()).abs().max() < 1e-3 for a, b in zip(cpu, gpu, strict=True))


# --- shards ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "set"
    report = pack(data, out, Encoding(size=20, format="webp"), shard_size=5, workers=2, progress=False)
    assert report.images == 14 and [shard["images"] for shard in report.shards] == [5, 5, 4]
    return out


def test_packed_pictures_are_resized_but_never_enlarged(packed, data, tmp_path):
    shards = Shards(packed)
    assert len(shards) == 14 and shards.classes == data.classes
    assert shards.labels.tolist() == data.labels.tolist()
    assert [shards.load(i).size for i in (0, 1, 2)] == [(27, 20), (20, 27), (20, 20)]
    pack(data, tmp_path / "large", Encoding(size=35, quality=95), progress=False)
    large = Shards(tmp_path / "large")
    assert large.load(0).size == (40, 30)
    assert abs(np.asarray(large.load(0), dtype=float) - np.asarray(data.load(0))).mean() < 3


def test_packing_twice_gives_the_same_bytes(packed, data, tmp_path):
    pack(data, tmp_path / "set", Encoding(size=20, format="webp"), shard_size=5, workers=1, progress=False)
    for path in packed.iterdir():
        assert path.read_bytes() == (tmp_path / "set" / path.name).read_bytes()


def test_shards_load_like_a_folder(packed):
    shards = Shards(packed)
    alone = batches(build_loader(shards, BATCHES, image_size=16))
    assert same(alone, batches(build_loader(shards, BATCHES, image_size=16, num_workers=2)))
    assert isinstance(open_data([packed]), Shards)


def test_shards_without_our_index_are_scanned(packed, tmp_path):
    for path in packed.glob("*.tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    indexed, scanned = Shards(packed), Shards(tmp_path)
    assert scanned.labels.tolist() == indexed.labels.tolist() and scanned.classes == ["0", "1"]
    assert all(np.array_equal(indexed.load(i), scanned.load(i)) for i in range(14))
    one = open_data([tmp_path / "set-000001.tar"])
    assert np.array_equal(one.load(0), indexed.load(5)) and one.labels.tolist() == [0, 0, 1, 1, 1]


def test_webdataset_reads_our_shards(packed, data):
    webdataset = pytest.importorskip("webdataset")
    urls = [str(path) for path in sorted(packed.glob("*.tar"))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode("pil").to_tuple("webp", "cls"))
    shards = Shards(packed)
    assert [label for _, label in samples] == data.labels.tolist()
    assert all(np.array_equal(image, shards.load(i)) for i, (image, _) in enumerate(samples))


def write_tar(path, files):
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def png(seed):
    buffer = io.BytesIO()
    smooth(9, 8, seed).save(buffer, "png")
    return buffer.getvalue()


def test_shards_of_other_makers(tmp_path):
    labelled = [("a/1.png", png(1)), ("a/1.json", b"{}"), ("a/1.txt", b"dog\n")]
    label_first = [("b/1.txt", b"cat"), ("b/1.PNG", png(2))]
    unlabelled = [("c.seg.png", png(4)), ("d.png", png(3))]  # a mask is not the sample's image
    write_tar(tmp_path / "x.tar", labelled + label_first + unlabelled)
    shards = Shards(tmp_path)
    assert shards.classes == ["cat", "dog"] and shards.labels.tolist() == [1, 0, -1]
    assert all(np.array_equal(shards.load(i), smooth(9, 8, i + 1)) for i in range(3))


def test_a_tar_without_images_is_named(tmp_path):
    write_tar(tmp_path / "x.tar", [("a.txt", b"dog")])
    with pytest.raises(DataError, match="1 shards, 0 images"):
        Shards(tmp_path / "x.tar")
