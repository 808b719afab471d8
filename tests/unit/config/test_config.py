"""The configuration file: what it accepts, and the one line it gives for everything else."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from jetcapture_py.config import model
from jetcapture_py.errors import ConfigError

MINIMAL: dict[str, Any] = {"source": {"stream": "ORDERS", "consumer": "archive"}, "store": {"url": "/data"}}
SECRET = "hunter2"


def with_setting(path: str, value: object) -> dict[str, Any]:
    """The minimal configuration with one setting changed."""
    data: dict[str, Any] = copy.deepcopy(MINIMAL)
    *sections, name = path.split(".")
    place = data
    for section in sections:
        place = place.setdefault(section, {})
    place[name] = value
    return data


def problems_of(data: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        model.parse(data)
    assert all(problem.isprintable() for problem in caught.value.problems)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    return caught.value.problems


def yaml_problems(text: str, **env: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        model.loads(text, env)
    return caught.value.problems


def yaml_with(text: str, **env: str) -> model.Config:
    return model.loads("source: {stream: ORDERS, consumer: archive}\nstore: {url: /data}\n" + text, env)


REFUSED = {
    "source.ack_wiat: 2m": "unknown setting; did you mean ack_wait?",
    "interval: 5m": "unknown setting; did you mean block.interval?",
    "http.port: 8080": "unknown setting",
    "http.listen: '8080'": 'expected an address and a port such as 127.0.0.1:8080 or :8080, got "8080"',
    "source: ORDERS": "expected a mapping of settings, got text",
    "source.stream: null": "required, but not set",
    "source.stream: 2026": "expected text, got 2026; put it in quotes",
    "source.stream: _quarantine": 'expected another name, got "_quarantine"; the archive has a directory that is '
    "called so",
    "source.consumer: a.b": "expected a name without spaces, '.', '*', '>', '/' and '\\', got \"a.b\"",
    "source.batch: 0": "expected at least 1, got 0",
    "source.batch: true": "expected a whole number, got true",
    "source.create: perhaps": 'expected true or false, got "perhaps"',
    "source.ack_wait: 500ms": 'expected at least 1s, got "500ms"',
    "source.filter_subjects: orders.>": "expected a list, got text",
    "source.replay_policy: instnat": 'expected instant or original, got "instnat"; did you mean instant?',
    "source.start_sequence: 5": "only with deliver_policy by_start_sequence, not with all",
    "source.start_time: '2026-01-31T00:00:00'": "expected a time with its zone such as 2026-01-31T00:00:00Z, got "
    '"2026-01-31T00:00:00"',
    "source.max_ack_pending: 300001": "expected at most 300000, got 300001; the server's time to redeliver grows "
    "with the square of the unacked messages; source.allow_many_unacked: true allows it",
    "decode.format: jsn": "expected raw, json, msgpack, csv, tsv, avro, protobuf or package.module:object, got "
    '"jsn"; did you mean json?',
    "decode.columns: {a: int64}": "only with decode.format json, msgpack, csv, tsv, avro or protobuf, not with raw",
    "decode.delimiter: ab": 'expected a character such as | or ;, got "ab"',
    "decode.compression: gzip": "only with a format that decodes the payload, not with raw",
    "decode.registry: ftp://x": "expected a directory, or an address that starts with http:// or https://",
    "decode.registry: http://u:p@x": "credentials are not part of an address",
    "decode.keep_payload: false": "false with format raw would keep nothing of a message",
    "key: {subject: null}": 'expected text, got a mapping; put it in quotes: "{subject}"',
    "key: null": 'expected a template such as "{subject}", got nothing; write "" for one key',
    "block.interval: 7m": 'expected whole seconds that divide a day evenly, such as 15m or 1h, got "7m"',
    "block.bundles: 10001": "expected at most 10000, got 10001",
    "block.max_bytes: 64k": 'expected a size in KiB (1024s) or KB (1000s), got "64k"',
    "block.format: xml": 'expected parquet, ndjson, csv or package.module:object, got "xml"',
    "block.format: nd-json": 'expected parquet, ndjson, csv or package.module:object, got "nd-json"; did you mean '
    "ndjson?",
    "limits.memory: 1MiB": 'expected at least 32MiB, got "1MiB"',
    "log.level: INFO": 'expected debug, info, warning or error, got "INFO"; did you mean info?',
    "store.url: data": "expected an absolute path, or an address such as s3://bucket/path",
    "store.url: s4://bucket": "expected an absolute path or one of file://, s3://, abfs://, az://, gs://, memory://",
    "store.url: s3:///x": "expected a bucket or container, as in s3://bucket/path",
    "store.url: file://data": "expected three slashes and an absolute path, as in file:///var/lib/jetcapture",
    "store.url: /data/{date}": "expected an address without control characters and with no placeholder but {key}",
    "store.type: mine": 'expected package.module:object, got "mine"',
    "on_stored.call: mine.py": 'expected package.module:object, got "mine.py"',
    "on_stored.subject: stored.{key}": 'expected a subject with no placeholder but {stream}, got "stored.{key}"',
    "on_stored.subject: stored.>": 'expected a subject without wildcards and spaces, got "stored.>"',
    "on_stored.subject: $JS.API.X.{stream}": "expected a subject that is not the server's own, got "
    '"$JS.API.X.{stream}"',
    "nats.servers: []": "expected at least one address",
    "nats.servers: ['nats://a', 'ws://b']": "expected only ws:// and wss://, or only nats:// and tls://",
    "nats.inbox_prefix: a.*": 'expected a subject without wildcards and spaces, got "a.*"',
}
"""Settings as in YAML, and why they are refused."""
REFUSED_ELSEWHERE = {
    "source.filter_subjects: [ok, a.>.b]": "source.filter_subjects[1]: expected a subject such as orders.*.new or "
    'orders.>, got "a.>.b"',
    "source.deliver_policy: by_start_time": "source.start_time: required with deliver_policy by_start_time, but not "
    "set",
    "decode: {format: csv}": "decode.columns: required with decode.format csv, but not set",
    "decode: {format: avro}": "decode.schema: required with decode.format avro, but not set",
    "decode: {format: protobuf, schema: a.pb}": "decode.message: required with decode.format protobuf, but not set",
    "decode: {format: json, schema: a.avsc}": "decode.schema: only with decode.format avro or protobuf, not with json",
    "decode: {format: json, registry: x}": "decode.registry: only with decode.format avro, not with json",
    "decode: {format: json, header: true}": "decode.header: only with decode.format csv or tsv, not with json",
    "decode: {format: tsv, columns: {a: int64}, delimiter: ;}": "decode.delimiter: only with decode.format csv, not "
    "with tsv",
    "decode: {format: avro, schema: a.avsc, rows: lines}": "decode.rows: lines is only for decode.format json, csv "
    "or tsv, not for avro",
    "block: {format: 'own:Writer', encoding: compatible}": "block.encoding: only with format parquet, not with "
    "own:Writer",
    "nats.servers: localhost:4222": "nats.servers[0]: expected an address that starts with nats://, tls://, ws:// or "
    'wss://, got "localhost:4222"',
    "nats.servers: ['nats://a', 'nats://b:port']": "nats.servers[1]: expected an address such as "
    'nats://127.0.0.1:4222, got "nats://b:port"',
    "maintain.table: {name: a.b, catalog: {type: sql, uri: 'sqlite:///c'}, latest: {name: a.c, by: []}}": (
        "maintain.table.latest.by: expected at least one item, got an empty list"
    ),
    "nats.user: me": "nats.password: required with user, but not set (or set password_file)",
    "nats.password: hunter2": "nats.user: required with a password, but not set",
    "nats.tls: {cert: /c.pem}": "nats.tls.key: required with cert, but not set",
    "nats.tls: {key: /k.pem}": "nats.tls.cert: required with key, but not set",
    "nats: {token: hunter2, creds: /x.creds}": "nats.creds: cannot be combined with token; choose one way to log in",
    "nats: {token: hunter2, token_file: /run/token}": "nats.token_file: cannot be combined with token",
}
"""Settings, and the problem of another one that they cause."""


def refusals(settings: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What is wrong with the minimal configuration and one of these settings."""
    split = {setting: setting.partition(": ") for setting in settings}
    return {
        setting: problems_of(with_setting(path, yaml.safe_load(value))) for setting, (path, _, value) in split.items()
    }


