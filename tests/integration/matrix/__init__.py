"""Every kind of stream, consumer and way to a server, on every supported version of nats-server."""

import pytest

for _name in ("cell", "changes", "consumers", "places", "stage", "streams"):
    pytest.register_assert_rewrite(f"tests.integration.matrix.{_name}")
