"""Kinds of streams, consumers and ways to a server, on every supported version of nats-server."""

import pytest

for _name in ("scenes", "stage"):
    pytest.register_assert_rewrite(f"tests.integration.matrix.{_name}")
