"""A TCP link to a server on this host that can be slow, cut, or lose what comes back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Self


class Link:
    """Hands connections on to `port`.

    `cut_after`: client bytes after which a connection breaks; `lose_answers`: how many answers break theirs instead of
    arriving; `rate`, `answer_rate`: bytes per second of the client and of the server. They may be changed at any time.
    """

    def __init__(
        self,
        port: int,
        *,
        cut_after: int | None = None,
        lose_answers: int = 0,
        rate: int | None = None,
        answer_rate: int | None = None,
    ) -> None:
        self.target = port
        self.cut_after, self.lose_answers, self.rate, self.answer_rate = cut_after, lose_answers, rate, answer_rate
        self.passed = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # or much seems sent that is not
        self.port = int(self._listening.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            with self._lock:
                self._open |= {client, server}
            for work in (self._up, self._down):
                threading.Thread(target=work, args=(client, server), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := client.recv(16 << 10):
                if self.rate is not None:
                    time.sleep(len(data) / self.rate)
                if self.cut_after is not None and sent + len(data) > self.cut_after:
                    break
                server.sendall(data)
                sent += len(data)
                self.passed += len(data)
        self._break(client, server)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(64 << 10):
                if self.lose_answers > 0 and not data.startswith(b"HTTP/1.1 100"):
                    self.lose_answers -= 1
                    break
                if self.answer_rate is not None:
                    time.sleep(len(data) / self.answer_rate)
                client.sendall(data)
        self._break(client, server)

    def _break(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
            with self._lock:
                self._open.discard(end)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which close alone does not
        self._listening.close()
        with self._lock:
            left = list(self._open)
        self._break(*left)
