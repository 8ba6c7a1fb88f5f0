"""A stand-in for the Hugging Face Hub on a loopback address: the routes that huggingface_hub asks of it, as it asks."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass
class Repository:
    """The files of each commit, and what goes wrong with it."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # branches and tags
    status: int | None = None  # of every answer of the API
    served: dict[str, bytes] = field(default_factory=dict)  # name -> what comes instead of the file
    cuts: int = 0  # downloads of large files that end in the middle

    def commit(self, files: dict[str, bytes], *refs: str) -> str:
        """Make a commit of exactly these files; its id."""
        found = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[found] = files
        self.refs |= dict.fromkeys(("main", *refs), found)
        return found

    def find(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)


class Hub(ThreadingHTTPServer):
    """To be used in a `with` statement."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}  # SHA-256 -> uploaded content
        self.asked: list[str] = []  # "METHOD path" of every request

    def __enter__(self) -> Hub:
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    def add(self, name: str, files: dict[str, bytes], **options) -> Repository:
        self.repositories[name] = repository = Repository(**options)
        repository.commit(files)
        return repository


def is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def content_id(name: str, data: bytes | None) -> str | None:
    if data is None:
        return None
    return hashlib.sha256(data).hexdigest() if is_large(name) else git_id(data)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_) -> None:
        pass

    def answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[0] == "lfs":
            self.large_file(parts[1])
        elif path == "/api/validate-yaml":
            self.json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self.create(json.loads(self.body))
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.batch(json.loads(self.body))
        elif parts[:2] == ["api", "models"]:
            self.api("/".join(parts[2:4]), parts[4:])
        elif parts[2:3] == ["resolve"]:
            self.resolve("/".join(parts[:2]), parts[3], parts[4])
        else:
            self.refuse(404)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    # what a request wants -------------------------------------------------------------------------

    def api(self, name: str, words: list[str]) -> None:
        if (repository := self.readable(name)) is None:
            return
        if words[:1] == ["preupload"]:
            here = repository.commits[repository.refs["main"]]
            self.json({"files": [{
                "path": file["path"], "uploadMode": "lfs" if is_large(file["path"]) else "regular",
                "shouldIgnore": False, "oid": content_id(file["path"], here.get(file["path"])),
            } for file in json.loads(self.body)["files"]]})
        elif words[:1] == ["commit"]:
            self.commit(name, repository)
        elif (commit := repository.find(words[1] if words else "main")) is None:
            self.refuse(404, "RevisionNotFound")
        else:
            self.json({"id": name, "sha": commit, "private": repository.private, "siblings": [
                {"rfilename": file, "size": len(data), "blobId": git_id(data), **({"lfs": {
                    "sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130,
                }} if is_large(file) else {})} for file, data in repository.commits[commit].items()]})

    def resolve(self, name: str, revision: str, file: str) -> None:
        if (repository := self.readable(name)) is None:
            return
        commit = repository.find(revision)
        if repository.gated:
            return self.refuse(403, "GatedRepo")
        if commit is None or file not in repository.commits[commit]:
            return self.refuse(404, "EntryNotFound" if commit else "RevisionNotFound")
        data = repository.commits[commit][file]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{git_id(data)}"'}
        data = repository.served.get(file, data)
        if not is_large(file):
            return self.send(200, data, headers)
        whole = repository.commits[commit][file]
        stated = content_id(file, whole)
        key = f"{stated}-{name.replace('/', '-')}"
        self.server.large[key] = data
        host = self.server.url.replace("127.0.0.1", "localhost")  # another one, as the Hub's storage is
        self.send(302, b"", headers | {"Location": f"{host}/lfs/{key}", "X-Linked-Size": str(len(whole)),
                                       "X-Linked-Etag": f'"{stated}"'})

    def large_file(self, key: str) -> None:
        if self.command == "PUT":
            self.server.large[hashlib.sha256(self.body).hexdigest()] = self.body
            return self.send(200)
        repository = self.server.repositories[key.partition("-")[2].replace("-", "/", 1)]
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        data = self.server.large[key]
        cut, repository.cuts = repository.cuts > 0, max(0, repository.cuts - 1)
        self.send(206 if first else 200, data[first:], {
            "Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}, cut=cut)

    def create(self, wanted: dict) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        if not self.logged_in() or wanted["organization"] == "others":
            return self.refuse(403 if self.logged_in() else 401)
        private = wanted.get("visibility") == "private" or wanted.get("private", False)
        self.server.repositories[name] = repository = Repository(private=private)
        repository.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self.json({"url": f"{self.server.url}/{name}"})

    def batch(self, wanted: dict) -> None:
        self.json({"transfer": "basic", "objects": [
            {**file, "actions": {"upload": {"href": f"{self.server.url}/lfs/{file['oid']}"}}}
            for file in wanted["objects"]]})

    def commit(self, name: str, repository: Repository) -> None:
        if not self.logged_in() or name.startswith("readonly/"):
            return self.refuse(403)
        files = dict(repository.commits[repository.refs["main"]])
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        made = repository.commit(files)
        self.json({"commitUrl": f"{self.server.url}/{name}/commit/{made}", "commitOid": made})

    # answers --------------------------------------------------------------------------------------

    def logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def readable(self, name: str) -> Repository | None:
        """The repository, or None where the request has been refused."""
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not self.logged_in()):
            self.refuse(404 if self.logged_in() else 401, "RepoNotFound")
        elif repository.status:
            self.refuse(repository.status)
        else:
            return repository
        return None

    def refuse(self, status: int, code: str = "") -> None:
        self.send(status, json.dumps({"error": f"refused by the tests, {status}"}).encode(), {"X-Error-Code": code})

    def json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = cut
