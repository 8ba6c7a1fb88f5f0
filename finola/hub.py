"""Models on the Hugging Face Hub: `hf-hub:owner/name`, or `hf-hub:owner/name@revision` for a commit, a tag or a branch.

A repository of ours holds these files. No other is ever fetched from one, so no pickle and no code (docs/hub.md):

    model.safetensors    weights, as `finola.save_weights` writes them
    config.json          the format and the configuration that stand in the header of the weights
    codec.safetensors    what the codec knows of the model, if `finola calibrate` has been run
    README.md            the model card

This module knows names, files and hashes, and no model. `huggingface_hub` is imported on first use.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from finola.errors import FinolaError, RecipeError, WeightsError

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi
    from huggingface_hub.hf_api import RepoSibling

PREFIX = "hf-hub:"
WEIGHTS, CONFIG, CODEC, CARD = "model.safetensors", "config.json", "codec.safetensors", "README.md"
NAME = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[^\s@]+))?", re.ASCII)
DEFAULT_REVISION = "main"
TIMEOUT = 10  # seconds for the first answer
LOGIN = "set HF_TOKEN, or run `hf auth login`"
REFUSALS = {
    401: f"no such repository, or one that wants a login ({LOGIN})",
    403: f"the Hub does not allow this ({LOGIN} of an account that may)",
    404: f"no such repository, or a private one ({LOGIN})",
    429: "the Hub has had too many requests from here; try again later",
}

logger = logging.getLogger(__name__)


class Repository(NamedTuple):
    """What a name means: owner/name, and a commit, a tag or a branch."""

    id: str
    revision: str


class _Unreachable(WeightsError):
    """The Hub gave no answer, or none now; what is in the cache may do."""


def parse(source: str) -> Repository:
    """`hf-hub:owner/name[@revision]` in its parts; WeightsError where it is not of this form."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented all the same

    found = NAME.fullmatch(source.removeprefix(PREFIX))
    try:
        if found is None or ".." in source:
            raise HFValidationError("expected owner/name or owner/name@revision")
        validate_repo_id(found["id"])
    except HFValidationError as error:
        raise WeightsError(f"{source}: no name of a repository on the Hub; {error}") from None
    return Repository(found["id"], found["revision"] or DEFAULT_REVISION)


def download(source: str) -> Path:
    """The folder of the local cache with the files of `hf-hub:owner/name[@revision]`; what is not there is fetched.

    Where the Hub cannot be reached, the revision that was fetched last is taken, and a line of the log says so.

    Raises:
        WeightsError: a malformed name, no such repository or revision, one that this login may not read, too many
            requests, no network and nothing in the cache, a download that was cut short, a file of another size or
            hash than the Hub states, a repository of another program.
        OSError: a full disk and the like.
    """
    repository = parse(source)
    try:
        with _one_line(source):
            info = _api().model_info(repository.id, revision=repository.revision, files_metadata=True, timeout=TIMEOUT)
    except _Unreachable as error:
        return _cached(repository, error)
    files = {file.rfilename: file for file in info.siblings or []}
    if missing := {WEIGHTS, CONFIG} - files.keys():
        raise WeightsError(f"{source}: has no {' and no '.join(sorted(missing))}; expected a repository of finola push")
    for name in (CONFIG, CODEC, WEIGHTS):  # the weights last: once they are in the cache, everything is
        if name in files:
            path = _fetch(source, repository.id, files[name], str(info.sha))
            if name == CONFIG:
                _check_config(source, path)
    noted = _in_cache(repository, CONFIG)
    if noted is None or noted.parent.name != info.sha:  # a branch that is new or has moved
        _fetch(source, repository.id, files[CONFIG], repository.revision)  # notes which commit it means
    return path.parent


