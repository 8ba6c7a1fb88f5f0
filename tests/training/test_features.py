"""Features of a frozen encoder: computed once they equal those computed directly; k-NN by hand."""

import math

import pytest
import torch
from torch import nn

from finola.data import Batches
from finola.errors import DataError, FinolaError, RecipeError
from finola.evaluation.neighbours import knn_accuracy, pooled_features
from finola.models.classifier import Classifier, ClassifierConfig
from finola.models.heads import map_and_tokens
from finola.training.features import FeatureLoader, FrozenFeatures

SIZE, COUNT, CLASSES = 32, 10, 3


def make_batches(batch_size=4):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(COUNT, 3, SIZE, SIZE, generator=generator)
    labels, indices = torch.arange(COUNT) % CLASSES, torch.arange(COUNT) + 100
    parts = zip(images.split(batch_size), labels.split(batch_size), indices.split(batch_size), strict=True)
    return [{"image": image, "label": label, "index": index} for image, label, index in parts]


def make_classifier(head, encoder="mobileformer_w720"):
    torch.manual_seed(0)
    model = Classifier(ClassifierConfig(encoder, image_size=SIZE, head=head, num_classes=CLASSES))
    model.freeze_encoder()
    return model.train()


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    return FrozenFeatures.collect(make_classifier("lin"), make_batches(), COUNT, tmp_path_factory.mktemp("features"))