def test_a_wrong_setting_gives_one_line_with_path_reason_and_suggestion() -> None:
    assert refusals(REFUSED) == {
        setting: (f"{setting.partition(': ')[0]}: {reason}",) for setting, reason in REFUSED.items()
    }
    assert refusals(REFUSED_ELSEWHERE) == {setting: (problem,) for setting, problem in REFUSED_ELSEWHERE.items()}
    assert problems_of(with_setting("a\nb", 1)) == ('["a\\nb"]: unknown setting',)


def test_every_wrong_setting_is_named_at_once() -> None:
    data = {"source": {"stream": "A B", "batch": 0}, "block": {"interval": "abc"}, "blck": {}}
    assert problems_of(data) == (
        "source.stream: expected a name without spaces, '.', '*', '>', '/' and '\\', got \"A B\"",
        "source.consumer: required, but not set",
        "source.batch: expected at least 1, got 0",
        'block.interval: expected a duration such as 15m, got "abc"',
        "store: required, but not set",
        "blck: unknown setting; did you mean block?",
    )
    for other in (None, [], "text", 5):
        (problem,) = problems_of(other)
        assert problem.startswith("expected a mapping of settings, got ")


def test_columns_are_types_or_mappings() -> None:
    at = {"type": "timestamp", "path": "meta.at", "unit": "ms"}
    data = with_setting("decode", {"format": "json", "columns": {"id": "int64", "at": at}})
    columns = model.parse(data).decode.columns
    assert columns["id"] == model.Column(type="int64")
    assert columns["at"] == model.Column(type="timestamp", path="meta.at", unit="ms")


