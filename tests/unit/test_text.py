from __future__ import annotations

import string
import time

from hypothesis import example, given
from hypothesis import strategies as st

from jetcapture_py.text import MAX_LENGTH, one_line, without_credentials


class BrokenError(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise SystemExit(3)


def test_an_exception_is_its_type_and_its_text() -> None:
    assert one_line(ValueError("no\nsuch  bucket")) == "ValueError: no such bucket"
    assert one_line(ValueError()) == "ValueError"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert one_line(BrokenError()) == "BrokenError"
    assert one_line(type("Odd\nname", (Exception,), {})("x")) == "Odd name: x"


def test_a_group_is_shown_with_its_errors_and_not_with_all_of_very_many() -> None:
    group = ExceptionGroup("two", [ValueError("a"), ExceptionGroup("b", [OSError("c")])])
    assert one_line(group) == "ExceptionGroup: two [ValueError: a; ExceptionGroup: b [OSError: c]]"
    many = ExceptionGroup("many", [ValueError(str(number)) for number in range(1000)])
    assert one_line(many, 10_000).endswith("ValueError: 9; …]")
    deep: Exception = ValueError("x")
    for _ in range(5000):
        deep = ExceptionGroup("deep", [deep])
    assert one_line(deep).startswith("ExceptionGroup: deep")


def test_anything_else_is_its_text_and_a_long_one_is_cut_and_shows_that_it_was() -> None:
    texts = ["text", "", "None", r"b'bytes\n'", "{'code': 7}"]
    assert [one_line(error) for error in ("text", "", None, b"bytes\n", {"code": 7})] == texts
    assert one_line("a\x00b\x1b[2J\u2028c\ud800") == "a\ufffdb\ufffd[2J c\ufffd"
    assert one_line("x" * MAX_LENGTH) == "x" * MAX_LENGTH
    assert one_line("x" * (MAX_LENGTH + 1)) == "x" * (MAX_LENGTH - 1) + "…"
    assert one_line("x" * 20, 10) == "x" * 9 + "…"


@given(st.text() | st.text(string.printable), st.integers(1, 400))
@example("\ud800", 300)
def test_every_line_is_short_and_printable(text: str, limit: int) -> None:
    for error in (text, ValueError(text), KeyError(text), ExceptionGroup(text, [OSError(text)])):
        line = one_line(error, limit)
        assert line.isprintable()
        assert len(line) <= limit
        line.encode()


WITHOUT_CREDENTIALS = {
    "http://me:s3cr3t@host:1/x and s3://s3cr3t@b": "http://***@host:1/x and s3://***@b",
    "nats://s3cr3t@h:4222": "nats://***@h:4222",
    "postgres://u:s3@cr3t@h/db": "postgres://***@h/db",
    "nats://u:s3c/r3t@h:4222 refused": "nats://***@h:4222 refused",
    "GET https://h/x?page=2&token=s3cr3t failed": "GET https://h/x?page=2&token=*** failed",
    "https://h/x?sv=1&sig=s3cr3t": "https://h/x?sv=1&sig=***",
    "https://h/x?X-Amz-Signature=s3cr3t": "https://h/x?X-Amz-Signature=***",
    "{'password': 's3 cr3t', 'x': 1}": "{'password': ***, 'x': 1}",
    r'{"token": "s3\"cr3t", "x": 1}': '{"token": ***, "x": 1}',
    "host=h password='s3 cr3t' user=x": "host=h password=*** user=x",
    "Config(password=SecretStr('s3cr3t'), user='x')": "Config(password=***), user='x')",
    "Authorization: Bearer s3cr3t": "Authorization: Bearer ***",
    "{'Authorization': 'Basic s3cr3t'}": "{'Authorization': ***}",
    "AccountName=a;AccountKey=s3cr3t==": "AccountName=a;AccountKey=***",
    "aws_secret_access_key = s3cr3t": "aws_secret_access_key = ***",
    "PGPASSWORD=s3cr3t psql": "PGPASSWORD=*** psql",
    "key SU" + "A" * 56 + " refused": "key *** refused",
    "jwt eyJ0eXAiOiJKV1Qi.eyJqdGki.c2ln refused": "jwt *** refused",
}


def test_credentials_are_left_out() -> None:
    assert {text: without_credentials(text) for text in WITHOUT_CREDENTIALS} == WITHOUT_CREDENTIALS
    assert {text: one_line(text) for text in WITHOUT_CREDENTIALS} == WITHOUT_CREDENTIALS


def test_what_is_no_credential_stays() -> None:
    texts = ["mail me@host, see http://host/@x", "http://host:8080/users/me@example.com", "unexpected token: }"]
    texts += ["/archive/ORDERS/key=eu/date=2026-01-31/hour=12", "the design=3, 10 keys: 4", "Authorization Violation"]
    assert list(map(without_credentials, texts)) == texts


def test_a_credential_at_the_place_where_a_huge_text_is_cut_is_left_out() -> None:
    for blanks in range(65_480, 65_540):
        assert "s3cr3t" not in one_line(" " * blanks + " nats://user:s3cr3t@host/x"), blanks


def test_no_text_takes_long() -> None:
    for piece in ("a_", "password", "//", "//a:b", "//a:@", '\\"', "password='", "token =", "eyJaaaaaaaaaa.", "@"):
        began = time.process_time()
        one_line(piece * (1 << 16) + "@")
        assert time.process_time() - began < 2, piece
