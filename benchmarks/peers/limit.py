"""The limit: a socket that pulls and acknowledges and does nothing else.

`limit.py HOST PORT STREAM CONSUMER PULL [GROUP]`

It does not even look where a message ends: it finds the ack subjects in what it receives, which is enough for messages
that hold no such text, and sends all acknowledgements of a chunk in one write. Pulls overlap, so that the server
always has one to serve. It goes on until it is ended by a signal.

With a priority group, the consumer is pinned and acknowledges up to a message: one acknowledgement for each chunk.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys

PULLS = 5
"""Pulls of PULL messages under way, so that some always wait at the server while one is being served."""
CHUNK = 1 << 17
EXPIRES = 10 * 60 * 10**9


def main() -> None:
    """Pull and acknowledge."""
    host, port, stream, consumer, batch, *groups = sys.argv[1:]
    size = int(batch)
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    inbox = f"in{os.getpid()}"
    connection.sendall(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n')
    connection.sendall(f"SUB {inbox} 1\r\n".encode())

    def pull_of(**more: str | int) -> bytes:
        request = json.dumps({"batch": size, "expires": EXPIRES, **more})
        return f"PUB $JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer} {inbox} {len(request)}\r\n{request}\r\n".encode()

    pull = pull_of()
    ack_subjects = re.compile(rb"MSG \S+ 1 (\$JS\.ACK\.\S+) [\d ]+\r\n").findall
    tail = b""
    under_way = 0
    if groups:  # the first message names the pin
        connection.sendall(pull_of(group=groups[0], batch=1))
        while not (pin := re.search(rb"Nats-Pin-Id: (\w+)\r\n.*\r\n$", tail, re.DOTALL)):
            tail += connection.recv(CHUNK)
        pull = pull_of(group=groups[0], id=pin[1].decode())
        under_way = 1
    while True:
        pulls = PULLS - -(-under_way // size)
        if pulls > 0:
            connection.sendall(pull * pulls)
            under_way += pulls * size
        data = connection.recv(CHUNK)
        if not data:
            raise SystemExit("the server has closed the connection")
        buffer = tail + data
        found = ack_subjects(buffer)
        if found:
            acked = found[-1:] if groups else found
            connection.sendall(b"PUB " + b" 4\r\n+ACK\r\nPUB ".join(acked) + b" 4\r\n+ACK\r\n")
            under_way -= len(found)
        if b"\r\nPING\r\n" in buffer:
            connection.sendall(b"PONG\r\n")
        tail = buffer[max(0, buffer.rfind(b"\r\n")) :]  # behind it lies at most one incomplete line


if __name__ == "__main__":
    main()
