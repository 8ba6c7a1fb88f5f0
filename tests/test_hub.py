"""Models from and to the Hub: huggingface_hub itself against a stand-in on a loopback address (`hub_server`).

The library reads its environment when it is imported, so that commands run in processes of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import Hub
from pictures import photo
from PIL import Image
from safetensors.torch import save
from terminal import Terminal
from tiny_codecs import tiny_codec

from finola import WeightsError, create_model, load_weights, save_weights
from finola.codec import calibration_path
from finola.hub import parse
from finola.registry import DEFAULT_MODEL, pretrained_path
from finola.weights import description, find_weights, read_tensors, weights_hash

NAMES = ("model.safetensors", "config.json", "codec.safetensors", "README.md")


@pytest.fixture(scope="module")
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return str(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def terminal(hub, home) -> Iterator[Terminal]:
    with closing(Terminal(HF_ENDPOINT=hub.url, HF_HOME=home)) as terminal:
        yield terminal


@pytest.fixture(autouse=True)
def nothing_asked(hub):
    hub.asked.clear()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Tiny weights with their calibration, and a photograph beside them."""
    codec = tiny_codec()
    path = save_weights(codec.model, tmp_path_factory.mktemp("mine") / "tiny.safetensors", {"recipe": '"none"'})
    codec.calibration.save(calibration_path(path))
    photo(70, 50).save(path.parent / "photo.png")
    return path


@pytest.fixture(scope="module")
def files(weights) -> dict[str, bytes]:
    """The files of a repository."""
    return {"model.safetensors": weights.read_bytes(), "codec.safetensors": calibration_path(weights).read_bytes(),
            "config.json": json.dumps(description(weights)).encode(), "README.md": b"", ".gitattributes": b""}


def compress(weights: Path, source: str) -> list:
    return ["compress", weights.parent / "photo.png", weights.parent / "photo.fnl", "--weights", source]


# from the Hub -------------------------------------------------------------------------------------


def test_what_is_pushed_comes_back_bit_for_bit(hub, terminal, tmp_path):
    """The shipped model and its codec, under the names that streams know them by."""
    photo(150, 140).save(tmp_path / "photo.png")
    code, out, errors = terminal("push", DEFAULT_MODEL, "me/shipped", "--json")
    assert (code, errors) == (0, "")
    repository, report = hub.repositories["me/shipped"], json.loads(out)
    pushed = repository.commits[repository.refs["main"]]
    assert pushed.keys() - {".gitattributes"} == set(NAMES) == report["bytes"].keys()
    assert pushed["model.safetensors"] == pretrained_path(DEFAULT_MODEL).read_bytes()
    assert report["commit"] == repository.refs["main"]
    for name, source in (("ours", DEFAULT_MODEL), ("theirs", f"hf-hub:me/shipped@{report['commit']}")):
        words = ("--weights", source, "--device", "cpu")
        assert terminal("compress", tmp_path / "photo.png", tmp_path / f"{name}.fnl", *words)[0] == 0
        assert terminal("decompress", tmp_path / f"{name}.fnl", tmp_path / f"{name}.png", *words)[0] == 0
    assert (tmp_path / "ours.fnl").read_bytes() == (tmp_path / "theirs.fnl").read_bytes()
    assert Image.open(tmp_path / "ours.png").tobytes() == Image.open(tmp_path / "theirs.png").tobytes()
    assert terminal.python(f"""if True:
        import finola, torch
        x = torch.rand(1, 3, 128, 128)
        shipped = finola.create_model("{DEFAULT_MODEL}", pretrained=True).eval()
        for model in (finola.load_weights("hf-hub:me/shipped"), finola.create_model(pretrained="hf-hub:me/shipped")):
            print(torch.equal(model.eval()(x), shipped(x)), model.config == shipped.config)
    """).split() == ["True"] * 4


def test_only_our_files_are_fetched_each_once(hub, terminal, files, weights):
    hub.add("me/many", files | {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "old.ckpt": b"pickle"})
    for _ in range(2):
        assert terminal(*compress(weights, "hf-hub:me/many"))[0] == 0
    fetched = [path.rpartition("/")[2] for path in hub.asked if path.startswith("GET /me/many")]
    assert fetched == ["config.json"]
    assert len([path for path in hub.asked if path.startswith("GET /lfs")]) == 2
    assert not any(word in path for path in hub.asked for word in ("bin", "py", "ckpt"))
    assert terminal(*compress(weights, "hf-hub:me/many")) and len(hub.asked) < 16


