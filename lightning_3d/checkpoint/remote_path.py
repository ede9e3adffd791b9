"""Paths of remote stores (s3://, gs://, memory://), with the methods of `pathlib.Path` that checkpoints need.

An object store shows a file once it is complete, and replaces it in one step. It has no rename and no locks.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec import get_filesystem_class
from fsspec.core import url_to_fs

from lightning_3d.launch.lightning_private import is_local_file_protocol


@dataclass(frozen=True)
class RemoteStatus:
    path: "RemotePath"
    st_size: int

    @property
    def st_mtime(self) -> float:
        return float(self.path.store.modified(self.path.url).timestamp())


@dataclass(frozen=True)
class RemotePath:
    """A file or a folder of a remote store. Credentials are those of fsspec's configuration, as for Lightning."""

    protocol: str
    pure: PurePosixPath

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.protocol, self.pure / name)

    @property
    def url(self) -> str:
        return f"{self.protocol}://{self.pure}"

    @property
    def name(self) -> str:
        return self.pure.name

    @property
    def suffix(self) -> str:
        return self.pure.suffix

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.protocol, self.pure.parent)

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.protocol, *self.pure.parts)

    @cached_property
    def store(self) -> Any:
        store, _ = url_to_fs(self.url)
        return store

    def __reduce__(self) -> Any:
        return RemotePath, (self.protocol, self.pure)  # another process connects by itself

    @property
    def _fresh(self) -> Any:
        """The store without listings of before: other ranks and jobs write too."""
        self.store.invalidate_cache()
        return self.store

    @property
    def _is_known(self) -> bool:
        """False for a store that only a CheckpointIO of the user knows."""
        try:
            get_filesystem_class(self.protocol.partition("::")[0])
        except (ValueError, ImportError):
            return False
        return True

    def absolute(self) -> "RemotePath":
        return self

    def exists(self) -> bool:
        return self._is_known and bool(self._fresh.exists(self.url))

    def is_file(self) -> bool:
        return bool(self._fresh.isfile(self.url))

    def is_dir(self) -> bool:
        """Never for http, which would send the file to answer this."""
        return self._is_known and not self.protocol.startswith("http") and bool(self._fresh.isdir(self.url))

    def stat(self) -> RemoteStatus:
        return RemoteStatus(self, self._fresh.info(self.url)["size"])

    def version(self) -> str:
        """Changes with each write to the file."""
        return str(self._fresh.ukey(self.url))

    def sizes(self) -> dict[str, int | None]:
        """Name of each entry of the folder -> its size, None where it is no file."""
        found = self._fresh.ls(self.url, detail=True)
        entries = {str(each["name"]).rstrip("/").rsplit("/", 1)[-1]: each for each in found}
        return {name: each["size"] if each["type"] == "file" else None for name, each in entries.items()}

    def iterdir(self) -> Iterator["RemotePath"]:
        yield from (self / name for name in self.sizes())

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        yield from (each for each in (self.iterdir() if self.is_dir() else ()) if fnmatch(each.name, pattern))

    def rglob(self, pattern: str) -> Iterator["RemotePath"]:
        base = len(PurePosixPath(url_to_fs(self.url)[1]).parts)
        for found in map(PurePosixPath, self._fresh.find(self.url)):
            if found.match(pattern):
                yield RemotePath(self.protocol, self.pure.joinpath(*found.parts[base:]))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Object stores have no folders: most need this not, and none forbids it."""
        self.store.makedirs(self.url, exist_ok=exist_ok)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self.store.rm_file(self.url)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        """Remove the folder with everything in it."""
        self._fresh.rm(self.url, recursive=True)

    def open(self, mode: str) -> Any:
        return self.store.open(self.url, mode)

    def read_bytes(self) -> bytes:
        return bytes(self.store.cat_file(self.url))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def read_range(self, start: int, stop: int) -> bytes:
        return bytes(self.store.cat_file(self.url, start=start, end=stop))

    def write_bytes(self, content: bytes) -> None:
        self.store.pipe_file(self.url, content)


Place = Path | RemotePath


def located(path: Any) -> Place:
    """The absolute path, or the place in a remote store."""
    text = os.fspath(path) if not isinstance(path, RemotePath) else path.url
    if is_local_file_protocol(text):
        return Path(os.path.abspath(text.removeprefix("file://")))
    protocol, _, rest = text.partition("://")
    return RemotePath(protocol, PurePosixPath(rest))


def of_other_format(path: Any, kind: str) -> str:
    return (
        f"{path} is {kind}, of a run with another checkpoint_format. A store that cannot rename would show both at"
        " once. Remove it, or save to another folder."
    )
