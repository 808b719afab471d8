"""Whatever a configuration file holds, it is a configuration or a list of problems, and no problem shows a secret."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis.strategies as st
import yaml
from hypothesis import given

from jetcapture_py.config import model
from jetcapture_py.errors import ConfigError

SECRET = "hunter2-Zq8x"
VALID: dict[str, Any] = yaml.safe_load("""
nats: {servers: ["nats://127.0.0.1:4222", "tls://[::1]:4223"], user: me, password: p, domain: hub,
  tls: {ca: /ca.pem, handshake_first: true}}
source: {stream: ORDERS, consumer: archive, filter_subjects: [orders.>], deliver_policy: by_start_time,
  start_time: "2026-01-01T00:00:00Z", ack_wait: 2m}
decode: {format: json, columns: {a: int64, b: {type: list<string>, path: x.y}}}
key: "{subject[1]}"
block: {interval: 15m, max_bytes: 1MiB}
store: {url: s3://bucket/x, options: {key: k, client_kwargs: {a: [b]}}, retry_for: forever}
limits: {memory: 1GiB}
http: {listen: "127.0.0.1:0"}
log: {level: debug}
drain_timeout: 60
""")
SECRETIVE = ("password", "password_file", "token", "token_file", "creds", "nkey_seed", "nkey_seed_file")

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(
        ["${X}", "${X:-}", "${UNSET}", "$", "${", "\0", "\x1b[2J", "..", "-1", "1e400", "{", "{}", "a:b", "!!x"]
    ),
    st.lists(st.text(max_size=2), max_size=2),
    st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=2), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value, nested ones too."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        found += places(each, (*path, name))
    return found


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    """The same with another value at `path`."""
    result = copy.deepcopy(value)
    inner = result
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = to
    return result


def load(data: Any, env: dict[str, str]) -> tuple[str, ...]:
    """What is wrong with it."""
    try:
        model.loads(yaml.safe_dump(data, allow_unicode=True), env)
    except ConfigError as error:
        return error.problems or ("",)
    return ()


def test_the_configuration_that_all_this_begins_with_is_one() -> None:
    assert load(VALID, {}) == ()


@given(st.lists(st.tuples(st.sampled_from(places(VALID)), odd), min_size=1, max_size=3), st.text(max_size=5))
def test_a_changed_configuration_is_one_or_says_why_not(
    changes: list[tuple[tuple[Any, ...], Any]], variable: str
) -> None:
    data = VALID
    for path, value in changes:
        try:
            data = changed(data, path, value)
        except (TypeError, KeyError, IndexError):
            continue  # what was there is gone by an earlier change
    for problem in load(data, {"X": variable}):
        assert problem
        assert problem.isprintable()


secrets = st.sampled_from(
    [
        lambda secret: secret,
        lambda secret: [secret],
        lambda secret: {secret: None},
        lambda secret: {"a": secret},
        lambda secret: [{"x": [secret]}],
        lambda secret: f"nats://me:{secret}@host:4222",
        lambda secret: f"{secret}\n{secret}",
        lambda secret: f" {secret}\0",
    ]
)
secret_places = st.sampled_from(
    [("nats", name) for name in SECRETIVE] + [("store", "options"), ("store", "options", "key")]
)


@given(secret_places, secrets, st.sampled_from(places(VALID)), odd)
def test_no_problem_shows_a_secret(place: tuple[str, ...], form: Any, at: tuple[Any, ...], by: Any) -> None:
    data = changed(VALID, place, form(SECRET))
    if at[: len(place)] != place and place[: len(at)] != at:
        data = changed(data, at, by)
    assert SECRET not in "\n".join(load(data, {"X": "1"}))


@given(
    st.sampled_from(places(VALID)),
    st.sampled_from(
        ["${X}", "a${X}", "${X} b", "{${X}}", "${X}/x", "list<${X}>", "nats://${X}", "${UNSET:-${X}}", "${X}m"]
    ),
    st.sampled_from([SECRET, f"me:{SECRET}@host", f"{SECRET}\n{SECRET}", f"'{SECRET}\""]),
)
def test_no_problem_shows_the_value_of_a_variable(place: tuple[Any, ...], text: str, secret: str) -> None:
    assert SECRET not in "\n".join(load(changed(VALID, place, text), {"X": secret}))