def test_a_wrong_column_names_the_column() -> None:
    columns = {"a": "in64", "b c": {"tpye": "int64"}, "c": 5, "d": {"type": "timestamp", "unit": "m"}}
    found = problems_of(with_setting("decode", {"format": "json", "columns": columns}))
    assert found[0].startswith("decode.columns.a.type: ")
    assert "int64" in found[0]
    assert found[1:] == (
        'decode.columns["b c"].type: required, but not set',
        'decode.columns["b c"].tpye: unknown setting; did you mean type?',
        "decode.columns.c: expected a type such as int64, or a mapping with type and path, got 5",
        'decode.columns.d.unit: expected s, ms, us or ns, got "m"',
    )


def test_store_addresses_are_kept_as_they_are_and_a_store_of_the_users_own_may_have_any() -> None:
    for url in ("/data", "file:///data/{key}", "s3://bucket/a", "abfs://box@account/a", "az://box", "gs://b"):
        assert model.parse(with_setting("store.url", url)).store.url == url
    found = model.parse({**MINIMAL, "store": {"type": "mine.stores:Sftp", "url": "sftp://host:22/archive"}})
    assert (found.store.type, found.store.url) == ("mine.stores:Sftp", "sftp://host:22/archive")


def test_a_subject_for_stored_objects_that_the_filters_select_is_refused() -> None:
    data = {**MINIMAL, "on_stored": {"subject": "{stream}.stored"}}
    for pattern in ("ORDERS.stored", "*.stored", "ORDERS.>", ">"):
        data["source"] = {**MINIMAL["source"], "filter_subjects": ["orders.>", pattern]}
        reason = f"ORDERS.stored is itself captured ({pattern}), so every object would cause another"
        assert problems_of(data) == (f"on_stored.subject: {reason}",)
    data["source"]["filter_subjects"] = ["orders.>", "*.stored.x", "ORDERS", "ORDERS.*.*"]
    assert model.parse(data).on_stored.subject == "{stream}.stored"


def test_max_age_follows_the_interval_and_a_start_needs_its_policy() -> None:
    assert yaml_with("block: {interval: &day 1d, max_age: *day}\n").block.max_age == 86_400
    assert model.parse(with_setting("block.interval", "1h")).block.max_age == 3600
    assert model.parse(with_setting("block.max_age", "30s")).block.max_age == 30
    source = {**MINIMAL["source"], "deliver_policy": "by_start_time", "start_time": "2026-01-31T01:00:00.5+01:00"}
    half = datetime(2026, 1, 31, 0, 0, 0, 500_000, tzinfo=UTC)
    assert model.parse({**MINIMAL, "source": source}).source.start_time == half
    source = {**MINIMAL["source"], "deliver_policy": "by_start_sequence", "start_sequence": 7}
    assert model.parse({**MINIMAL, "source": source}).source.start_sequence == 7


def test_many_unacked_messages_are_a_warning_and_need_consent_at_some_point() -> None:
    (warning,) = model.parse(with_setting("source.max_ack_pending", 150_000)).warnings()
    assert warning.startswith("source.max_ack_pending: 150000 is above 100000; after a crash the server's time to")
    source = {**MINIMAL["source"], "max_ack_pending": 400_000, "allow_many_unacked": True}
    allowed = model.parse({**MINIMAL, "source": source})
    assert len(allowed.warnings()) == 1