@pytest.mark.parametrize("encoder", ["mobileformer_w720", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("head", ["lin", "tran1"])
def test_kept_features_are_those_computed_directly(head, encoder, tmp_path):
    model = make_classifier(head, encoder)
    frozen = FrozenFeatures.collect(model, make_batches(), COUNT, tmp_path / "new")
    assert model.head.training and not model.encoder.training, "the mode it was in"
    assert frozen.labels.tolist() == [i % CLASSES for i in range(COUNT)]
    model.eval()
    x = torch.cat([batch["image"] for batch in make_batches()])
    for kept, direct in zip(frozen.tensors, model.features(x), strict=True):
        assert kept.dtype == torch.float16
        torch.testing.assert_close(kept.float(), direct, rtol=1e-3, atol=1e-3)
    (batch,) = FeatureLoader(frozen, Batches(COUNT, train=False))
    torch.testing.assert_close(model.head.classify(*batch["features"]), model(x), rtol=1e-2, atol=1e-2)
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == [f"features{i}.bin" for i in range(len(frozen.tensors))]


def test_collecting_again_into_a_folder_leaves_the_older_features(tmp_path):
    model = make_classifier("lin")
    older = FrozenFeatures.collect(model, make_batches(), COUNT, tmp_path)
    before = older.tensors[0].clone()
    newer = FrozenFeatures.collect(model, make_batches()[:1], 4, tmp_path)
    assert torch.equal(older.tensors[0], before) and torch.equal(newer.tensors[0], before[:4])


def test_images_left_out_are_left_out_of_the_features(tmp_path):
    batches = make_batches()
    batches[0] = {key: value[1:] for key, value in batches[0].items()}
    frozen = FrozenFeatures.collect(make_classifier("lin"), batches, COUNT, tmp_path)
    assert len(frozen) == len(frozen.tensors[0]) == COUNT - 1
    assert frozen.indices.tolist() == list(range(101, 110))


@pytest.mark.parametrize("size, message", [(COUNT - 1, "more than count=9 images"), (0, "got no image")])
def test_a_wrong_count_is_named(size, message, tmp_path):
    batches = make_batches() if size else []
    with pytest.raises(DataError, match=message):
        FrozenFeatures.collect(make_classifier("lin"), batches, size, tmp_path)


@pytest.mark.parametrize("value, shown", [(1e5, "100000"), (math.nan, "nan")])
def test_values_beyond_float16_are_named(value, shown, tmp_path):
    model = make_classifier("tran1")
    final, tokens = torch.ones(4, 720, 2, 2), torch.full((4, 6, 192), value)
    model.encoder.forward_map_and_tokens = lambda x: (final, tokens)
    with pytest.raises(FinolaError, match=f"features1: got a value of {shown}, expected at most 65504"):
        FrozenFeatures.collect(model, make_batches(), COUNT, tmp_path)


def test_a_disk_too_small_is_named(tmp_path):
    with pytest.raises(DataError, match="bytes of free disk; choose a folder on a larger one"):
        FrozenFeatures.collect(make_classifier("lin"), make_batches(), 10**14, tmp_path)


def test_training_shuffles_and_keeps_rows_together(frozen):
    loader = FeatureLoader(frozen, Batches(4, train=True, seed=1))
    orders = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        batches = list(loader)
        orders.append(torch.cat([batch["index"] for batch in batches]))
        for batch in batches:
            rows = batch["index"] - 100
            assert torch.equal(batch["features"][0], frozen.tensors[0][rows].float())
            assert torch.equal(batch["label"], frozen.labels[rows])
    assert len(loader) == 2 and len(set(orders[0].tolist())) == 8
    assert not torch.equal(*orders)


def test_evaluation_is_in_order_and_complete(frozen):
    batches = list(FeatureLoader(frozen, Batches(4, train=False)))
    assert torch.cat([batch["index"] for batch in batches]).tolist() == list(range(100, 110))


def test_a_resumed_epoch_goes_on_where_it_stopped(frozen):
    batching = Batches(2, train=True, seed=1)
    whole = [batch["index"].tolist() for batch in FeatureLoader(frozen, batching)]
    loader = FeatureLoader(frozen, batching)
    batches = iter(loader)
    start = [next(batches)["index"].tolist() for _ in range(2)]
    resumed = FeatureLoader(frozen, batching)
    resumed.load_state_dict(loader.state_dict())
    assert start + [batch["index"].tolist() for batch in resumed] == whole
    with pytest.raises(RecipeError, match="global_batch was 2, is 4"):
        FeatureLoader(frozen, Batches(4, train=True, seed=1)).load_state_dict(loader.state_dict())


def test_pooled_features_are_the_mean_of_the_map_and_the_token():
    model = make_classifier("tran1")
    features, labels = pooled_features(model, make_batches())
    assert features.shape == (COUNT, 720 + 192) and features.dtype == torch.float32 and not features.requires_grad
    assert labels.tolist() == [i % CLASSES for i in range(COUNT)]
    image = make_batches()[0]["image"]
    final, token = map_and_tokens(model.encoder.eval(), model.normalise(image))
    torch.testing.assert_close(features[:4], torch.cat([final.mean((2, 3)), token], dim=1))
    assert model.head.training


def test_an_encoder_of_another_kind_is_named():
    with pytest.raises(FinolaError, match="encoder: got Linear, expected a Mobile-Former or a timm ViT"):
        map_and_tokens(nn.Linear(2, 2), torch.zeros(1, 2))


# --- k-NN --------------------------------------------------------------------------------------------------


def test_separable_clusters_are_told_apart():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3000) % 5
    points = 10 * torch.eye(8)[labels] + torch.randn(3000, 8, generator=generator)
    assert knn_accuracy(points[:1500], labels[:1500], points[1500:], labels[1500:], 5) == 1.0
    assert knn_accuracy(points[:1500], labels[:1500], points[1500:], (labels[1500:] + 1) % 5, 5) == 0.0


def unit(degrees):
    angles = torch.tensor(degrees).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def test_weights_decide_by_hand():
    """Neighbours at cosines 0.9848 (10 degrees, class 0) and twice 0.8660 (30 degrees, class 1): the one outvotes
    the two where exp((0.9848 - 0.8660) / T) > 2, that is for T < 0.1188 / ln 2 = 0.171."""
    train, labels = 5 * unit([10.0, 30.0, -30.0, 180.0]), torch.tensor([0, 1, 1, 2])
    query = 3 * unit([0.0])
    for k, temperature, winner in [(1, 1.0, 0), (3, 0.07, 0), (3, 0.17, 0), (3, 0.173, 1), (3, 1.0, 1), (4, 0.17, 0)]:
        for truth in range(3):
            accuracy = knn_accuracy(train, labels, query, torch.tensor([truth]), 3, k, temperature)
            assert accuracy == float(truth == winner)


def test_every_query_counts_once():
    train, labels = unit([0.0, 90.0]), torch.tensor([0, 1])
    queries = unit([5.0, 85.0, 80.0, 10.0])
    assert knn_accuracy(train, labels, queries, torch.tensor([0, 1, 1, 1]), 2, k=1) == 0.75


@pytest.mark.parametrize("k", [0, 3])
def test_more_neighbours_than_images_are_refused(k):
    with pytest.raises(FinolaError, match=f"k: got {k} neighbours, expected 1 to 2"):
        knn_accuracy(unit([0.0, 90.0]), torch.tensor([0, 1]), unit([0.0]), torch.tensor([0]), 2, k=k)


@pytest.mark.parametrize("train_label, val_label, name", [(-1, 0, "train_labels"), (0, 2, "val_labels")])
def test_labels_out_of_range_are_named(train_label, val_label, name):
    with pytest.raises(FinolaError, match=f"{name}: got labels from .* expected 0 to 1"):
        knn_accuracy(unit([0.0]), torch.tensor([train_label]), unit([0.0]), torch.tensor([val_label]), 2, k=1)
