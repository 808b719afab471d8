"""List a server's streams, and select those of a configuration for many streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from jetcapture_py.config.captures import WORK_QUEUE, AccountConfig, SelectedStreams
from jetcapture_py.errors import JetcaptureError, SourceError
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.unreadable import unreadable
from jetcapture_py.text import one_line

TIMEOUT = 10.0
"""Timeout for listing the streams, in seconds."""
MISSING = "it does not exist"
UNKNOWN = "the server cannot describe it at the moment: it is missing or offline"


def on_server(file: AccountConfig) -> SelectedStreams:
    """Return the server's streams that `file` selects. Raises JetcaptureError, also without a connection."""
    try:
        return asyncio.run(_on_server(file))
    except JetcaptureError:
        raise
    except Exception as error:  # running captures continue
        raise SourceError(f"cannot look for streams: {one_line(error)}") from error


async def _on_server(file: AccountConfig) -> SelectedStreams:
    names, left_out, listed = [], {}, set()
    async with ReadSession(file.sample.nats, "jetcapture streams", timeout=TIMEOUT) as session:
        async for answer in stream_lists(session):
            for info in answer.get("streams") or ():
                listed.add(name := info["config"]["name"])
                takes = info["config"].get("retention") == "workqueue"
                if file.selects(name) and (problem := unreadable(session.api, info)):
                    left_out[name] = problem
                elif file.selects(name, takes=takes):
                    names.append(name)
                elif takes and file.selects(name):
                    left_out[name] = WORK_QUEUE
            unknown = {*(answer.get("missing") or ()), *(answer.get("offline") or ())}
            left_out |= {name: UNKNOWN for name in unknown if file.selects(name)}
    left_out |= dict.fromkeys(file.missing({*listed, *left_out}), MISSING)
    return SelectedStreams(sorted(names), dict(sorted(left_out.items())))


async def stream_lists(session: ReadSession) -> AsyncIterator[dict[str, Any]]:
    """Yield the pages of the account's list of streams. Raises SourceError, also without permission."""
    offset, total = 0, 1
    while offset < total:
        answer = await session.request("STREAM.LIST", {"offset": offset})
        yield answer
        listed = len(answer.get("streams") or ())
        total, offset = answer.get("total", 0), offset + max(listed, answer.get("limit", 0), 1)