def test_a_secret_in_the_wrong_place_is_never_shown() -> None:
    for path, value in (
        ("nats", f"nats://me:{SECRET}@host"),
        ("nats.servers", f"nats://me:{SECRET}@host"),
        ("nats.servers", {f"nats://me:{SECRET}@host": None}),
        ("nats.pasword", SECRET),
        ("store", f"s3://{SECRET}"),
        ("store.url", f"s3://key:{SECRET}@bucket/a"),
        ("store.url", f"https://host/a?sig={SECRET}"),
        ("store.options", [SECRET]),
        ("store.option", {"secret": SECRET}),
    ):
        assert SECRET not in "\n".join(problems_of(with_setting(path, value)))


def test_secrets_are_in_no_repr_dump_or_schema() -> None:
    store = {"url": "s3://bucket", "options": {"secret": SECRET}}
    found = model.parse({**MINIMAL, "nats": {"user": "me", "password": SECRET}, "store": store})
    assert found.nats.password == SecretStr(SECRET)
    assert found.store.options == {"secret": SECRET}
    shown = [repr(found), str(found), repr(found.nats), repr(found.store), found.model_dump_json(), str(model.schema())]
    assert not [text for text in shown if SECRET in text]


def test_variables_are_replaced_after_yaml_was_read_and_take_the_type_of_their_setting() -> None:
    hostile = "x\nstore: {url: s3://evil}\n# ${HOME} 'a' \"b\""
    found = yaml_with("nats: {user: u, password: '${P}'}\n", P=hostile)
    assert found.nats.password == SecretStr(hostile)
    assert found.store.url == "/data"
    text = "nats: {user: u, password: ${P}}\nblock: {max_messages: ${N}, max_age: ${A}}\nlimits: {memory: ${M}}\n"
    text += "decode: {keep_payload: ${K}, format: ${F:-json}}\n"
    # In flow style braces would end the mapping, so people quote or use block style; both give the same.
    text = text.replace("${", "'${").replace("}}", "}'}").replace("},", "}',")
    found = yaml_with(text, P="0123", N="5", A="90", M="64MiB", K="false")
    assert found.nats.password == SecretStr("0123")
    assert (found.block.max_messages, found.block.max_age, found.limits.memory) == (5, 90.0, 64 << 20)
    assert (found.decode.keep_payload, found.decode.format) == (False, "json")


def test_variables_expand_as_documented() -> None:
    for text, value, expected in (
        *(("${KEY}", "a", "a"), ("x-${KEY}-${KEY}", "a", "x-a-a"), ("${KEY}", "$$", "$$"), ("'${KEY}'", "", "")),
        *(("${KEY:-b}", None, "b"), ("${KEY:-b}", "", "b"), ("${KEY:-b}", "a", "a")),
        *(("${KEY:-{subject}}", None, "{subject}"), ("$$", None, "$"), ("a$b", None, "a$b"), ("$${KEY}", "", "${KEY}")),
    ):
        assert yaml_with(f"key: {text}", **({} if value is None else {"KEY": value})).key == expected, text


def test_an_unset_variable_is_named_with_its_path() -> None:
    assert yaml_problems("nats:\n  servers: [nats://a, '${NATS_URL}']\nkey: ${a b}\n") == (
        "nats.servers[1]: the environment variable NATS_URL is not set; set it, or write ${NATS_URL:-default}",
        "key: expected ${NAME} or ${NAME:-default}; write $$ for a $",
    )


def test_settings_and_sections_without_a_value_are_left_out_but_an_empty_tls_section_asks_for_tls() -> None:
    found = yaml_with("nats:\n  token: ${TOKEN:-}\n  domain: ${DOMAIN}\nblock:\n  interval: ${I:-}\n", DOMAIN="")
    assert (found.nats.token, found.nats.domain, found.block.interval) == (None, None, 900.0)
    assert yaml_with("nats:\n  user:\n  tls:\nblock:\nlimits: ~\n") == yaml_with("")
    assert yaml_with("nats: {tls: {}}").nats.tls == model.TlsConfig()