def test_a_branch_moves_and_a_pinned_revision_does_not(hub, terminal, files):
    repository = hub.add("me/moving", files)
    first = repository.refs["main"]
    repository.refs["v1"] = first
    second = repository.commit(files | {"README.md": b"newer"})
    found = {revision: Path(terminal.python(f"""if True:
        from finola.weights import find_weights
        print(find_weights("hf-hub:me/moving{revision}"))
    """).strip()) for revision in ("", "@main", "@v1", f"@{first}", f"@{second}")}
    commits = {revision: path.parent.name for revision, path in found.items()}
    assert commits == {"": second, "@main": second, "@v1": first, f"@{first}": first, f"@{second}": second}
    third = repository.commit(files | {"README.md": b"newest"})
    assert third in terminal.python('print(find_weights("hf-hub:me/moving"))')


def test_without_a_network_the_cache_is_taken_and_a_line_says_so(hub, terminal, home, files, weights):
    commit = hub.add("me/known", files).refs["main"]
    assert terminal(*compress(weights, "hf-hub:me/known"))[0] == 0
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": home}
    for variables, reason in ((nobody, "the Hub cannot be reached"),
                              (nobody | {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")):
        with closing(Terminal(**variables)) as alone:
            code, _, errors = alone(*compress(weights, "hf-hub:me/known"))
            assert code == 0 and errors.count("\n") == 1
            assert reason in errors and f"commit {commit[:12]} of the cache is taken" in errors
            assert alone("decompress", weights.parent / "photo.fnl", weights.parent / "b.png",
                         "--weights", f"hf-hub:me/known@{commit}")[0] == 0
            line = alone.fails(4, *compress(weights, "hf-hub:me/unknown"))
            assert reason in line and "the cache does not have it" in line
    hub.repositories["me/known"].status = 429
    assert "HTTP 429" in terminal(*compress(weights, "hf-hub:me/known"))[2]  # and goes on


def test_a_connection_that_is_lost_is_taken_up_again(hub, terminal, files, weights):
    hub.add("me/lost", files, cuts=1)
    code, _, errors = terminal(*compress(weights, "hf-hub:me/lost"))
    assert (code, errors) == (0, "") or (code, errors.count("\n")) == (4, 1)  # older versions do not try again
    assert terminal(*compress(weights, "hf-hub:me/lost"))[0] == 0


@pytest.mark.parametrize(("name", "options", "variables", "words"), [
    ("none", None, {}, ["HTTP 404", "no such repository, or a private one", "hf auth login"]),
    ("none", None, {"HF_TOKEN": ""}, ["HTTP 401", "no such repository, or one that wants a login", "HF_TOKEN"]),
    ("private", {"private": True}, {"HF_TOKEN": "hf_wrong"}, ["HTTP 401"]),
    ("gated", {"gated": True}, {}, ["its owner grants access one by one"]),
    ("busy", {"status": 429}, {}, ["HTTP 429", "too many requests", "the cache does not have it"]),
    ("broken", {"status": 503}, {}, ["HTTP 503", "the cache does not have it"]),
])
def test_what_the_hub_refuses(hub, terminal, files, weights, name, options, variables, words):
    if options:
        hub.add(f"faulty/{name}", files, **options)
    line = terminal.fails(4, *compress(weights, f"hf-hub:faulty/{name}"), **variables)
    assert all(word in line for word in [f"finola compress: hf-hub:faulty/{name}: ", *words]), line
    assert terminal.cached(f"faulty/{name}") == []


def test_a_login_opens_a_private_repository(hub, terminal, files, weights):
    hub.add("me/private", files, private=True)
    assert terminal(*compress(weights, "hf-hub:me/private"))[0] == 0


def test_a_revision_that_is_not_there(hub, terminal, files, weights):
    hub.add("me/one", files)
    assert "no such revision" in terminal.fails(4, *compress(weights, "hf-hub:me/one@v9"))


@pytest.mark.parametrize(("file", "change", "word"), [
    ("model.safetensors", lambda data: data[:-1] + b"!", "the Hub states"),
    ("model.safetensors", lambda data: data[:-1000], "the transfer failed"),
    ("config.json", lambda data: data.replace(b"16", b"17"), "the Hub states"),
    ("codec.safetensors", lambda data: data[:-1] + b"!", "the Hub states"),
])
def test_a_file_that_is_not_what_the_hub_states_is_not_kept(hub, terminal, files, weights, file, change, word):
    name = f"faulty/{file.replace('.', '_')}_{len(change(files[file]))}"
    repository = hub.add(name, files, served={file: change(files[file])})
    line = terminal.fails(4, *compress(weights, f"hf-hub:{name}"))
    assert word in line and name in line, line
    assert file not in terminal.cached(name)
    repository.served.clear()
    assert terminal(*compress(weights, f"hf-hub:{name}"))[0] == 0


def rewritten(weights: Path, edit) -> bytes:
    tensors, metadata = read_tensors(weights)
    edit(tensors, metadata)
    return save(tensors, metadata)


def no_tensor(tensors, metadata) -> None:
    tensors.popitem()


def no_number(tensors, metadata) -> None:
    next(tensor for tensor in tensors.values() if tensor.is_floating_point() and tensor.numel()).fill_(torch.nan)


@pytest.mark.parametrize(("change", "word", "whole"), [
    (lambda weights: {"config.json": b'{"model_type": "bert"}'}, "model of another program", False),
    (lambda weights: {"config.json": b"[1]"}, "model of another program", False),
    (lambda weights: {"config.json": None}, "has no config.json", False),
    (lambda weights: {"model.safetensors": None, "pytorch_model.bin": b""}, "has no model.safetensors", False),
    (lambda weights: {"config.json": b'{"format": "finola-autoencoder/1", "config": {}}'},
     "config.json is not that of model.safetensors", True),
    (lambda weights: {"model.safetensors": save({"a": torch.zeros(1)})}, "no configuration in its header", True),
    (lambda weights: {"model.safetensors": b"pickle"}, "not a whole safetensors file", True),
    (lambda weights: {"model.safetensors": rewritten(weights, no_tensor)}, "missing tensors", True),
    (lambda weights: {"model.safetensors": rewritten(weights, no_number)}, "not finite", True),
], ids=range(9))
def test_a_repository_that_is_not_ours(hub, terminal, files, weights, change, word, whole, request):
    name = f"foreign/{request.node.callspec.id.replace('-', '_')}"
    changed = {key: data for key, data in (files | change(weights)).items() if data is not None}
    hub.add(name, changed)
    assert word in terminal.fails(4, *compress(weights, f"hf-hub:{name}"))
    assert whole == any(path.startswith("GET /lfs") for path in hub.asked)  # no weights without a config.json of ours


def test_training_starts_from_it_and_names_it(hub, terminal, files, weights):
    hub.add("me/start", files)
    assert terminal.python("""if True:
        from finola.training.origin import origin_of_weights
        from finola.training.transfer import transfer
        print(transfer(finola.load_weights("hf-hub:me/start"), "hf-hub:me/start"))
        print(origin_of_weights("hf-hub:me/start"))
    """).splitlines() == ["whole model", str({
        "file": "hf-hub:me/start", "sha256": weights_hash(weights), "recipe": "none", "runs": None, "part": None})]


@pytest.mark.parametrize("source", [
    "hf-hub:", "hf-hub:name", "hf-hub:a/b/c", "hf-hub:a/b@", "hf-hub:a/../b", "hf-hub:a/b@../../c", "hf-hub:a/b@v 1",
    "hf-hub:a/b--c", "hf-hub:/b", "hf-hub:a/b.git", "hf-hub:-a/b",
])
def test_a_malformed_name(source):
    with pytest.raises(WeightsError, match="no name of a repository") as caught:
        find_weights(source)
    assert str(caught.value).startswith(f"{source}: ") and "\n" not in str(caught.value)


def test_names_of_repositories():
    assert parse("hf-hub:own.er/na-me_1") == ("own.er/na-me_1", "main")
    assert parse("hf-hub:a/b@refs/pr/1") == ("a/b", "refs/pr/1")


def test_weights_of_another_architecture_than_the_name(weights):
    with pytest.raises(WeightsError, match="holds another model .*embed_dim 16 there, 768 here") as caught:
        create_model(DEFAULT_MODEL, pretrained=weights)
    assert str(caught.value).startswith(f"{weights}: ")
    config = load_weights(weights).config
    assert create_model(DEFAULT_MODEL, pretrained=weights, **config.to_dict()).config == config


# to the Hub ---------------------------------------------------------------------------------------


def pushed(hub: Hub, name: str) -> dict[str, bytes]:
    repository = hub.repositories[name]
    return repository.commits[repository.refs["main"]]


def test_push_writes_our_files_and_removes_those_that_are_out_of_date(hub, terminal, weights, files):
    assert terminal("push", weights, "me/mine", "--private", "--message", "first")[0] == 0
    assert hub.repositories["me/mine"].private
    assert {name: pushed(hub, "me/mine")[name] for name in NAMES[::2]} == {name: files[name] for name in NAMES[::2]}
    assert json.loads(pushed(hub, "me/mine")["config.json"]) == {"library_name": "finola", **description(weights)}
    header, card = pushed(hub, "me/mine")["README.md"].decode().removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(header) == {
        "license": "unknown", "library_name": "finola", "pipeline_tag": "image-feature-extraction",
        "tags": ["finola", "autoencoder"]}
    assert 'load_weights("hf-hub:me/mine")' in card and "| recipe | none |" in card
    alone = weights.parent / "alone.safetensors"
    alone.write_bytes(weights.read_bytes())
    (weights.parent / "card.md").write_text("---\nlicense: mit\n---\nMine\n")
    assert terminal("push", alone, "me/mine", "--card", weights.parent / "card.md")[0] == 0
    assert pushed(hub, "me/mine").keys() - {".gitattributes"} == set(NAMES) - {"codec.safetensors"}
    assert pushed(hub, "me/mine")["README.md"].endswith(b"Mine\n")
    assert terminal("push", alone, "me/mine", "--codec", calibration_path(weights))[0] == 0
    assert "codec.safetensors" in pushed(hub, "me/mine")
    commits = len(hub.repositories["me/mine"].commits)
    assert terminal("push", alone, "me/mine", "--codec", calibration_path(weights))[0] == 0
    assert len(hub.repositories["me/mine"].commits) == commits  # nothing has changed


def test_the_card_of_shipped_weights_has_their_terms(hub, terminal):
    assert terminal("push", DEFAULT_MODEL, "me/terms")[0] == 0
    card = pushed(hub, "me/terms")["README.md"].decode()
    assert card.startswith("---\nlicense: other\n") and "non-commercial research and for teaching" in card


@pytest.mark.parametrize(("code", "target", "options", "word"), [
    (2, "mine", [], "expected owner/name"),
    (2, "hf-hub:me/new", [], "expected owner/name"),
    (2, "me/new@v1", [], "expected owner/name"),
    (2, "me/public", ["--private"], "is there, and public"),
    (2, "me/foreign", [], "holds files that no repository of finola has (pytorch_model.bin)"),
    (2, "me/new", ["--card", "photo.png"], "does not begin with a YAML header"),
    (3, "me/new", ["--card", "none.md"], "No such file"),
    (4, "me/new", ["--codec", "none.safetensors"], "no such file"),
    (4, "others/new", [], "HTTP 403"),
    (4, "readonly/new", [], "readonly/new (made, and still empty): the Hub does not allow this"),
])
def test_push_says_what_is_wrong(hub, terminal, weights, files, code, target, options, word):
    hub.add("me/public", files)
    hub.add("me/foreign", {"pytorch_model.bin": b""})
    before = {name: dict(repository.commits) for name, repository in hub.repositories.items()}
    options = [option if option.startswith("-") else weights.parent / option for option in options]
    assert word in terminal.fails(code, "push", weights, target, *options)
    after = {name: repository.commits for name, repository in hub.repositories.items() if name != "readonly/new"}
    assert after == before


def test_push_without_a_login(hub, terminal, weights):
    assert "HF_TOKEN" in terminal.fails(2, "push", weights, "me/new", HF_TOKEN="")
    assert not [path for path in hub.asked if "/me/new" in path]


def test_weights_that_cannot_be_loaded_are_not_pushed(hub, terminal, weights, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(rewritten(weights, no_number))
    assert "not finite" in terminal.fails(4, "push", tmp_path / "bad.safetensors", "me/bad")
    assert hub.asked == []
