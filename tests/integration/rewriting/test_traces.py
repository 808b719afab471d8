"""An erased key is nowhere: in no name, no page, no manifest, no bound of one, and no old version of any of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog

from jetcapture_py.config.model import Config, parse
from jetcapture_py.errors import ConflictError
from jetcapture_py.manage import erase as command
from jetcapture_py.manage.many import show_one
from jetcapture_py.rewriting.select import Condition
from jetcapture_py.store import configured_store
from jetcapture_py.store.archive import ArchiveFiles, OldVersion
from jetcapture_py.table import writer
from jetcapture_py.table.catalog import file_properties
from tests.support.archives import HOUR, encoded
from tests.support.erasing import plain, traces
from tests.support.maintaining import Maintenance, compare_tables
from tests.support.running import STREAM
from tests.support.versity import Versity, options

WHO = "person.parquet"  # as an object is called
KEYS = ("anna", WHO, "zoe")


@pytest.fixture(autouse=True)
def merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every commit merge manifests, so that several name an object."""
    monkeypatch.setitem(writer._PROPERTIES, "commit.manifest.min-count-to-merge", "2")


def archived(url: str, root: Path, store: dict[str, Any] | None = None) -> Config:
    """Three keys, each with two objects that compaction merges, in a table that has had both."""
    compact = {"after": "0s", "grace": "0s", "target": "1MiB"}
    catalog = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db"}
    if store:  # versitygw refuses some uploads of Arrow's, which are in parts however small they are
        catalog["py-io-impl"] = "pyiceberg.io.fsspec.FsspecFileIO"
    config = parse(
        {
            "source": {"stream": STREAM, "consumer": "archive"},
            "store": {"url": url, **(store or {})},
            "maintain": {"compact": compact, "table": {"name": "nats.orders", "catalog": catalog}},
        }
    )
    for number, key in enumerate(KEYS):
        for first in (1, 6):
            seqs = range(10 * number + first, 10 * number + first + 5)
            block = encoded([(seq, HOUR * 1_000_000 + seq) for seq in seqs], key=key, bucket=HOUR)
            configured_store(config.store).put(block.name, block.data)
        Maintenance(config).run()
    return config


def erase(config: Config, key: str = WHO) -> int:
    return show_one(command.run(config, Condition.parse(key, None, None, None), "request 4711"))


def keys(config: Config) -> set[str]:
    assert config.maintain
    assert config.maintain.table
    properties = {**config.maintain.table.catalog, **file_properties(config.store)}
    with load_catalog("jetcapture", **properties) as catalog:
        return set(catalog.load_table("nats.orders").scan().to_arrow()["key"].to_pylist())


def test_no_manifest_has_an_erased_key_and_what_cannot_be_deleted_remains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "archive"
    config, real = archived(str(root), tmp_path), writer.TableWriter.commit
    assert len(traces(root / "_table", WHO.encode())) > 1, "manifests of several snapshots"

    def commit(self: writer.TableWriter, **options: Any) -> Any:
        monkeypatch.setattr(writer.TableWriter, "commit", real)
        self.discard()
        raise ConflictError("another process was faster")

    with monkeypatch.context() as patch:
        monkeypatch.setattr(writer.TableWriter, "commit", commit)
        patch.setattr(writer, "delete_manifests", lambda _, forgotten: [each.manifest_list for each in forgotten])
        assert erase(config) == 1
    assert "cannot be deleted" in capsys.readouterr().out
    assert erase(config) == 1, "nothing names the manifests any more"
    left, out = traces(tmp_path, WHO.encode()), capsys.readouterr().out
    assert left
    assert all(f"{Path(path).name}: a process is writing it, or was killed" in out for path in left)
    for path in (root / "_table").rglob("*.avro"):
        os.utime(path, (1, 1))
    assert erase(config) == 0
    assert traces(tmp_path, WHO.encode()) == []
    assert keys(config) == {"anna", "zoe"}
    assert compare_tables(config) == []
    assert len(traces(tmp_path, b"anna")) > 2
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert erase(config) == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert capsys.readouterr().out.count("nothing remains in the archive") == 2


def versions(client: Any, bucket: str) -> Iterator[tuple[str, bytes]]:
    """The keys and bytes of all versions, and the keys of markers."""
    found = client.list_object_versions(Bucket=bucket)
    for each in found.get("Versions", ()):
        version = {"Key": each["Key"], "VersionId": each["VersionId"]}
        yield each["Key"], client.get_object(Bucket=bucket, **version)["Body"].read()
    yield from ((each["Key"], b"") for each in found.get("DeleteMarkers", ()))


def test_no_version_in_a_bucket_has_an_erased_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Versity(tmp_path, versions=True) as server, closing(server.client()) as client:
        client.create_bucket(Bucket="versions")
        client.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
        config = archived("s3://versions/archive", tmp_path, {"options": options(server.endpoint)})

        def having(text: bytes) -> list[str]:
            found = versions(client, "versions")
            return [
                key for key, data in found if text in key.encode() or any(text in each for each in plain(key, data))
            ]

        assert len(having(WHO.encode())) > 5
        real = ArchiveFiles.old_versions

        def killed() -> None:
            raise KeyboardInterrupt

        def until_the_markers(archive: ArchiveFiles, *directories: str) -> Iterator[OldVersion]:
            for version in real(archive, *directories):
                yield replace(version, remove=killed) if version.marker else version

        with monkeypatch.context() as patch:
            patch.setattr(ArchiveFiles, "old_versions", until_the_markers)
            with pytest.raises(KeyboardInterrupt):
                erase(config)
        assert any(STREAM in key for key in having(WHO.encode())), "markers have the names of objects that are gone"
        assert erase(config) == 0
        assert having(WHO.encode()) == []
        assert having(b"anna")
        assert keys(config) == {"anna", "zoe"}


@pytest.mark.parametrize("history", [True, False])
def test_a_commit_that_was_planned_before_leaves_no_trace_when_it_ends_after_an_erasure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: bool
) -> None:
    config = archived(str(tmp_path / "archive"), tmp_path)
    if not history:  # then the erasure changes nothing in the table, and the commit is not refused
        assert erase(config) == 0
    block = encoded([(100, HOUR * 1_000_000 + 100)], key="beth", bucket=HOUR)  # in no table yet
    configured_store(config.store).put(block.name, block.data)
    real, codes = writer.TableWriter.commit, []

    def commit(self: writer.TableWriter, **options: Any) -> Any:
        if not codes:
            codes.append(-1)
            codes.append(erase(config, "beth"))
        return real(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(writer.TableWriter, "commit", commit)
        Maintenance(config).run()
    assert codes[1] == 0
    assert traces(tmp_path, b"beth") == []
    Maintenance(config).run()
    assert keys(config) == {*KEYS} - ({WHO} if not history else set())
    assert traces(tmp_path, b"beth") == []