def test_a_yaml_mistake_gives_one_line_that_quotes_nothing_of_the_file() -> None:
    special = "not valid YAML: unexpected character; text that starts with a special character must be quoted"
    aliases = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]" for n in range(20))
    expected = {
        "source:\n  stream: a\n  stream: b\n": "source.stream: set twice, on line 2 and on line 3",
        "key: {subject[1]}\n": "line 1, column 14: not valid YAML: expected ',' or '}', but got '['; text with braces "
        "must be quoted",
        "key: {{ tenant }}\n": "key: a setting's name must be text (line 1); text that starts with { or [ must be "
        "quoted",
        "nats:\n\tuser: a\n": "line 2, column 1: not valid YAML: unexpected character; indent with spaces, not with "
        "tabs",
        f"nats:\n  password: @{SECRET}\n": f"line 2, column 13: {special}",
        f"nats:\n  password: *{SECRET}\n": f"line 2, column 13: {special}",
        f"nats:\n  password: !{SECRET} x\n": "nats.password: YAML tags are not supported (line 2); text that starts "
        "with ! must be quoted",
        f"key: a: {SECRET}\n": "line 1, column 7: not valid YAML: mapping values are not allowed here; text that "
        'contains ": " must be quoted',
        "a: &a [*a]\n": "the settings are nested too deeply",
        "a: " + "[" * 5000: "the settings are nested too deeply",
        aliases: "the settings have more than 100,000 values, with those of every alias",
        f'a: "{SECRET}\\ud800"\n': "a: not valid text: it contains a surrogate (line 1)",
        'a:\n  "b\\udfff": 1\n': 'a["b\\udfff"]: not valid text: it contains a surrogate (line 2)',
        "a: \0": "line 1: not valid YAML: it contains a control character",
        "a: 1\n---\na: 2\n": "line 2, column 1: not valid YAML: but found another document",
        "a: " + "9" * 5000: "a: not a readable number (line 1)",
        "": "expected a mapping of settings, got nothing",
    }
    assert {text: yaml_problems(text) for text in expected} == {text: (line,) for text, line in expected.items()}


def test_yaml_reads_as_its_version_1_2_says() -> None:
    text = "key: no\nnats: {user: on, password: '1', domain: y}\ndecode: {format: json, keep_payload: off}\n"
    found = yaml_with(text)
    assert (found.key, found.nats.user, found.nats.domain, found.decode.keep_payload) == ("no", "on", "y", False)
    text = "source: {stream: A, consumer: b}\nstore: {url: /data}\nblock: {interval: 15:00}\n"
    assert yaml_problems(text)[0].startswith("block.interval: expected a duration such as 15m")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    missing, binary = tmp_path / "missing.yaml", tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    reasons = {missing: "No such file or directory", tmp_path: "Is a directory", binary: "it is not UTF-8 text"}
    for path, reason in reasons.items():
        with pytest.raises(ConfigError) as caught:
            model.load(path, {})
        assert caught.value.problems == (f"{path}: cannot be read: {reason}",)


def test_a_file_is_loaded_with_variables_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "jetcapture.yaml"
    options = "{key: '${STREAM}', anon: false, client_kwargs: {a: ['${STREAM}', 1, null]}}"
    store = f"{{url: 's3://b', options: {options}}}"
    path.write_text(f"\ufeffsource: {{stream: '${{STREAM}}', consumer: b}}\nstore: {store}\n", "utf-8")
    monkeypatch.setenv("STREAM", "ORDERS")
    found = model.load(path)
    assert found == model.load(str(path))
    assert found.source.stream == "ORDERS"
    assert found.store.options == {"key": "ORDERS", "anon": False, "client_kwargs": {"a": ["ORDERS", 1, None]}}


def test_the_schema_agrees_with_the_loader() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = model.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    columns = {"a": "int64", "b": {"type": "int64", "path": "x"}}
    good: list[tuple[str, Any]] = [("block.interval", value) for value in ("1h", 900, "${INTERVAL:-15m}")]
    good += [("block.max_bytes", "64MiB"), ("store.retry_for", "forever"), ("source.batch", "${BATCH}")]
    good += [("nats.servers", "nats://a"), ("nats.servers", ["nats://a"]), ("log.level", "info")]
    good += [("decode", {"format": "json", "columns": columns})]
    bad: list[tuple[str, Any]] = [("block.interval", "1 hour"), ("block.interval", ""), ("block.max_bytes", "64k")]
    bad += [("store.retry_for", "never"), ("source.batch", 0), ("nats.servers", 5), ("log.level", "loud")]
    bad += [("decode", {"format": "json", "columns": {"a": 5}}), ("source.ack_wiat", "1m")]
    for path, value in good + bad:
        data = with_setting(path, value)
        assert validator.is_valid(data) is ((path, value) in good), (path, value)
        if (path, value) in bad:
            problems_of(data)
        elif "${" not in str(value):
            model.parse(data)


def test_a_spool_inside_the_archive_is_refused() -> None:
    for url in ("file:///data/archive", "/data/"):
        data = {**MINIMAL, "store": {"url": url}, "limits": {"spool": {"path": "/data/archive/spool", "size": "1GiB"}}}
        (problem,) = problems_of(data)
        assert problem.startswith("limits.spool.path: expected a directory outside of the archive, got ")