def upload(target: str, files: Mapping[str, Path | bytes], message: str, private: bool = False) -> CommitInfo:
    """Put the files of one model into the repository `owner/name`, by one commit; it is made where there is none.

    Args:
        files: by their names on the Hub; those of our names that are left out are deleted there.

    Raises:
        RecipeError: a malformed name, no login, a repository that is public or holds other files.
        WeightsError: what the Hub refuses, or no network.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, get_token

    _check_target(target)
    api = _api()
    with _one_line(target):
        if get_token() is None:
            raise RecipeError(f"{target}: the Hub wants a login; {LOGIN}")
        info = api.model_info(target) if api.repo_exists(target) else None
    there = {file.rfilename for file in info.siblings or []} - {".gitattributes"} if info else set()
    if info and private and not info.private:
        raise RecipeError(f"--private: {target} is there, and public; change that on its page or choose another"
                          " name")
    if others := sorted(there - {WEIGHTS, CONFIG, CODEC, CARD}):
        raise RecipeError(f"{target}: holds files that no repository of finola has ({', '.join(others[:3])}); choose"
                          " another name")
    if not info:
        with _one_line(target):
            api.create_repo(target, private=private or None)
    added = [CommitOperationAdd(name, content) for name, content in files.items()]
    deleted = [CommitOperationDelete(name) for name in sorted(there - files.keys())]
    with _one_line(target if info else f"{target} (made, and still empty)"):
        return api.create_commit(target, [*deleted, *added], commit_message=message,
                                 parent_commit=info.sha if info else None)


def _check_target(name: str) -> None:
    """Raises RecipeError unless it is owner/name."""
    try:
        if parse(name).id != name:
            raise RecipeError(f"{name}: expected owner/name alone, whose branch {DEFAULT_REVISION} gets the files")
    except WeightsError as error:
        raise RecipeError(str(error)) from None


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(library_name="finola")


def _fetch(source: str, repository: str, file: RepoSibling, revision: str) -> Path:
    """A file of the cache, which is as the Hub states it; one that is not is removed."""
    with _one_line(source):
        path = Path(_api().hf_hub_download(repository, file.rfilename, revision=revision))
    stated = (file.size, file.lfs.sha256 if file.lfs else file.blob_id)
    found = (path.stat().st_size, _digest(path, "sha256" if file.lfs else "git"))
    if found != stated:
        path.resolve().unlink()
        path.unlink(missing_ok=True)  # where the cache has links
        raise WeightsError(f"{source}: {file.rfilename} has {found[0]} bytes of hash {found[1][:12]}, the Hub states"
                           f" {stated[0]} of {str(stated[1])[:12]}; it is removed from the cache, try again")
    return path


def _digest(path: Path, kind: str) -> str:
    """SHA-256 of a large file, or git's name of a small one."""
    if kind == "git":
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_config(source: str, path: Path) -> None:
    """Raises WeightsError unless config.json is of this program; before the weights are fetched."""
    try:
        form = json.loads(path.read_bytes())["format"]
    except (ValueError, LookupError, TypeError):
        form = None
    if not str(form).startswith("finola-"):
        raise WeightsError(f"{source}: its config.json has format {form!r}, expected one of finola push; it holds a "
                           "model of another program")


def _cached(repository: Repository, reason: _Unreachable) -> Path:
    """The folder of what was fetched earlier; `reason` is raised where there is nothing whole."""
    weights = _in_cache(repository, WEIGHTS)
    if weights is None:
        raise WeightsError(f"{reason}, and the cache does not have it") from reason
    logger.warning("%s; commit %s of the cache is taken", reason, weights.parent.name[:12])
    return weights.parent


def _in_cache(repository: Repository, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository.id, name, revision=repository.revision)
    return Path(found) if isinstance(found, str) else None


@contextmanager
def _one_line(source: str) -> Iterator[None]:
    """Whatever the library raises becomes one WeightsError."""
    try:
        with _quiet():
            yield
    except FinolaError:
        raise
    except Exception as error:  # of many families: HTTP, JSON, hashes, Xet
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise  # of the disk
        raise _explained(source, error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """The library prints no warnings, and bars of its progress for people alone."""
    from huggingface_hub.utils import logging as library
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    verbosity, bars = library.get_verbosity(), not (are_progress_bars_disabled() or sys.stderr.isatty())
    library.set_verbosity_error()
    if bars:
        disable_progress_bars()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if bars:
            enable_progress_bars()


def _explained(source: str, error: Exception) -> WeightsError:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RevisionNotFoundError

    transport = HfHubHTTPError.__bases__[0]  # the HTTP library's own; which one depends on the version
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    words = str(error) or type(error).__name__
    if isinstance(error, HfHubHTTPError) and status != 429:  # there the library says for how long
        words = error.server_message or words
    said = " ".join(words.split())[:300]
    if isinstance(error, OfflineModeIsEnabled):
        return _Unreachable(f"{source}: the Hub is not asked, as HF_HUB_OFFLINE is set")
    if isinstance(error, RevisionNotFoundError):
        return WeightsError(f"{source}: the repository has no such revision; expected a commit, a tag or a branch")
    if isinstance(error, GatedRepoError):
        return WeightsError(f"{source}: its owner grants access one by one; ask on its page, then {LOGIN}")
    if status is not None:
        kind = _Unreachable if status == 429 or status >= 500 else WeightsError
        return kind(f"{source}: {REFUSALS.get(status, 'the Hub cannot do this')} (HTTP {status}: {said})")
    if isinstance(error, transport):
        return _Unreachable(f"{source}: the Hub cannot be reached ({said})")
    if isinstance(error, json.JSONDecodeError):
        return WeightsError(f"{source}: what answers is not the Hub; check HF_ENDPOINT and the proxy")
    return WeightsError(f"{source}: the transfer failed ({said}); try again")
