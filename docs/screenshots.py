"""Make the pictures of pages in docs/images: `python docs/screenshots.py`, or `make screenshots`.

Captures orders for some minutes with two replicas, then takes pictures of the status page of one of them and of the
report about the archive, in headless Chromium. Everything but the pictures is in a temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nats

IMAGES = Path(__file__).parent / "images"
sys.path.insert(0, str(Path(__file__).parents[1]))

from jetcapture_py.manage.demo import COLUMNS, orders  # noqa: E402  # after the repository is on the path
from tests.support.nats_server import NatsServer  # noqa: E402
from tests.support.ports import free_port  # noqa: E402
from tests.support.running import Command, settings  # noqa: E402

RATE, WAVE = 60, 300.0
"""Messages per second on average, and the seconds in which that rises and falls once."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("background-networking", "component-update", "gpu", "quic", "sync")


def main() -> None:
    """Make both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=16, help="how long to capture; charts show the last 15")
    minutes = parser.parse_args().minutes
    with TemporaryDirectory(prefix="jetcapture-") as directory:
        home = Path(directory)
        server = NatsServer(home / "nats")
        server.start()
        try:
            report = _capture(server.url, home, minutes * 60)
        finally:
            server.kill()
        _picture(report.as_uri(), IMAGES / "report.png", 1180, 1118, home)


def _capture(url: str, home: Path, seconds: float) -> Path:
    """Capture for a while, take a picture of the status page, and return the report about the archive."""
    port = free_port()
    sections: dict[str, Any] = {
        "decode": {"format": "json", "columns": COLUMNS},
        "key": "{region}",
        "block": {"interval": "1m", "max_age": "30s"},
    }
    first = Command(home, settings(url, home / "archive", **sections, http={"listen": f"127.0.0.1:{port}"}), "first")
    second = Command(home, settings(url, home / "archive", **sections, http=None), "second")
    asyncio.run(_stream(url))
    with first.start(), second.start():
        asyncio.run(_publish(url, seconds))
        page = home / "status.html"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/snapshot", timeout=60) as answer:
            page.write_bytes(answer.read())
        _picture(page.as_uri(), IMAGES / "status.png", 1160, 792, home)
        first.drain()
        second.drain()
    report = home / "report.html"
    words = ["report", str(first.path), "--output", str(report)]
    subprocess.run([sys.executable, "-m", "jetcapture_py", *words], check=True)  # noqa: S603  # our own command
    return report


async def _stream(url: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(name="ORDERS", subjects=["orders.>"])
    await client.close()


async def _publish(url: str, seconds: float) -> None:
    """Publish orders at a rate that rises and falls."""
    client = await nats.connect(url)
    stream, begin = client.jetstream(), time.monotonic()
    for published, (subject, payload) in enumerate(orders(int(2 * RATE * seconds))):
        while True:
            now = time.monotonic() - begin
            due = RATE * (now + 0.7 * WAVE / math.tau * (1 - math.cos(math.tau * now / WAVE)))
            if published < due or now >= seconds:
                break
            await asyncio.sleep(0.05)
        if now >= seconds:
            break
        await stream.publish(subject, payload)
    await client.close()


def _picture(url: str, target: Path, width: int, height: int, home: Path) -> None:
    """Save what Chromium shows of a page."""
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        raise SystemExit(f"one of {', '.join(CHROMIUM)} is needed")
    options = ["headless", "no-sandbox", "no-first-run", "hide-scrollbars", *(f"disable-{name}" for name in QUIET)]
    options += [f"user-data-dir={home / 'chromium'}", f"window-size={width},{height}", f"screenshot={target}"]
    done = subprocess.run(  # noqa: S603
        [program, *(f"--{option}" for option in options), url], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode or not target.exists():
        raise SystemExit(f"{program} took no picture: {done.stderr}")


if __name__ == "__main__":
    main()
