"""Options that several commands share: the login of a server, and which archive."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import ConfigError
from jetcapture_py.options import chosen_archive, login

URL = "nats://127.0.0.1:1"
DEFAULT = NatsConfig(servers=("nats://default:4222",), user="capture", password="p")  # type: ignore[arg-type]


@pytest.fixture
def section(tmp_path: Path) -> Path:
    """A file with the section `nats`."""
    path = tmp_path / "target.yaml"
    path.write_text("nats: {servers: [tls://a, tls://b], user: me, password: '${P}', tls: {}}\nsource: {stream: S}\n")
    return path


def test_a_login_is_of_a_file_a_context_the_environment_or_the_configuration(section: Path, tmp_path: Path) -> None:
    found = login(section, None, None, default=DEFAULT, env={"P": "s3cret", "NATS_USER": "other"})
    assert (found.servers, found.user, found.tls is not None) == (("tls://a", "tls://b"), "me", True)
    assert found.password is not None
    assert found.password.get_secret_value() == "s3cret"

    (tmp_path / "context.json").write_text('{"url": "nats://c", "user": "u", "password": "p"}')
    found = login(None, str(tmp_path / "context.json"), None, default=DEFAULT, env={"NATS_TOKEN": "other"})
    assert (found.servers, found.user, found.token) == (("nats://c",), "u", None)

    found = login(None, None, [URL, "nats://two:2"], default=DEFAULT, env={"NATS_TOKEN": "t", "NATS_PASSWORD": "other"})
    assert found.token is not None
    assert (found.servers, found.token.get_secret_value(), found.user) == ((URL, "nats://two:2"), "t", None)
    found = login(None, None, [URL], default=None, env={"NATS_USER": "u", "NATS_PASSWORD": "p", "NATS_TOKEN": ""})
    assert (found.user, found.password is not None) == ("u", True)

    assert login(None, None, [], default=DEFAULT, env={"NATS_TOKEN": "other"}) is DEFAULT


def test_a_login_that_is_incomplete_or_ambiguous_is_refused_in_one_line(section: Path) -> None:
    for given, env, problem in (
        ((None, None, None), {}, "--servers: missing (or --nats or --context, or the capture's configuration)"),
        ((section, "c", None), {"P": "p"}, "--nats: cannot be combined with --context or --servers"),
        ((section, None, [URL]), {"P": "p"}, "--nats: cannot be combined with --context or --servers"),
        ((section, None, None), {}, "target.yaml: nats.password: the environment variable P is not set"),
        ((None, "c", [URL]), {}, "--servers: cannot be combined with context, which replaces it"),
        ((None, None, ["host:1"]), {}, "--servers[0]: expected an address that starts with nats://"),
        ((None, None, [URL]), {"NATS_USER": "u"}, "NATS_PASSWORD: required with user"),
        ((None, None, [URL]), {"NATS_TOKEN": "t", "NATS_NKEY_SEED": "s"}, "NATS_NKEY_SEED: cannot be combined with"),
    ):
        with pytest.raises(ConfigError) as raised:
            login(*given, default=None, env=env)
        (line,) = raised.value.problems
        assert problem in line


def test_a_file_without_the_section_is_refused(tmp_path: Path) -> None:
    for text in ("servers: [nats://a]", "nats: nats://a", "- nats"):
        (tmp_path / "file.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"file\.yaml: expected a section nats"):
            login(tmp_path / "file.yaml", None, None, default=None)


def test_words_that_name_no_archive_are_refused_in_one_line() -> None:
    for words, sql, problem in (
        ([], "SQL", "expected CONFIG SQL or URL STREAM SQL"),
        (["file:///a"], "", "STREAM is missing: expected URL STREAM"),
        (["file:///a", "SELECT 1"], "[SQL]", "STREAM is missing: expected URL STREAM [SQL]"),
        (["file:///a", "S"], "SQL", "SQL is missing: expected URL STREAM SQL"),
        (["file:///a", "S", "SELECT 1", "more"], "SQL", "unexpected argument more: expected URL STREAM SQL"),
        (["file:///a", "S", "--formt", "csv"], "[SQL]", "unexpected argument --formt: expected URL STREAM [SQL]"),
        (["no-such.yaml"], "", "no-such.yaml: cannot be read: No such file or directory"),
    ):
        with pytest.raises(ConfigError) as raised:
            chosen_archive(words, sql=sql)
        assert raised.value.problems == (problem,)
    for sql in ("-- sums of = a day\nSELECT 1", "--sums of = a day\nSELECT 1"):
        assert chosen_archive(["file:///a", "S", sql], ["anon=true"], sql="SQL").statement == sql
